"""NeoXArgs: the whole config, loaded, validated once, frozen."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import PrivateAttr, ValidationError

from megatron.atomic_files import fingerprint
from megatron.errors import ConfigError
from megatron.neox_arguments import validation
from megatron.neox_arguments.declared_keys import GROUPS, OWNER, ConfigGroups
from megatron.neox_arguments.deepspeed_config import build_deepspeed_config, unknown_zero_keys
from megatron.neox_arguments.model_keys import ModelArgs, padded_vocab_size
from megatron.neox_arguments.normalize import IGNORED, normalize, resolve_precision
from megatron.neox_arguments.optimization_keys import BatchPlan, plan_batch
from megatron.neox_arguments.validation import describe_validation_error
from megatron.neox_arguments.values import Group, copy_plain
from megatron.neox_arguments.yaml_files import dump_yaml, merge, parse_set, parse_yaml, read_layer


class NeoXArgs(ConfigGroups):
    """A validated config. Keys are in typed groups: `args.model.num_layers`."""

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)
    _written: dict[str, Any] = PrivateAttr(default_factory=dict)
    _script: str | None = PrivateAttr(default=None)

    @classmethod
    def from_files(
        cls,
        paths: Sequence[str | Path],
        *,
        overrides: Sequence[str | Path] = (),
        sets: Sequence[str] = (),
    ) -> NeoXArgs:
        """Merge YAML files, then override files, then `key=value` assignments."""
        base = [read_layer(path) for path in paths]
        above = [read_layer(path) for path in overrides]
        assigned = [parse_set(text) for text in sets]
        layers = [*base, *above, *assigned]
        problems = [problem for layer in layers for problem in layer.problems]
        args = cls._from_canonical(merge(base, [*above, *assigned]), problems)
        args._sources.update(_named_texts([(layer.source, layer.text) for layer in base + above]))
        return args

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> NeoXArgs:
        """From one flat mapping, in any spelling a YAML file may use."""
        source = "config"
        plain = copy_plain(dict(values) if isinstance(values, Mapping) else values, source)
        return cls._from_canonical(*normalize(plain, source))

    @classmethod
    def _from_canonical(cls, values: dict[str, Any], problems: list[str]) -> NeoXArgs:
        """`problems`: what is already known to be wrong; all of it is raised at once."""
        values = resolve_precision(values)
        problems += unknown_zero_keys(values.get("zero_optimization"))
        grouped: dict[str, dict[str, Any]] = {name: {} for name in GROUPS}
        for key, value in values.items():
            if value is not None:
                grouped[OWNER[key]][key] = value
        built: dict[str, Group] = {}
        for name, group in GROUPS.items():
            try:
                built[name] = group.model_validate(grouped[name])
            except ValidationError as error:
                problems += describe_validation_error(error, group)
        if isinstance(model := built.get("model"), ModelArgs):
            problems += validation.other_attention(model)
        if problems:
            raise ConfigError("\n".join(problems))
        args = cls.model_validate(built)
        validation.check(args)
        return args

    def __eq__(self, other: object) -> bool:
        """The same values; which files they came from does not matter."""
        return isinstance(other, NeoXArgs) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(self.to_yaml())

    # GPT-NeoX's own names of what its scripts and tests do with their arguments.

    @classmethod
    def from_ymls(cls, paths: Sequence[str | Path], overwrite_values: Any = None) -> NeoXArgs:
        """Files, and values that take the place of theirs."""
        args = cls.from_files([Path(path) for path in paths])
        if overwrite_values:
            return args.replace(**overwrite_values)
        for source, text in args.sources.items():
            found = parse_yaml(text, source) or {}
            args._written.update({key.replace("-", "_"): value for key, value in found.items()})
        return args

    @classmethod
    def consume_deepy_args(cls, input_args: Sequence[str] | None = None) -> NeoXArgs:
        """deepy.py's command line, `train.py CONF ...`."""
        script, *rest = sys.argv[1:] if input_args is None else input_args
        args = cls.consume_neox_args(["deepy.py", *rest])
        args._script = script
        return args

    @classmethod
    def consume_neox_args(cls, input_args: Sequence[str] | None = None) -> NeoXArgs:
        """The command line of a started script, its name first."""
        from megatron.neox_arguments.command_line import parse_command_line

        script, *rest = sys.argv if input_args is None else input_args
        return parse_command_line(script, rest)[0]

    def get_deepspeed_main_args(self) -> list[str]:
        """The script and this config as one argument: what each process is started with."""
        from megatron.neox_arguments.command_line import encode_config

        return [self._script or "train.py", "--megatron_config", encode_config(self)]

    def update_value(self, key: str, value: Any) -> None:
        """Another value of a key of the launcher or logging group, in place; no other can change.

        What a run computes stays what was validated: `replace` gives a new config.
        """
        if key == "user_script":
            self._script = value
            return
        if OWNER.get(key) not in _NOT_IN_HASH:
            raise ConfigError(f"{key} is read only. Use args.replace({key}=...), a new config.")
        self.__dict__[OWNER[key]] = getattr(self.replace(**{key: value}), OWNER[key])

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            if name in OWNER:
                self.update_value(name, value)
            else:
                super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """`args.hidden_size`: a key of any group; a block is a mapping, as its file wrote it."""
        if name in OWNER:
            value = getattr(getattr(self, OWNER[name]), name)
            if not isinstance(value, Group):
                return value
            return self._written.get(name, value.model_dump(exclude_none=True))
        if name in IGNORED:
            return self._written.get(name)
        return super().__getattr__(name)  # type: ignore[misc]

    @property
    def megatron_config(self) -> dict[str, Any]:
        """What `get_deepspeed_main_args` passes on."""
        return self.to_dict()

    @property
    def sources(self) -> dict[str, str]:
        """File name -> YAML text as the user wrote it, to be kept beside checkpoints."""
        return dict(self._sources)

    def with_sources(self, sources: Mapping[str, str]) -> NeoXArgs:
        """The same config, remembering these files."""
        copy = self.model_copy()
        copy._sources = dict(sources)
        return copy

    def to_dict(self) -> dict[str, Any]:
        """Flat and canonical, without keys that are null. `from_dict` gives the same config."""
        flat: dict[str, Any] = {}
        for _, group in self:
            flat.update(group.model_dump(exclude_none=True))
        return copy_plain(flat, "config")

    def to_yaml(self) -> str:
        """The resolved config as YAML, in the order of the groups."""
        return dump_yaml(self.to_dict())

    def config_hash(self) -> str:
        """Short fingerprint of what the run computes: all but the launcher and logging groups."""
        values = {
            key: value for key, value in self.to_dict().items() if OWNER[key] not in _NOT_IN_HASH
        }
        return fingerprint(values)

    @property
    def steps_to_train(self) -> int:
        """0 for a config that only evaluates."""
        return 0 if self.evaluation.do_train is False else self.optimization.train_iters or 0

    def batch_plan(self, world_size: int) -> BatchPlan:
        """Batch sizes for this many processes."""
        return plan_batch(self.optimization, self.parallel, world_size)

    def padded_vocabulary(self, size: int) -> int:
        """Rows of the embedding for so many tokens."""
        divisor = self.model.make_vocab_size_divisible_by
        return padded_vocab_size(size, divisor, self.parallel.model_parallel_size)

    def deepspeed_config(self, world_size: int) -> dict[str, Any]:
        """What DeepSpeed's engine needs, without the optimizer."""
        return build_deepspeed_config(self, world_size)

    def replace(self, **changes: Any) -> NeoXArgs:
        """A new validated config with some flat keys changed."""
        return NeoXArgs.from_dict({**self.to_dict(), **changes}).with_sources(self._sources)


# Where a run executes and what it prints do not change what it computes.
_NOT_IN_HASH = ("launcher", "logging")


def _named_texts(texts: list[tuple[str, str]]) -> dict[str, str]:
    """Base names where they are unique, so that they can be file names again."""
    names = [Path(source).name for source, _ in texts]
    return {
        name if names.count(name) == 1 else source.replace("/", "_"): text
        for name, (source, text) in zip(names, texts, strict=True)
    }
