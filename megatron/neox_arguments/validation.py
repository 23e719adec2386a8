"""Checks that need more than one key. Each message: the key, the value, the fix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from megatron.errors import ConfigError, did_you_mean
from megatron.neox_arguments.catalogue import canonical_method, check_position_name
from megatron.neox_arguments.declared_keys import KNOWN_KEYS, nested_model
from megatron.neox_arguments.deepspeed_config import optimizer_family
from megatron.neox_arguments.layer_pattern import check_layer_pattern, knows_positions
from megatron.neox_arguments.model_keys import LAYER_KEYS, intermediate_size_for
from megatron.neox_arguments.normalize import unknown_key
from megatron.neox_arguments.values import Group, declared

if TYPE_CHECKING:
    from megatron.neox_arguments.arguments import NeoXArgs
    from megatron.neox_arguments.deepspeed_config import ZeroBlock
    from megatron.neox_arguments.model_keys import ModelArgs
    from megatron.neox_arguments.optimization_keys import OptimizationArgs
    from megatron.neox_arguments.run_keys import (
        CheckpointArgs,
        DataArgs,
        EvaluationArgs,
        LauncherArgs,
        ParallelArgs,
    )


def check(args: NeoXArgs) -> None:
    """Raise ConfigError at the first combination that cannot work."""
    _check_heads(args.model, args.parallel.model_parallel_size)
    check_position_name(args.model.pos_emb)
    _check_positions(args.model)
    _check_rotary_beside(args.model)
    _check_attention_config(args.model)
    _check_layers(args.model)
    _check_parallel(args.parallel, args.optimization.zero_optimization, args.model.num_layers)
    _check_sequences(args.parallel, args.model)
    _check_schedule(args.optimization)
    _check_optimizer(args.optimization, args.parallel.model_parallel_size)
    _check_checkpoints(args.checkpoint)
    _check_fresh_positions(args.model, args.checkpoint)
    for name in args.checkpoint.allow_changed or ():
        if name.partition(".")[0] not in KNOWN_KEYS:
            raise ConfigError(unknown_key(name, "allow_changed"))
    split_shares(args.data.split)
    _check_blends(args.data)
    if args.data.randomized_positions is not None:
        _check_randomized(args.data.randomized_positions, args.data, args.model)
    if args.optimization.train_epochs is not None:
        _check_epochs(args.data)
    _check_evaluation(args.evaluation, args.model.validation_length)
    _check_launcher(args.launcher)
    start, stop = args.logging.profile_step_start, args.logging.profile_step_stop
    if stop <= start and (args.logging.profile or args.logging.memory_profiling):
        raise ConfigError(
            f"profile_step_stop = {stop} is not after profile_step_start = {start}. Raise it."
        )
    for _, group in args:
        _check_not_implemented(group)


def _check_not_implemented(group: Group) -> None:
    """Keys of GPT-NeoX that mean something only when true."""
    for key, reason in declared("refused", type(group)).items():
        if getattr(group, key):
            raise ConfigError(f"{key} = true is not implemented here: {reason}. Remove it.")


def _divisors_near(number: int, wanted: int) -> int:
    return next(size for size in range(min(wanted, number), 0, -1) if number % size == 0)


def _check_divides(key: str, size: int, what: str, total: int, otherwise: str = "") -> None:
    if total % size:
        raise ConfigError(
            f"{key} = {size} does not divide {what} = {total}. "
            f"Use {key} {_divisors_near(total, size)}{otherwise}."
        )


def _check_heads(model: ModelArgs, mp: int) -> None:
    hidden, heads = model.hidden_size, model.num_attention_heads
    if hidden % heads and model.kv_channels is None:
        up = -(-hidden // heads) * heads
        raise ConfigError(
            f"hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}. "
            f"Use hidden_size {up}, another number of heads, or kv_channels for their width."
        )
    _check_divides("model_parallel_size", mp, "num_attention_heads", heads, " or more heads")
    _check_grouped_heads(model, mp)
    _check_norms(model)
    if model.ffn_size % mp:
        raise ConfigError(
            f"model_parallel_size = {mp} does not divide the MLP width {model.ffn_size}. "
            f"Use intermediate_size {_wider(model, mp)}."
        )


def _check_grouped_heads(model: ModelArgs, mp: int) -> None:
    heads, groups = model.num_attention_heads, model.num_kv_heads
    if groups is not None:
        _check_divides("num_kv_heads", groups, "num_attention_heads", heads)
        _check_divides("model_parallel_size", mp, "num_kv_heads", groups, " or more num_kv_heads")
    over_all_heads = {
        "use_qk_layernorm = true": model.use_qk_layernorm,
        "qk_norm = all_heads": model.qk_norm == "all_heads",
    }
    for setting, chosen in over_all_heads.items():
        if chosen and mp > 1:
            raise ConfigError(
                f"{setting} with model_parallel_size = {mp}: it takes the mean over all heads, and "
                "ranks hold some of them. Use model_parallel_size 1."
            )


def _check_norms(model: ModelArgs) -> None:
    if model.qk_norm is not None and (model.use_qk_layernorm or model.norm != "rmsnorm"):
        other = "use_qk_layernorm = true" if model.use_qk_layernorm else f"norm = {model.norm}"
        raise ConfigError(
            f"qk_norm = {model.qk_norm} with {other}: it is an rmsnorm beside norm: rmsnorm, and "
            "the only norm of queries and keys. Remove one of the two."
        )
    if model.norm_placement == "output" and model.gpt_j_residual:
        raise ConfigError(
            "norm_placement = output with gpt_j_residual = true: the two branches would share no "
            "norm. Remove one of the two."
        )


def _wider(model: ModelArgs, mp: int) -> int:
    """The next intermediate_size whose width tensor parallelism divides."""
    width = -(-model.ffn_size // mp) * mp
    if model.mlp_multiple_of > 1:  # the size is rounded up to a multiple of it
        width = -(-width // (mp * model.mlp_multiple_of)) * mp * model.mlp_multiple_of
    return intermediate_size_for(width, model.activation)


def _check_positions(model: ModelArgs) -> None:
    name = canonical_method(model.pos_emb)
    rows = model.position_rows
    if name == "learned":
        for key, length in (
            ("seq_length", model.seq_length),
            ("seq_length_val", model.validation_length),
        ):
            if length > rows:
                raise ConfigError(
                    f"{key} = {length} is longer than max_position_embeddings = {rows}, and "
                    "pos_emb = learned has no vectors beyond it. Raise max_position_embeddings, "
                    "or use a pos_emb that extrapolates, e.g. kerple_log."
                )
    if name == "sinusoidal" and model.hidden_size % 2:
        raise ConfigError(
            f"hidden_size = {model.hidden_size} is odd; pos_emb = sinusoidal needs an even one."
        )
    if name == "rotary" and int(model.head_dim * model.rotary_pct) < 2:
        raise ConfigError(
            f"rotary_pct = {model.rotary_pct} leaves less than 2 of {model.head_dim} dimensions "
            "per head to rotate. Raise it, or use pos_emb none."
        )
    turns = name == "rotary" or model.rotary_share(0) > 0
    if model.rope_scaling is not None and not turns:
        raise ConfigError(
            f"rope_scaling is set but pos_emb = {model.pos_emb}. Remove it or use pos_emb rotary."
        )


def _check_rotary_beside(model: ModelArgs) -> None:
    """rotary_angles and rotary_fade_iters are of layers whose pos_emb rotates nothing."""
    if model.rotary_share(0) == 0:
        return
    key = "rotary_angles" if model.rotary_fade_iters is None else "rotary_fade_iters"
    if key == "rotary_fade_iters" and model.rotary_angles:
        raise ConfigError(
            f"rotary_fade_iters = {model.rotary_fade_iters} with rotary_angles = "
            f"{model.rotary_angles}: the angles fall from 1. Remove rotary_angles."
        )
    methods = model.methods
    if all(map(knows_positions, methods)):
        raise ConfigError(
            f"{key} with pos_emb = {methods[0]}, which has positions of its own: rotary can stand "
            "beside tables over distance or none. Choose such a pos_emb, or remove the key."
        )


def _check_fresh_positions(model: ModelArgs, checkpoint: CheckpointArgs) -> None:
    """kerple_init: fit reads the rotary model that load_positions: fresh starts from."""
    if model.kerple_init == "fit" and checkpoint.load_positions != "fresh":
        raise ConfigError(
            "kerple_init = fit without load_positions = fresh: the kernel is fitted to the rotary "
            "checkpoint in `load`. Add load_positions: fresh, or use kerple_init flat or official."
        )


def _check_layers(model: ModelArgs) -> None:
    """Each entry of layer_pattern, and the model that it makes of its layers."""
    check_layer_pattern(model, LAYER_KEYS)
    for place, entry in enumerate(model.layer_pattern or ()):
        keys = {key: value for key, value in entry.items() if key != "count"}
        values = {**dict(model), "layer_pattern": None, **keys}
        if "pos_emb" in keys and "rope_scaling" not in keys:
            rotary = canonical_method(keys["pos_emb"]) == "rotary"
            turns = rotary or model.rotary_share(0) > 0
            values["rope_scaling"] = model.rope_scaling if turns else None
        try:
            _check_positions(type(model).model_validate(values))
        except ValidationError as error:
            problems = describe_validation_error(error, type(model))
            raise ConfigError(f"layer_pattern[{place}]: {problems[0]}") from error
        except ConfigError as error:
            raise ConfigError(f"layer_pattern[{place}]: {error}") from error


def other_attention(model: ModelArgs) -> list[str]:
    """The kinds of attention in attention_config that are not implemented."""
    kinds: set[str] = set()
    for entry in model.attention_config or []:
        found = entry[0] if isinstance(entry, list) and entry else []
        kinds |= {str(kind) for kind in (found if isinstance(found, list) else [found])}
    others = sorted(kinds - {"global", "flash"})
    if others == ["local"] and model.layer_pattern is not None:
        return [
            "attention_config with `local` and layer_pattern are both set, and both tell which "
            "layers have a window. Keep layer_pattern."
        ]
    if others == ["local"]:
        return [
            "attention_config: attention type 'local' is not implemented here without a window "
            "(GPT-NeoX's is of blocks, sparsity_config). Set sliding_window_width for its layers."
        ]
    if not others:
        return []
    return [
        f"attention_config: attention type {', '.join(map(repr, others)):.200} is not implemented "
        "here; only `global` is (`flash` means the same), and `local` with sliding_window_width."
    ]


def _check_attention_config(model: ModelArgs) -> None:
    config = model.attention_config
    if config is None:
        return
    wrong = ConfigError(
        f'attention_config = {config!r:.80}: expected a list like [[["global"], '
        f"{model.num_layers}]]."
    )
    layers = 0
    for entry in config:
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], list)):
            raise wrong
        kinds, repeat = entry
        if repeat == "all":
            return
        if isinstance(repeat, bool) or not isinstance(repeat, int) or repeat < 1 or not kinds:
            raise wrong
        layers += len(kinds) * repeat
    if layers != model.num_layers:
        raise ConfigError(
            f"attention_config describes {layers} layers but num_layers = {model.num_layers}. "
            "Remove attention_config: global attention is the default."
        )


def _check_parallel(parallel: ParallelArgs, zero: ZeroBlock, num_layers: int) -> None:
    stage, pp = zero.stage, parallel.pipe_parallel_size
    if stage >= 2 and pp >= 1:
        raise ConfigError(
            f"zero_optimization.stage = {stage} with pipe_parallel_size = {pp}: DeepSpeed's "
            "pipelines need stage 0 or 1. Set pipe_parallel_size: 0, or stage: 1."
        )
    if pp > num_layers:
        raise ConfigError(f"pipe_parallel_size = {pp} is more than num_layers = {num_layers}.")
    if zero.offload_param is not None and zero.offload_param.device != "none" and stage < 3:
        raise ConfigError(
            f"zero_optimization.offload_param needs stage 3, not {stage}. Set stage: 3."
        )


def _check_sequences(parallel: ParallelArgs, model: ModelArgs) -> None:
    shared, mp = parallel.sequence_parallel_size, parallel.model_parallel_size
    if shared == 1:
        return
    what = f"sequence_parallel_size = {shared}"
    for key, length in (("seq_length", model.seq_length), ("seq_length_val", model.seq_length_val)):
        if length is not None and length % shared:
            raise ConfigError(
                f"{what} does not divide {key} = {length}. Use {key} {length // shared * shared}, "
                f"or sequence_parallel_size {_divisors_near(length, shared)}."
            )
    for key, heads in (
        ("num_attention_heads", model.num_attention_heads),
        ("num_kv_heads", model.kv_heads),
    ):
        if heads // mp % shared:
            each = f" / model_parallel_size {mp}" if mp > 1 else ""
            raise ConfigError(
                f"{what} does not divide {key} = {heads}{each}: each process takes whole heads. "
                f"Use sequence_parallel_size {_divisors_near(heads // mp, shared)}."
            )


def _check_schedule(optimization: OptimizationArgs) -> None:
    if optimization.min_lr > optimization.lr:
        raise ConfigError(
            f"min_lr = {optimization.min_lr} is above optimizer.params.lr = {optimization.lr}. "
            "Lower min_lr."
        )
    if optimization.override_lr_scheduler and optimization.use_checkpoint_lr_scheduler:
        raise ConfigError(
            "override_lr_scheduler and use_checkpoint_lr_scheduler contradict each other. Keep one."
        )
    if optimization.lr_decay_style == "wsd":
        _check_wsd(optimization)
    betas = optimization.optimizer.params.betas or ()
    if any(beta >= 1 for beta in betas):
        raise ConfigError(f"optimizer.params.betas = {list(betas)}: each must be below 1.")


def _check_wsd(optimization: OptimizationArgs) -> None:
    last, warmup = optimization.wsd_decay_iters, optimization.warmup * optimization.decay_iters
    if optimization.train_iters and last + warmup > optimization.decay_iters:
        raise ConfigError(
            f"lr_decay_style = wsd: warmup takes {warmup:.0f} and lr_wsd_decay_iters {last} of "
            f"{optimization.decay_iters} steps. Lower one of them."
        )


def _check_optimizer(optimization: OptimizationArgs, mp: int) -> None:
    """Muon turns whole matrices; 8-bit states are Adam's."""
    kind = optimization.optimizer.type
    if kind == "muon":
        if zero := optimization.zero_stage_in_effect:
            which = f"precision {optimization.precision}, which takes ZeRO 1"
            if optimization.zero_stage:
                which = f"zero_optimization.stage {zero}"
            raise ConfigError(
                f"optimizer.type = muon with {which}: ZeRO keeps flat pieces of the weights, and "
                "Muon needs whole matrices. Use precision fp32 with stage 0, or another optimizer."
            )
        if mp > 1:
            raise ConfigError(
                f"optimizer.type = muon with model_parallel_size = {mp}: ranks hold slices, and "
                "Muon needs whole matrices. Use model_parallel_size 1, or another optimizer."
            )
    if optimization.use_bnb_optimizer and optimizer_family(kind) != "adam":
        raise ConfigError(
            f"use_bnb_optimizer = true with optimizer.type = {kind}: only Adam has 8-bit states "
            "here. Set optimizer.type: Adam, or leave use_bnb_optimizer out."
        )


