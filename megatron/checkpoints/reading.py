"""Reading any checkpoint into one form: whole tensors under canonical names, with its config."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoints.deepspeed_files import read_zero3_shards
from megatron.checkpoints.lazy_weights import by_layer, outlines
from megatron.checkpoints.safe_files import load_mapping, read_object
from megatron.checkpoints.saved_config import (
    args_from,
    is_ours,
    read_saved_config,
    with_model_of,
)
from megatron.checkpoints.sharding import (
    EMBEDDING,
    Sharding,
    canonical_shard,
    merge_shards,
    share_positions,
    strip_prefix,
)
from megatron.checkpoints.store import CHECKSUMS, CheckpointStore, problems_of, read_checksums
from megatron.checkpoints.universal import PARAMETERS, is_universal, read_weights
from megatron.errors import CheckpointError
from megatron.model import ModelSpec
from megatron.model.layer_list import FIRST_LAYER
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.allowed_code import LAYER_FILE, RANK_FILE, TAG, ZERO_FILE
from megatron.neox_arguments.model_keys import (
    GATED_ACTIVATIONS,
    ModelArgs,
    intermediate_size_for,
)
from megatron.neox_arguments.run_keys import TokenizerArgs

# The files of a checkpoint directory: DeepSpeed's, or Hugging Face's.

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of one checkpoint, by model-parallel rank."""

    directory: Path
    root: Path
    """Where `latest` is, or the directory itself."""
    is_hf: bool = False
    layer_files: dict[tuple[int, int], Path] = field(default_factory=dict)
    """(layer index, model-parallel rank) -> file; written with pipe_parallel_size >= 1."""
    mp_files: dict[int, Path] = field(default_factory=dict)
    zero_model_files: dict[tuple[int, int], Path] = field(default_factory=dict)
    """(data-parallel rank, model-parallel rank) -> file; ZeRO stage 3 only."""
    zero_optimizer_files: dict[tuple[int, int], Path] = field(default_factory=dict)

    @property
    def mp_size(self) -> int:
        """How many model-parallel shards there are."""
        ranks = {rank for _, rank in self.layer_files} or set(self.mp_files)
        ranks |= {rank for _, rank in self.zero_model_files}
        return max(ranks, default=-1) + 1

    @property
    def step_in_name(self) -> int | None:
        """N of `global_stepN`."""
        match = TAG.fullmatch(self.directory.name)
        return int(match[1]) if match else None

    @property
    def is_zero3(self) -> bool:
        """Whether the parameters are partitioned over the data-parallel ranks."""
        return bool(self.zero_model_files)

    @property
    def is_universal(self) -> bool:
        """Whether every parameter is stored whole, in a folder of its own."""
        return is_universal(self.directory)

    @property
    def has_weights(self) -> bool:
        """Whether there is anything to read here."""
        return bool(self.layer_files or self.mp_files or self.zero_model_files)

    @property
    def hf_weights(self) -> list[Path]:
        """A Hugging Face folder's files of weights, in the one format that is read."""
        for pattern in ("*.safetensors", "pytorch_model*.bin"):
            if found := [path for path in self.directory.glob(pattern) if path.is_file()]:
                return sorted(found)
        return []

    def to_verify(self) -> list[Path]:
        """The files of weights and config; optimizer states are not verified."""
        if self.is_hf:
            config = self.directory / "config.json"
            return sorted([*self.hf_weights, *self._summed_tokenizer(), config])
        files = [*self.layer_files.values(), *self.mp_files.values()]
        if self.is_zero3:
            files += [*self.zero_model_files.values(), *self.zero_optimizer_files.values()]
        if self.is_universal:
            parameters = self.directory / PARAMETERS
            folders = [entry for entry in parameters.iterdir() if not entry.is_symlink()]
            files += [folder / "fp32.pt" for folder in folders if folder.is_dir()]
        return sorted([*files, *(self.directory / "configs").glob("*.y*ml")])

    def _summed_tokenizer(self) -> list[Path]:
        """Our conversions sum the tokenizer too; older ones did not, so it cannot be verified."""
        with contextlib.suppress(CheckpointError):  # an unreadable list is reported with the rest
            if TOKENIZER in (read_checksums(self.directory) or {}):
                return [self.directory / TOKENIZER]
        return []


