"""One training run, from a config to the last checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import nn

from megatron.backends.interface import full_shape
from megatron.checkpoints import Checkpoint, load_weights
from megatron.checkpoints.reading import with_tokenizer_of_folder
from megatron.checkpoints.resuming import Resumed, resume
from megatron.checkpoints.store import CheckpointStore
from megatron.data.datasets import check_tokenizers
from megatron.engines.dispatch import explain_engine
from megatron.model import ModelSpec
from megatron.model.outline import outline_of
from megatron.mpu.collectives import ParallelState
from megatron.mpu.job import join_training, set_seeds
from megatron.neox_arguments import BatchPlan, NeoXArgs
from megatron.neox_arguments.run_keys import CheckpointArgs, DataArgs, TokenizerArgs
from megatron.tokenizer import build_tokenizer
from megatron.training.batches import build_streams, with_steps_of_epochs
from megatron.training.control_hooks import (
    INTERRUPTED,
    SaveCheckpoints,
    StopAtInterval,
    StopOnSignal,
    StopWhenDiverged,
    Validate,
    WatchDivergence,
    raise_at_first_nonfinite_layer,
)
from megatron.training.engine import build_engine, build_module, build_schedule, weights_dtype
from megatron.training.kernel_fit import fit_to_rotary
from megatron.training.metrics import Manifest, Sinks, build_sinks, data_identity
from megatron.training.progress_hooks import (
    FadeRotary,
    Profile,
    ProjectKernels,
    RecordKernels,
    RecordMetrics,
    RecordParameterNorms,
    RecordZeroGradients,
    ShowProgress,
)
from megatron.training.run_directory import (
    command_to_continue,
    plan_start,
    run_directory,
)
from megatron.training.same_everywhere import check_ranks_agree
from megatron.training.trainer import Hook, Trainer


@dataclass(frozen=True)
class Vocabulary:
    """What training needs of a tokenizer."""

    size: int
    eod: int


def find_vocabulary(options: TokenizerArgs, data: DataArgs) -> Vocabulary:
    """Vocabulary size and end-of-document id; with `vocab_size` set, no tokenizer file is read."""
    size, eod = options.vocab_size, 0
    if size is None or data.eod_mask_loss or data.tells_documents_apart:
        tokenizer = build_tokenizer(
            options.tokenizer_type, vocab_file=options.vocab_file, merge_file=options.merge_file
        )
        check_tokenizers(data, tokenizer)
        eod = tokenizer.eod
        size = size or tokenizer.vocab_size
    return Vocabulary(size, eod)


def train(args: NeoXArgs) -> int:
    """Train; returns the process's exit code."""
    parallel = join_training(args)
    args = with_tokenizer_of_folder(args)
    check_ranks_agree(args.config_hash(), args.data, run_directory(args.checkpoint))
    args = with_steps_of_epochs(args, dist.get_world_size())
    args, start = plan_start(args)
    if start.finished:
        return 0
    vocabulary = find_vocabulary(args.tokenizer, args.data)
    set_seeds(args.runtime.seed, parallel)
    plan = args.batch_plan(dist.get_world_size())
    spec = ModelSpec.from_args(args, args.padded_vocabulary(vocabulary.size))
    module = build_module(args, spec, parallel)
    if start.foreign is not None:
        found = _load_foreign(start.foreign, args.checkpoint, module, spec, parallel, vocabulary)
        if args.model.kerple_init == "fit":
            fit_to_rotary(module, spec, found, args.data)
    engine = build_engine(args, module, parallel)
    resumed = Resumed(0, 0)
    if start.resume_from is not None and start.step is not None:
        resumed = resume(engine, CheckpointStore(start.resume_from), args, start.step, parallel)
    train_batches, valid_batches, test_batches = build_streams(
        args, spec, plan, parallel, eod=vocabulary.eod, start=resumed
    )
    trainer = Trainer(
        args=args,
        engine=engine,
        parallel=parallel,
        is_main=dist.get_rank() == 0,
        train_batches=train_batches,
        valid_batches=valid_batches if args.evaluation.do_valid is not False else None,
        test_batches=test_batches if args.evaluation.do_test is not False else None,
        tokens_per_step=plan.train_batch_size * args.model.seq_length,
        train_iters=args.steps_to_train,
        step=resumed.step,
    )
    directory = run_directory(args.checkpoint)
    sinks = build_sinks(args, directory, resumed.step, trainer.train_iters, main=trainer.is_main)
    _print_summary(trainer)
    trainer.hooks = build_hooks(trainer, plan, sinks, spec, resumed)
    code = trainer.run()
    if code in INTERRUPTED and directory is None:
        trainer.say("nothing was saved, because `save` is not set")
    elif code in INTERRUPTED:
        trainer.say(f"to continue: {command_to_continue()}")
    return code