def _check_checkpoints(checkpoint: CheckpointArgs) -> None:
    factor = checkpoint.checkpoint_factor
    if factor is None:
        return
    if checkpoint.checkpoint_scale == "log" and factor <= 1:
        raise ConfigError(
            f"checkpoint_factor = {factor} with checkpoint_scale: log: its powers do not grow. "
            "Use 2 to save at steps 1, 2, 4, 8, ..."
        )
    if checkpoint.checkpoint_scale == "linear" and factor != int(factor):
        raise ConfigError(
            f"checkpoint_factor = {factor} is no whole number of steps. Use {round(factor) or 1}, "
            "or checkpoint_scale: log."
        )


def split_shares(split: str) -> list[float]:
    """The shares of train, valid and test in `949,50,1` or `949/50/1`, out of 1."""
    advice = "Write up to three shares for train, valid and test, e.g. 949,50,1."
    try:
        shares = [float(part) for part in split.replace("/", ",").split(",")]
    except ValueError as error:
        raise ConfigError(f"split = {split!r:.80}: not a list of numbers. {advice}") from error
    total = sum(shares)
    if len(shares) > 3 or min(shares) < 0 or not 0 < total < float("inf"):
        raise ConfigError(f"split = {split!r:.80}: shares must be 0 or more, not all 0. {advice}")
    return [share / total for share in [*shares, 0.0, 0.0][:3]]