def find_files(path: str | Path, iteration: int | None = None) -> CheckpointFiles:
    """The checkpoint at `path`: a run's directory, one `global_stepN`, or a Hugging Face folder."""
    root = Path(path)
    if not root.exists():
        raise CheckpointError(f"{root}: no such checkpoint directory")
    if not root.is_dir():
        raise CheckpointError(f"{root}: is a file; give the directory that holds the checkpoint")
    files = CheckpointFiles(root, root, is_hf=True) if _is_hf(root) else _scan(root, root)
    if files.is_hf or files.has_weights:
        if iteration is not None and files.step_in_name not in (None, iteration):
            raise CheckpointError(
                f"iteration = {iteration}: {root} is one checkpoint, of step {files.step_in_name}; "
                "give the directory above it, or leave the iteration out"
            )
        return files
    store = CheckpointStore(root)
    step = store.find(iteration)
    if step is None:
        raise CheckpointError(
            f"{root}: holds no checkpoint; expected `latest`, `global_stepN/`, or a Hugging Face "
            "config.json"
        )
    files = _scan(store.path(step), root)
    if not files.has_weights:
        _check_no_file_is_missing(files.directory)
        raise CheckpointError(
            f"{files.directory}: holds neither layer_LL-model_MM-model_states.pt nor "
            "mp_rank_MM_model_states.pt files"
        )
    return files


def _check_no_file_is_missing(directory: Path) -> None:
    listed = read_checksums(directory) or {}
    missing = [name for name in listed if not (directory / name).is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"{directory} is damaged: {', '.join(missing[:3])}{more} missing. Copy it again, or "
            "take another step (--iteration N)."
        )


def open_files(path: str | Path, iteration: int | None = None) -> CheckpointFiles:
    """The checkpoint at `path`, its weights and config verified by their checksums.

    Every command opens checkpoints here. A checkpoint without checksums gets a warning.
    """
    files = find_files(path, iteration)
    step = files.step_in_name
    if step is not None:
        verified = CheckpointStore(files.directory.parent).verify(step, files.to_verify())
    else:
        problems = problems_of(files.directory, files.to_verify())
        if problems:
            raise CheckpointError(
                f"{files.directory} is damaged: {'; '.join(problems)}. Convert or copy it again; "
                f"if you changed it yourself, delete {CHECKSUMS}."
            )
        verified = (files.directory / CHECKSUMS).is_file()
    if not verified:
        warnings.warn(
            f"{files.directory}: unverified, because it has no {CHECKSUMS} (another program's, or "
            "a conversion by an older version)",
            stacklevel=3,
        )
    return files


def _is_hf(directory: Path) -> bool:
    config = directory / "config.json"
    return config.is_file() and "model_type" in read_object(config)


def with_tokenizer_of_folder(args: NeoXArgs) -> NeoXArgs:
    """A config that names no tokenizer has that of the Hugging Face folder which it loads."""
    load, own = args.checkpoint.load, args.tokenizer
    named = own.vocab_file or own.tokenizer_type != TokenizerArgs().tokenizer_type
    if named or load in (None, "auto") or not _is_hf(Path(load)):
        return args
    from megatron.checkpoints.hf.companions import tokenizer_settings

    return args.replace(**tokenizer_settings(Path(load)))


def _scan(directory: Path, root: Path) -> CheckpointFiles:
    files = CheckpointFiles(directory, root)
    # Reading a FIFO or a device would block.
    for entry in sorted(entry for entry in directory.iterdir() if entry.is_file()):
        if match := LAYER_FILE.match(entry.name):
            files.layer_files[int(match[1]), int(match[2])] = entry
        elif match := RANK_FILE.match(entry.name):
            files.mp_files[int(match[1])] = entry
        elif match := ZERO_FILE.search(entry.name):
            found = files.zero_optimizer_files if match[3] == "optim" else files.zero_model_files
            found[int(match[1]), int(match[2])] = entry
    _check_complete(files)
    return files


