"""One training run, from a config to the last checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from megatron.checkpoints import load_weights
from megatron.checkpoints.save_and_resume import Resumed, clean_up, find_checkpoint, resume
from megatron.checkpoints.saved_config import as_it_began
from megatron.checkpoints.store import CHECKSUMS, CheckpointStore
from megatron.checkpoints.universal import is_universal
from megatron.data.datasets import check_tokenizers
from megatron.errors import CheckpointError
from megatron.model.spec import ModelSpec
from megatron.mpu import ParallelState
from megatron.mpu.job import set_seeds, start_distributed
from megatron.tokenizer import build_tokenizer, padded_vocab_size
from megatron.training.batches import build_streams
from megatron.training.control_hooks import (
    SaveCheckpoints,
    StopAtInterval,
    StopOnSignal,
    StopWhenDiverged,
    Validate,
)
from megatron.training.engine import build_engine, build_module, build_schedule
from megatron.training.kernel_hooks import ProjectKernels, RecordKernels
from megatron.training.metrics import Sinks, build_sinks
from megatron.training.progress_hooks import CloseSinks, RecordMetrics, ShowProgress
from megatron.training.run_manifest import Manifest
from megatron.training.stepper import build_stepper
from megatron.training.trainer import Hook, StepReport, Trainer

if TYPE_CHECKING:
    from megatron.neox_arguments import BatchPlan, NeoXArgs


@dataclass(frozen=True)
class Vocabulary:
    """What training needs of a tokenizer."""

    size: int
    padded_size: int
    eod: int


def find_vocabulary(args: NeoXArgs) -> Vocabulary:
    """Sizes and the end-of-document token; `vocab_size` in the config needs no tokenizer files."""
    options = args.tokenizer
    eod = 0
    size = options.vocab_size
    if size is None or args.data.eod_mask_loss:
        tokenizer = build_tokenizer(
            options.tokenizer_type, vocab_file=options.vocab_file, merge_file=options.merge_file
        )
        check_tokenizers(args.data, tokenizer)
        eod = tokenizer.eod
        size = size or tokenizer.vocab_size
    padded = padded_vocab_size(
        size, args.model.make_vocab_size_divisible_by, args.parallel.model_parallel_size
    )
    return Vocabulary(size, padded, eod)


class RecordManifest(Hook):
    """Start and stop times, on rank 0."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def on_start(self, trainer: Trainer) -> None:
        self.manifest.started(trainer.step)

    def on_end(self, trainer: Trainer) -> None:
        self.manifest.stopped(trainer.step, trainer.stop_reason or "finished")

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        self.manifest.stopped(trainer.step, f"failed: {type(error).__name__}: {error}")


class NameFirstBadLayer(Hook):
    """detect_anomaly: forward hooks that raise at the first layer with a non-finite output."""

    def on_start(self, trainer: Trainer) -> None:
        from megatron.training.gradients import watch

        watch(trainer.stepper.engine.module)


def train(args: NeoXArgs) -> int:
    """Train as the config says; returns the process's exit code."""
    parallel = start_distributed(args)
    args = _as_the_run_began(args)
    vocabulary = find_vocabulary(args)
    set_seeds(args.runtime.seed, parallel)
    plan = args.batch_plan(dist.get_world_size())
    spec = ModelSpec.from_args(args, vocabulary.padded_size)
    module = build_module(args, spec, parallel)
    foreign = _load_foreign_weights(args, module, spec, parallel, vocabulary)
    engine = build_engine(args, module, parallel)
    directory = _directory(args)
    if directory is not None:
        clean_up(CheckpointStore(directory))
    resumed = Resumed(0, 0) if foreign else _resume_if_possible(args, engine, parallel)
    streams = build_streams(
        args,
        plan,
        parallel,
        eod=vocabulary.eod,
        vocab_size=vocabulary.padded_size,
        start_step=resumed.step,
    )
    trainer = _trainer(args, plan, parallel, engine, resumed.step, streams)
    sinks = build_sinks(args, directory, resumed.step, main=trainer.is_main)
    trainer.hooks = build_hooks(args, trainer, plan, sinks, spec)
    if trainer.is_main:
        print(_opening_line(args, trainer, engine), flush=True)
        if build_schedule(args).rises_again(trainer.train_iters):
            print(_RISES, flush=True)
    if trainer.train_iters == 0:
        return _evaluate_only(trainer, sinks)
    return trainer.run()