def _check_blends(data: DataArgs) -> None:
    if data.data_path and data.train_data_paths:
        raise ConfigError(
            "data_path and train_data_paths are both set. Keep data_path (one dataset, divided "
            "by `split`) or the *_data_paths lists."
        )
    for name in ("train", "valid", "test"):
        paths = getattr(data, f"{name}_data_paths")
        labels = data.label_paths(name)
        if len(labels) != len(paths or []) and (labels or (paths and data.label_paths("train"))):
            raise ConfigError(
                f"{name}_label_data_paths has {len(labels)} prefixes for {len(paths or [])} "
                f"{name}_data_paths. Give one per path; data_path takes no labels."
            )
        weights = getattr(data, f"{name}_data_weights")
        if weights is None:
            continue
        if paths is None or len(paths) != len(weights):
            raise ConfigError(
                f"{name}_data_weights has {len(weights)} numbers for "
                f"{len(paths or [])} {name}_data_paths. Give one weight per path."
            )
        if sum(weights) <= 0 or sum(weights) == float("inf"):
            raise ConfigError(f"{name}_data_weights = {weights!r:.80}: not all may be 0.")


MOST_POSITIONS = 1 << 24
"""Of randomized_positions; a sample's are drawn by a permutation of all."""


def _check_randomized(most: int, data: DataArgs, model: ModelArgs) -> None:
    """Positions are drawn for methods that know a token's own position, and for whole sequences."""
    key = f"randomized_positions = {most}"
    methods = {canonical_method(name) for name in model.methods}
    wrong = sorted(name for name in methods - {"none"} if not knows_positions(name))
    if wrong or methods == {"none"}:
        raise ConfigError(
            f"{key} with pos_emb = {(wrong or ['none'])[0]}, which knows no positions of tokens. "
            "Use learned, sinusoidal, rotary or xpos, or remove the key."
        )
    if most < model.seq_length:
        raise ConfigError(f"{key} is below seq_length = {model.seq_length}. Raise it.")
    if most > MOST_POSITIONS:
        raise ConfigError(
            f"{key} is above {MOST_POSITIONS:,}, beyond which fp32 does not tell neighbouring "
            "positions apart. Lower it."
        )
    if "learned" in methods and most > model.position_rows:
        raise ConfigError(
            f"{key} is above max_position_embeddings = {model.position_rows}, and pos_emb = "
            "learned has no vectors beyond it. Raise max_position_embeddings."
        )
    if data.tells_documents_apart:
        raise ConfigError(
            f"{key} with reset_attention_mask or reset_position_ids: positions are drawn for whole "
            "sequences. Remove one of them."
        )