def _check_complete(files: CheckpointFiles) -> None:
    missing = [
        f"layer_{layer:02d}-model_{rank:02d}-model_states.pt"
        for layer in {layer for layer, _ in files.layer_files}
        for rank in range(files.mp_size)
        if (layer, rank) not in files.layer_files
    ]
    if not files.layer_files and not files.is_zero3:
        missing = [
            f"mp_rank_{rank:02d}_model_states.pt"
            for rank in range(files.mp_size)
            if rank not in files.mp_files
        ]
    if missing:
        raise CheckpointError(
            f"{files.directory}: incomplete, missing {', '.join(sorted(missing))}; "
            "copy the whole directory again"
        )


# The content of a checkpoint.


@dataclass(frozen=True)
class Checkpoint:
    """A model read from disk: its config, its weights and where they came from."""

    weights: Mapping[str, Tensor]
    args: NeoXArgs
    files: CheckpointFiles
    kind: str
    """native, kerple (the official code), neox, or hf."""
    iteration: int

    @property
    def padded_vocab_size(self) -> int:
        """From the weights: the config alone may give another."""
        return outlines(self.weights)[EMBEDDING].shape[0]

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec.from_args(self.args, self.padded_vocab_size)

    @property
    def num_parameters(self) -> int:
        return sum(outline.numel() for outline in outlines(self.weights).values())


