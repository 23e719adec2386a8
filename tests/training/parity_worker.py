"""Run by test_official_training.py: train on recorded tokens through our own training path.

Usage: parity_worker.py RECORDING OUTPUT.json KEY=VALUE... The config is the recorded one; what the
official code does without being told is in the assignments.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist

from megatron.backends.interface import MicroBatch
from megatron.checkpoints import load_weights
from megatron.model import ModelSpec
from megatron.mpu.job import join_training
from megatron.neox_arguments import NeoXArgs
from megatron.training.engine import build_engine, build_module
from megatron.training.progress_hooks import kernel_modules
from megatron.training.run import find_vocabulary
from megatron.training.trainer import Hook, StepReport, Trainer


class Record(Hook):
    """Keeps what the recording has of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        (kernel,) = kernel_modules(trainer.engine.module).values()
        values = {name: p.detach().flatten().tolist() for name, p in kernel.named_parameters()}
        named = {"loss": report.loss, "lr": report.lr, "grad_norm": report.grad_norm}
        self.steps.append({**named, "kernel": values})


def batches(tokens: np.ndarray[Any, Any]) -> Iterator[MicroBatch]:
    for batch in torch.from_numpy(tokens.astype(np.int64)):
        yield batch[:, :-1], (batch[:, 1:], torch.ones_like(batch[:, 1:], dtype=torch.float32))


def main() -> None:
    recording, output, *sets = sys.argv[1:]
    source = Path(recording)
    args = NeoXArgs.from_files([source / "global_step0" / "configs" / "model.yml"], sets=sets)
    parallel = join_training(args)
    vocabulary = find_vocabulary(args.tokenizer, args.data)
    spec = ModelSpec.from_args(args, args.padded_vocabulary(vocabulary.size))
    module = build_module(args, spec, parallel)
    load_weights(module, source, iteration=0, spec=spec, tp=parallel.tp, vocab_size=vocabulary.size)
    engine = build_engine(args, module, parallel)
    record = Record()
    tokens = np.load(source / "training.npz")["tokens"]
    trainer = Trainer(
        args=args,
        engine=engine,
        parallel=parallel,
        is_main=True,
        train_batches=batches(tokens),
        valid_batches=None,
        test_batches=None,
        tokens_per_step=tokens[0].size,
        train_iters=args.optimization.train_iters or 0,
        hooks=[record],
    )
    trainer.run()
    Path(output).write_text(json.dumps(record.steps))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