def _load_foreign(
    path: Path,
    options: CheckpointArgs,
    module: nn.Module,
    spec: ModelSpec,
    parallel: ParallelState,
    vocabulary: Vocabulary,
) -> Checkpoint:
    """Start from weights of official KERPLE, GPT-NeoX or Hugging Face, or with new positions."""
    found = load_weights(
        module,
        path,
        iteration=options.iteration,
        spec=spec,
        tp=parallel.tp,
        vocab_size=vocabulary.size,
        fresh_positions=options.load_positions == "fresh",
    )
    if dist.get_rank() == 0:
        print(f"weights from {path} ({found.kind}); new optimizer, step 0", flush=True)
    return found


def build_hooks(
    trainer: Trainer, plan: BatchPlan, sinks: Sinks, spec: ModelSpec, resumed: Resumed
) -> list[Hook]:
    """The hooks in the order in which they run after a step."""
    args = trainer.args
    validate = Validate(args.evaluation.eval_interval, args.evaluation.eval_iters, sinks)
    fade: list[Hook] = [FadeRotary()] if args.model.rotary_fade_iters else []
    if trainer.train_iters == 0:  # as in the official code: evaluate only
        return [*fade, validate, sinks]
    log_interval = args.logging.log_interval
    bad_steps = args.optimization.max_consecutive_nonfinite
    hooks: list[Hook] = [
        *fade,
        StopOnSignal(),
        StopWhenDiverged(bad_steps),
        WatchDivergence(spec.padded_vocab_size, sinks, ends=args.optimization.exit_on_divergence),
    ]
    if args.model.kerple_constraint == "project":
        hooks.append(ProjectKernels())
    if args.runtime.detect_anomaly:
        raise_at_first_nonfinite_layer(trainer.engine.module)
    hooks += [
        ShowProgress(min(log_interval, args.logging.steps_per_print)),
        RecordMetrics(
            sinks, log_interval, outline_of(spec).training_flops_per_token(spec.seq_length)
        ),
        RecordKernels(sinks, log_interval),
        validate,
    ]
    if args.logging.log_param_norm:
        hooks.append(RecordParameterNorms(sinks, log_interval))
    if args.logging.log_grad_pct_zeros:
        hooks.append(RecordZeroGradients(sinks, log_interval))
    if args.logging.profile or args.logging.memory_profiling:
        folder = run_directory(args.checkpoint) or Path()
        hooks.append(Profile(args.logging, folder / "profile"))
    if args.runtime.exit_interval:
        hooks.append(StopAtInterval(args.runtime.exit_interval))
    directory = run_directory(args.checkpoint)
    if directory is not None:
        store, samples = CheckpointStore(directory), plan.train_batch_size
        data = data_identity(args.data) if trainer.is_main else None
        hooks.append(SaveCheckpoints(store, args.checkpoint, resumed, samples, data))
        if data is not None:
            hooks.append(Manifest(directory, args, _count(trainer), dist.get_world_size(), data))
    return [*hooks, sinks]


def _count(trainer: Trainer) -> int:
    """Parameters on this rank."""
    return sum(full_shape(p).numel() for p in trainer.engine.module.parameters())


def _print_summary(trainer: Trainer) -> None:
    """One line: the model, the layout, the attention engine and why it is not a faster one."""
    args, engine, parallel = trainer.args, trainer.engine, trainer.parallel
    attention = explain_engine(
        args.model.engine_in_effect,
        device=engine.device,
        dtype=weights_dtype(args.optimization),
        head_dim=args.model.head_dim,
        dropout=args.model.attention_dropout,
    )
    trainer.say(
        f"{args.model.method}: {_count(trainer):,} parameters on this rank, "
        f"{engine.device}, "
        f"{dist.get_world_size()} process(es): dp {parallel.data_size}, sp {parallel.sp.size}, "
        f"mp {parallel.tp.size}, pp {args.parallel.pipe_parallel_size}, "
        f"ZeRO {engine.zero_stage}; attention: {attention}; "
        + (f"resuming after step {trainer.step}" if trainer.step else "starting")
    )
    schedule = build_schedule(args.optimization)
    if schedule(0) > schedule.peak:
        trainer.say(
            f"warning: warmup = {args.optimization.warmup} of {schedule.decay_steps} steps is less "
            f"than one step, and by GPT-NeoX's formula the first rate is {schedule(0):.3g}, above "
            f"lr = {schedule.peak:.3g}. Use warmup 0, or at least {1 / schedule.decay_steps:.3g}."
        )
    if schedule.rises_again(trainer.train_iters):
        trainer.say(
            "warning: train_iters is beyond lr_decay_iters, and with lr_decay_rule neox a cosine "
            "rises again after it, as in GPT-NeoX"
        )