def read_checkpoint(
    path: str | Path,
    *,
    iteration: int | None = None,
    config: NeoXArgs | Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Any checkpoint: ours, official KERPLE, GPT-NeoX (both generations), or Hugging Face.

    A `config` that describes another model than the one saved inside is refused.
    """
    files = open_files(path, iteration)
    if files.is_hf:
        from megatron.checkpoints.hf.folder import read_hf_checkpoint

        checkpoint = read_hf_checkpoint(files)
    else:
        checkpoint = _read_neox_checkpoint(files, config)
    if config is None:
        return checkpoint
    given = at_step(args_from(config, files.directory), checkpoint.iteration)
    return replace(checkpoint, args=with_model_of(checkpoint.args, given, files.directory))


def _read_neox_checkpoint(
    files: CheckpointFiles, config: NeoXArgs | Mapping[str, Any] | None
) -> Checkpoint:
    """From layer files, rank shards or whole tensors; `config` is used if none was saved."""
    args, native = saved_args(files, config)
    shards = [canonical_shard(shard, args.model) for shard in read_shards(files)]
    weights = merge_shards(shards, _sharding(args.model, shards, native=native))
    if EMBEDDING not in weights:
        raise CheckpointError(f"{files.directory}: holds no word_embeddings.weight at layer 0")
    if not (native and args.model.kerple_share == "per_layer"):
        weights = share_positions(weights)
        share = "per_layer" if any(".positions." in name for name in weights) else "all"
        args = args if args.model.kerple_share == share else args.replace(kerple_share=share)
    if not native:
        _check_attention_is_used(args.model, files.directory)
        changes = _decided_by_weights(weights, args.model)
        args = args.replace(**changes) if changes else args
    iteration = _iteration(files)
    args = at_step(args, iteration)
    kind = "native" if native else "kerple" if "kerple" in args.model.pos_emb else "neox"
    found: Mapping[str, Tensor] = weights
    if files.layer_files and files.mp_size == 1 and not (files.is_zero3 or files.is_universal):
        model = args.model
        found = by_layer(weights, lambda i: canonical_shard(_read_layers(files, 0, i), model))
    return Checkpoint(found, args, files, kind, iteration)


def at_step(args: NeoXArgs, step: int) -> NeoXArgs:
    """The config of the model that a run had after this step: rotary_fade_iters in numbers."""
    if args.model.rotary_fade_iters is None:
        return args
    return args.replace(rotary_angles=args.model.rotary_share(step), rotary_fade_iters=None)


def saved_args(
    files: CheckpointFiles, config: NeoXArgs | Mapping[str, Any] | None = None
) -> tuple[NeoXArgs, bool]:
    """The config saved with the weights, and whether this code wrote it; without any, `config`."""
    try:
        saved = read_saved_config(files.directory, files.root)
    except CheckpointError:
        if config is None:
            raise
        return args_from(config, files.directory), False
    return args_from(saved, files.directory), is_ours(saved)


def _sharding(model: ModelArgs, shards: list[dict[str, Tensor]], *, native: bool) -> Sharding:
    """The sharding; the head's is inferred from its shape, since the defaults differ."""
    head = shards[0].get(f"{model.num_layers + 4}.final_linear.weight")
    if head is not None and len(shards) > 1:
        columns = {model.hidden_size: "column", model.hidden_size // len(shards): "row"}
        cut = columns.get(head.shape[-1], model.output_layer_parallelism)
        model = model.model_copy(update={"output_layer_parallelism": cut})
    return Sharding.of(model, neox=not native)


def _decided_by_weights(weights: dict[str, Tensor], model: ModelArgs) -> dict[str, Any]:
    """Keys that the config of another program has otherwise than its weights, and their values."""
    changes: dict[str, Any] = {}
    last = weights.get(f"{FIRST_LAYER}.mlp.dense_4h_to_h.weight")
    gated = model.activation in GATED_ACTIVATIONS
    if last is not None and gated and last.shape[1] != model.ffn_size:
        # GPT-NeoX has had several rules for gated MLPs
        size = intermediate_size_for(last.shape[1], model.activation)
        changes |= {"intermediate_size": size, "mlp_multiple_of": 1}
    has_bias = f"{FIRST_LAYER}.input_layernorm.bias" in weights
    if model.norm == "layernorm" and has_bias != model.use_bias_in_norms:  # GPT-NeoX ignores it
        changes["use_bias_in_norms"] = has_bias
    return changes


def _check_attention_is_used(model: ModelArgs, directory: Path) -> None:
    """Refuse a GPT-NeoX checkpoint whose attention is another function there than here."""
    if model.layer_pattern is not None:
        raise CheckpointError(
            f"{directory}: attention_config with `local`: in GPT-NeoX these layers see blocks "
            "(sparsity_config), here a window. Train it again here."
        )
    if model.gpt_j_residual and not model.use_bias_in_mlp and model.activation in GATED_ACTIVATIONS:
        raise CheckpointError(
            f"{directory}: gpt_j_residual: true with use_bias_in_mlp: false and activation: "
            f"{model.activation}. GPT-NeoX drops the output of attention in such a model, so that "
            "its weights compute another function there than here. Train it again here, or with "
            "use_bias_in_mlp: true there."
        )


def read_shards(files: CheckpointFiles) -> list[dict[str, Tensor]]:
    """Each model-parallel rank's tensors, named `<index>.<name>`."""
    if files.is_universal:
        return [read_weights(files.directory)]
    if files.is_zero3:
        return read_zero3_shards(files)
    if files.layer_files:
        return [_read_layers(files, rank) for rank in range(files.mp_size)]
    return [_read_mp_file(files.mp_files[rank]) for rank in range(files.mp_size)]


def _read_layers(files: CheckpointFiles, rank: int, only: int | None = None) -> dict[str, Tensor]:
    return {
        f"{layer}.{name}": tensor
        for (layer, shard), path in files.layer_files.items()
        if shard == rank and only in (None, layer)
        for name, tensor in load_mapping(path).items()
        if isinstance(tensor, Tensor)
    }


def _read_mp_file(path: Path) -> dict[str, Tensor]:
    module = load_mapping(path).get("module")
    if not isinstance(module, dict):
        raise CheckpointError(f"{path}: holds no weights under `module`")
    return {
        strip_prefix(name, path): tensor
        for name, tensor in module.items()
        if isinstance(tensor, Tensor)
    }


def _iteration(files: CheckpointFiles) -> int:
    if files.step_in_name is not None:
        return files.step_in_name
    if files.mp_files:
        state = load_mapping(files.mp_files[min(files.mp_files)])
        step = state.get("iteration", state.get("global_steps", 0))
        return int(step) if isinstance(step, int) else 0
    return 0