_RISES = (
    "warning: train_iters is beyond lr_decay_iters, and with lr_decay_rule neox a cosine rises "
    "again after it, as in GPT-NeoX"
)


def _directory(args: NeoXArgs) -> Path | None:
    return Path(args.checkpoint.save) if args.checkpoint.save else None


def _load_directory(args: NeoXArgs) -> str | None:
    return args.checkpoint.save if args.checkpoint.load == "auto" else args.checkpoint.load


def _as_the_run_began(args: NeoXArgs) -> NeoXArgs:
    """A run from before a key existed is resumed with what it did then."""
    load = _load_directory(args)
    store = CheckpointStore(Path(load)) if load else None
    step = args.checkpoint.iteration
    if step is None and store is not None:
        step = store.newest()
    if store is None or step is None:
        return args
    began = as_it_began(args, store.path(step))
    changed = began.optimization.lr_decay_rule != args.optimization.lr_decay_rule
    if changed and dist.get_rank() == 0:
        print(
            f"{store.path(step)} is of a run from before lr_decay_rule existed: it goes on with "
            "its schedule (override_lr_scheduler: true takes the config's)",
            flush=True,
        )
    return began


def _load_foreign_weights(
    args: NeoXArgs,
    module: nn.Module,
    spec: ModelSpec,
    parallel: ParallelState,
    vocabulary: Vocabulary,
) -> bool:
    """Start from weights that are no run of ours: official KERPLE, GPT-NeoX or Hugging Face."""
    load = _load_directory(args)
    if not load or _is_run_of_ours(Path(load), args):
        return False
    found = load_weights(
        module,
        load,
        iteration=args.checkpoint.iteration,
        spec=spec,
        tp=parallel.tp,
        vocab_size=vocabulary.size,
    )
    if dist.get_rank() == 0:
        print(f"weights from {load} ({found.kind}); optimizer and step start anew", flush=True)
    return True


def _is_run_of_ours(directory: Path, args: NeoXArgs) -> bool:
    """Whether `load` is for `resume`: a run of ours, or the place where one will be."""
    store = CheckpointStore(directory)
    step = args.checkpoint.iteration if args.checkpoint.iteration is not None else store.newest()
    if step is None or not store.path(step).is_dir():
        return args.checkpoint.save is not None and directory == Path(args.checkpoint.save)
    found = store.path(step)
    return (found / CHECKSUMS).is_file() or is_universal(found)


def _resume_if_possible(args: NeoXArgs, engine: Any, parallel: ParallelState) -> Resumed:
    load = _load_directory(args)
    if not load:
        return Resumed(0, 0)
    store = CheckpointStore(Path(load))
    step = find_checkpoint(store, args.checkpoint.iteration)
    if step is None:
        starts_here = load == args.checkpoint.save
        if not starts_here:
            raise CheckpointError(
                f"load = {load}: no checkpoint there. Set `load` to a run directory with "
                "global_step* folders, or remove it to start anew."
            )
        return Resumed(0, 0)
    return resume(engine, store, args, step, parallel)


