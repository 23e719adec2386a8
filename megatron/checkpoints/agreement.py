"""Is this config still the run's? Compared key by key before anything is loaded.

A resumed run must be the run that was saved: another model, another order of the data or another
meaning of the optimizer is refused, with the ways out. What may differ is named in `FREE`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoints.earlier_runs import meaning_then
from megatron.checkpoints.saved_config import RESOLVED, read_config_file
from megatron.errors import CheckpointError
from megatron.neox_arguments import GROUPS, OWNER, NeoXArgs
from megatron.neox_arguments.catalogue import canonical_method

__all__ = ["Difference", "check_agreement", "differences"]

COMPARED_GROUPS = ("model", "optimization", "data", "tokenizer")
COMPARED_BESIDES = ("seed",)
FREE = frozenset(
    {
        # the same numbers by other means
        "attention_engine", "attention_pruning", "use_cpu_initialization",
        "scaled_upper_triang_masked_softmax_fusion", "scaled_masked_softmax_fusion",
        "bias_dropout_fusion", "rope_fusion", "layernorm_fusion",
        "checkpoint_activations", "checkpoint_num_layers", "partition_activations",
        "synchronize_each_layer", "contiguous_checkpointing", "checkpoint_in_cpu",
        "profile_backward", "activation_checkpointing", "num_workers", "mmap_warmup",
        "data_impl", "data_cache_dir",
        # belongs to the layout, which has a check and a tool of its own
        "zero_optimization", "output_layer_parallelism", "make_vocab_size_divisible_by",
        "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "communication_data_type",
        "prescale_gradients", "gradient_predivide_factor", "fp32_allreduce",
        "precision", "fp16", "bf16", "data_types",
        # compared by what they mean, see below and `resuming`
        "train_iters", "train_batch_size", "vocab_size",
        # only the start of a run used them
        "init_method", "output_layer_init_method", "init_method_std",
        # about validation, or about when to give up
        "seq_length_val", "max_consecutive_nonfinite", "exit_on_divergence",
        "override_lr_scheduler", "use_checkpoint_lr_scheduler",
    }
)  # fmt: skip
"""Keys of the compared groups that a resumed run may set differently."""
SCHEDULE = frozenset(
    {"lr_decay_rule", "lr_decay_style", "lr_decay_iters", "min_lr", "warmup", "lr"}
)
"""Free when the config says whose schedule counts, its own or the checkpoint's."""
PATHS = frozenset(
    {"data_path", "train_data_paths", "valid_data_paths", "test_data_paths", "vocab_file",
     "merge_file"}
)  # fmt: skip
"""Files may move to another directory; their contents are compared by the run's manifest."""


class Difference(tuple[str, Any, Any]):
    """A key, its value in the checkpoint, and its value now."""

    __slots__ = ()

    def __str__(self) -> str:
        key, saved, now = self
        return f"{key} is {_short(saved)} in the checkpoint and {_short(now)} in the config"


def check_agreement(
    directory: Path, args: NeoXArgs, *, batch_size: int | None, saved_batch_size: int | None
) -> list[str]:
    """Refuse to resume `directory` (a global_stepN) under a config that is another run's.

    Returns lines worth telling: keys that `allow_changed` lets differ, and a longer training.
    """
    path = directory / "configs" / RESOLVED
    if not path.is_file():
        return [f"{directory}: has no configs/{RESOLVED}; its config is not compared with this one"]
    saved = read_config_file(path)
    saved |= meaning_then(saved)
    found = differences(saved, args)
    if saved_batch_size and batch_size and saved_batch_size != batch_size:
        found.append(Difference(("train_batch_size", saved_batch_size, batch_size)))
    allowed = set(args.checkpoint.allow_changed or ())
    refused = [one for one in found if allowed.isdisjoint({one[0], one[0].partition(".")[0]})]
    if refused:
        keys = ", ".join(dict.fromkeys(one[0] for one in refused))
        raise CheckpointError(
            f"{directory}: this config is not the one it was trained with: "
            f"{'; '.join(map(str, refused))}. Set it back; or start a new run with another `save` "
            "(and `finetune: true` to begin from these weights); or, to continue with the change, "
            f"add allow_changed: [{keys}]."
        )
    lines = [f"{one}, as allow_changed says" for one in found]
    before, now = saved.get("train_iters"), args.optimization.train_iters
    if isinstance(before, int) and now is not None and now != before:
        lines.append(
            f"train_iters is {now}, it was {before}: the rate decays over the new number unless "
            "lr_decay_iters is set, and more passes over the data would shuffle it anew"
        )
    return lines


def differences(saved: Mapping[str, Any], args: NeoXArgs) -> list[Difference]:
    """Keys that decide what the run computes and are not what they were."""
    now = args.to_dict()
    options = args.optimization
    chosen = options.override_lr_scheduler or options.use_checkpoint_lr_scheduler
    free = FREE | (SCHEDULE if chosen else frozenset())
    keys = [key for key, group in OWNER.items() if group in COMPARED_GROUPS and key not in free]
    found = []
    for key in [*keys, *COMPARED_BESIDES]:
        default = _default(key)
        before, after = saved.get(key, default), now.get(key, default)
        if key == "pos_emb":
            before, after = _canonical(before), _canonical(after)
        if key == "optimizer":
            found += _optimizer_differences(before, after, free)
        elif _plain(key, before) != _plain(key, after):
            found.append(Difference((key, before, after)))
    return found


def _optimizer_differences(before: Any, after: Any, free: frozenset[str]) -> list[Difference]:
    """`optimizer: {type, params: {...}}`, one difference per value."""
    flat = [_flat_optimizer(value) for value in (before, after)]
    return [
        Difference((f"optimizer.{name}", flat[0].get(name), flat[1].get(name)))
        for name in sorted({*flat[0], *flat[1]})
        if name.removeprefix("params.") not in free and flat[0].get(name) != flat[1].get(name)
    ]


def _flat_optimizer(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {}
    kind = str(value.get("type", "")).lower()
    params = value.get("params")
    inner = params if isinstance(params, dict) else {}
    # Several names for one and the same arithmetic.
    adam = ("adam", "adamw", "fused_adam", "cpu_adam", "cpu_torch_adam")
    return {
        "type": "adam" if kind in adam else kind,
        **{f"params.{name}": _number(item) for name, item in inner.items()},
    }


def _number(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_number(item) for item in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else value


def _canonical(name: Any) -> Any:
    return canonical_method(name) if isinstance(name, str) else name


def _default(key: str) -> Any:
    """The value of a key that an older version did not know, or that was left out as null."""
    default = GROUPS[OWNER[key]].model_fields[key].get_default(call_default_factory=True)
    return default.model_dump(exclude_none=True) if hasattr(default, "model_dump") else default


def _plain(key: str, value: Any) -> str:
    if key in PATHS and value is not None:
        value = [Path(str(item)).name for item in (value if isinstance(value, list) else [value])]
    return json.dumps(_number(value), sort_keys=True, default=str)


def _short(value: Any) -> str:
    return "not set" if value is None else f"{value!r:.80}"