def _check_epochs(data: DataArgs) -> None:
    """GPT-NeoX counts no epochs of weighted data; nor do we of several files."""
    if data.pack_impl != "packed":
        raise ConfigError(
            f"train_epochs with pack_impl = {data.pack_impl}: as in GPT-NeoX, only the tokens of "
            "packed data are counted in epochs. Use train_iters."
        )
    lists = [getattr(data, f"{name}_data_paths") or () for name in ("train", "valid", "test")]
    if any(len(paths) > 1 for paths in lists):
        raise ConfigError(
            "train_epochs needs one dataset per split, and *_data_paths lists several. Merge them "
            "(tools/merge_datasets.py), or use train_iters."
        )


def _check_evaluation(evaluation: EvaluationArgs, validation_length: int) -> None:
    if evaluation.eval_lengths == []:
        raise ConfigError("eval_lengths is empty. Give lengths, or leave it out for the default.")
    context = evaluation.eval_context_length or validation_length
    longest = max([context, *(evaluation.eval_lengths or ())])
    if evaluation.eval_stride is not None and evaluation.eval_stride > longest:
        raise ConfigError(
            f"eval_stride = {evaluation.eval_stride} is longer than the evaluated sequences "
            f"({longest}): tokens would be skipped. Lower it."
        )