def _trainer(
    args: NeoXArgs,
    plan: BatchPlan,
    parallel: ParallelState,
    engine: Any,
    step: int,
    streams: Any,
) -> Trainer:
    train_batches, valid_batches, test_batches = streams
    pipelined = args.parallel.pipe_parallel_size >= 1
    return Trainer(
        args=args,
        stepper=build_stepper(engine, parallel, pipelined=pipelined),
        parallel=parallel,
        is_main=dist.get_rank() == 0,
        train_batches=train_batches,
        valid_batches=valid_batches if args.evaluation.do_valid is not False else None,
        test_batches=test_batches if args.evaluation.do_test is not False else None,
        tokens_per_step=plan.train_batch_size * args.model.seq_length,
        train_iters=0 if args.evaluation.do_train is False else args.optimization.train_iters or 0,
        step=step,
    )


def build_hooks(
    args: NeoXArgs, trainer: Trainer, plan: BatchPlan, sinks: Sinks, spec: ModelSpec
) -> list[Hook]:
    """The hooks in the order in which they run after a step."""
    log_interval = args.logging.log_interval
    bad_steps = args.optimization.max_consecutive_nonfinite
    hooks: list[Hook] = [StopOnSignal(), StopWhenDiverged(bad_steps)]
    if args.model.kerple_constraint == "project":
        hooks.append(ProjectKernels())
    if args.runtime.detect_anomaly:
        hooks.append(NameFirstBadLayer())
    hooks += [
        ShowProgress(min(log_interval, args.logging.steps_per_print)),
        RecordMetrics(sinks, log_interval, flops_per_token(spec, args.model.seq_length)),
        RecordKernels(sinks, log_interval),
        Validate(args.evaluation.eval_interval, args.evaluation.eval_iters, sinks),
    ]
    if args.runtime.exit_interval:
        hooks.append(StopAtInterval(args.runtime.exit_interval))
    directory = _directory(args)
    if directory is not None:
        hooks.append(
            SaveCheckpoints(
                CheckpointStore(directory),
                interval=args.checkpoint.checkpoint_factor,
                scale=args.checkpoint.checkpoint_scale,
                extra_steps=frozenset(args.checkpoint.extra_save_iters or ()),
                samples_per_step=plan.train_batch_size,
            )
        )
        if trainer.is_main:
            manifest = Manifest(directory, args, _count(trainer), dist.get_world_size())
            hooks.append(RecordManifest(manifest))
    hooks.append(CloseSinks(sinks))
    return hooks


def flops_per_token(spec: ModelSpec, length: int) -> float:
    """Forward and backward of one token: 6 per weight, and attention over half the length."""
    per_layer = 4 * spec.hidden_size**2 + 2 * spec.hidden_size * spec.ffn_size
    head = spec.hidden_size * spec.padded_vocab_size
    attention = spec.num_layers * spec.hidden_size * length
    return 6.0 * (spec.num_layers * per_layer + head + attention)


def _count(trainer: Trainer) -> int:
    """Parameters on this rank."""
    parameters = trainer.stepper.engine.module.parameters()
    return sum(getattr(p, "ds_numel", p.numel()) for p in parameters)


def _opening_line(args: NeoXArgs, trainer: Trainer, engine: Any) -> str:
    layout = (
        f"{dist.get_world_size()} process(es): dp {trainer.parallel.dp_size}, "
        f"mp {trainer.parallel.tp.size}, pp {args.parallel.pipe_parallel_size}, "
        f"ZeRO {engine.zero_optimization_stage()}"
    )
    start = f"resuming after step {trainer.step}" if trainer.step else "starting"
    return (
        f"{args.model.pos_emb}: {_count(trainer):,} parameters on this rank, "
        f"{engine.device}, {layout}; {start}"
    )


def _evaluate_only(trainer: Trainer, sinks: Sinks) -> int:
    """train_iters 0: the official code's way to ask for an evaluation."""
    measure = Validate(1, trainer.args.evaluation.eval_iters, sinks)
    if trainer.valid_batches is not None:
        measure.measure(trainer, "valid", trainer.valid_batches)
    if trainer.test_batches is not None:
        measure.measure(trainer, "test", trainer.test_batches)
    sinks.close()
    return 0


__all__ = ["StepReport", "build_hooks", "find_vocabulary", "flops_per_token", "train"]
