"""Run as a program: train a step with DeepSpeed in several layouts, save, record the logits."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.checkpoints import load_weights
from megatron.checkpoints.saved_config import RESOLVED
from megatron.model import ModelSpec
from megatron.mpu.collectives import initialize_parallel
from megatron.mpu.job import join_job
from megatron.training.engine import build_engine, build_module
from tests.checkpoints.small_models import VOCABULARY, small_args, tokens


def logits(engine: Any, pipelined: bool) -> torch.Tensor:
    inputs = tokens(30)
    if pipelined:
        state: Any = inputs
        for layer in engine.module.forward_funcs:
            state = layer(state)
        return engine.module.loss_fn.head.logits(state)  # the head is applied by the loss
    return engine.module(inputs)


def run(folder: Path, start: str | None, changes: dict[str, Any]) -> None:
    args = small_args(**changes, optimizer={"type": "Adam", "params": {"lr": 0.01}}, train_iters=10)
    parallel = initialize_parallel(args.parallel)
    spec = ModelSpec.from_args(args, VOCABULARY)
    module = build_module(args, spec, parallel)
    if start is not None:
        load_weights(module, start, spec=spec, tp=parallel.tp)
    engine: Any = build_engine(args, module, parallel)
    pipelined = args.parallel.pipe_parallel_size >= 1
    for _ in range(2 if start is None else 0):
        inputs = tokens(17)[:1]
        if pipelined:
            mask = torch.ones(1, 16)
            engine.deepspeed.train_batch(iter([(inputs[:, :-1], (inputs[:, 1:], mask))]))
        else:
            engine.deepspeed.backward(
                engine.module.token_losses(inputs[:, :-1], inputs[:, 1:]).mean()
            )
            engine.deepspeed.step()
    engine.deepspeed.eval()
    with torch.no_grad():
        torch.save(logits(engine, pipelined), folder / "expected.pt")
    engine.deepspeed.save_checkpoint(str(folder), tag="global_step2", client_state={"iteration": 2})
    configs = folder / "global_step2" / "configs"
    configs.mkdir()
    (configs / RESOLVED).write_text(args.to_yaml())


def main() -> None:
    root = Path(sys.argv[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    join_job(small_args())
    for name, (start, changes) in json.loads(sys.argv[2]).items():
        (root / name).mkdir()
        run(root / name, start and str(root / start), changes)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