def _check_launcher(launcher: LauncherArgs) -> None:
    if launcher.include and launcher.exclude:
        raise ConfigError("include and exclude are both set. Keep one.")
    if (launcher.include or launcher.exclude) and (
        launcher.num_gpus is not None or launcher.num_nodes >= 0
    ):
        raise ConfigError(
            "include/exclude name devices, num_gpus/num_nodes count them. Keep one of the two."
        )
    if launcher.num_nodes == 0:
        raise ConfigError("num_nodes = 0: use -1 for all hosts of the hostfile, or 1 or more.")


# pydantic's errors as messages about config keys.


def describe_validation_error(error: ValidationError, group: type[Group]) -> list[str]:
    """One line per problem: key, value, what was expected, what the key is for."""
    return [_describe(item, group) for item in error.errors(include_url=False)]


def _describe(item: Any, group: type[Group]) -> str:
    location = [str(part) for part in item["loc"]]
    key = ".".join(location)
    if item["type"] == "missing":
        doc = group.model_fields[location[0]].description if len(location) == 1 else ""
        return f"{key} is missing. {doc} Add `{key}: ...` to one of the files.".replace("  ", " ")
    if item["type"] == "extra_forbidden":
        return _unknown_nested(location, group)
    message = item["msg"].replace("Input should be", "it should be")
    field = group.model_fields.get(location[0])
    doc = f" ({location[0]}: {field.description})" if field and field.description else ""
    return f"{key} = {item['input']!r:.80} is wrong: {message}.{doc}"


def _unknown_nested(location: Sequence[str], group: type[Group]) -> str:
    parent: type[Group] | None = group
    for part in location[:-1]:
        field = parent.model_fields.get(part) if parent else None
        parent = nested_model(field.annotation) if field else None
    names = list(parent.model_fields) if parent else []
    hint = did_you_mean(location[-1], names, f"Keys here: {', '.join(names)}.")
    return f"unknown key {'.'.join(location)!r:.120}. {hint}"
