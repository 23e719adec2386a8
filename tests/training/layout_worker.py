"""Run in one or two processes by test_layouts.py: train a few steps under each layout given.

Usage: layout_worker.py OUTPUT CASES.json. Every case is a flat config; rank 0 writes, per case, the
losses, the kernel's parameters, and the gathered weights' norm.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from megatron.model.spec import ModelSpec
from megatron.mpu import initialize_parallel
from megatron.neox_arguments import NeoXArgs
from megatron.training.batches import build_streams
from megatron.training.distributed import set_seeds, start_distributed
from megatron.training.engine import build_engine, build_module
from megatron.training.hooks.kernels import all_heads, gathered, kernel_modules
from megatron.training.run import find_vocabulary
from megatron.training.stepper import build_stepper


def run_case(flat: dict[str, Any]) -> dict[str, Any]:
    args = NeoXArgs.from_dict(flat)
    parallel = initialize_parallel(
        args.parallel.pipe_parallel_size, args.parallel.model_parallel_size
    )
    vocabulary = find_vocabulary(args)
    set_seeds(args.runtime.seed, parallel)
    spec = ModelSpec.from_args(args, vocabulary.padded_size)
    engine, _ = build_engine(args, build_module(args, spec, parallel), parallel)
    plan = args.batch_plan(dist.get_world_size())
    streams = build_streams(
        args, plan, parallel, eod=vocabulary.eod, vocab_size=vocabulary.padded_size, start_step=0
    )
    stepper = build_stepper(engine, parallel, pipelined=args.parallel.pipe_parallel_size >= 1)
    train, valid, _ = streams
    assert train is not None and valid is not None
    steps = args.optimization.train_iters or 0
    kernels_before = kernel_values(engine, parallel.tp)
    losses = [float(stepper.train(train)) for _ in range(steps)]
    valid_loss = float(stepper.evaluate(valid, args.evaluation.eval_iters))
    return {
        "losses": losses,
        "valid_loss": valid_loss,
        "kernels_before": kernels_before,
        "kernels": kernel_values(engine, parallel.tp),
        "grad_norm": engine.get_global_grad_norm() and float(engine.get_global_grad_norm()),
    }


@torch.no_grad()
def kernel_values(engine: Any, tp: Any) -> dict[str, list[float]]:
    """All heads' raw parameters, from the first stage that holds a kernel."""
    found: dict[str, list[float]] = {}
    for kernel in kernel_modules(engine.module):
        with gathered(engine, kernel):
            for name, parameter in kernel.named_parameters():
                values = all_heads(parameter.float(), tp, dim=parameter.dim() - 1)
                found[name] = values.flatten().tolist()
    return found


def main() -> None:
    output, cases = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    start_distributed(NeoXArgs.from_dict(next(iter(cases.values()))))
    results = {}
    for name, flat in cases.items():
        results[name] = run_case(flat)
        dist.barrier()
    if dist.get_rank() == 0:
        output.write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
