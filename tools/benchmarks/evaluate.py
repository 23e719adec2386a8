"""Memory and speed of evaluation on CPU: the 162M model with a 50k vocabulary, random weights.

Memory is the peak of a process of its own. Speed compares, in turns in one process, the losses as
evaluate.py computes them with the dense way: the naive engine and all logits at once.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.model import GPTModel, ModelSpec

from .peak_memory import measure
from .timing import Target, interleave, render_table

VOCABULARY = 50_304
SPEED_LENGTH = 2_048
MEMORY_LIMITS = {16_384: 4.0, 65_536: 10.0}
SPEED_LIMIT = 0.6
GIGABYTE = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parts", nargs="+", choices=("speed", "memory"), default=["speed", "memory"]
    )
    parser.add_argument("--pos-emb", default="kerple_log")
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[16_384], help="memory: sequence lengths"
    )
    parser.add_argument("--repeats", type=int, default=3, help="speed: timed rounds")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, help="also write the measurements as JSON")


def build(pos_emb: str) -> GPTModel:
    """The paper's 162M model: 12 layers of 768, an untied head."""
    spec = ModelSpec(
        padded_vocab_size=VOCABULARY,
        num_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        max_position_embeddings=512,
        pos_emb=pos_emb,
        no_weight_tying=True,
    )
    return GPTModel(spec).eval()


def run(args: argparse.Namespace) -> int:
    """0 if every target is met."""
    torch.set_num_threads(args.threads)
    targets: list[Target] = []
    found: dict[str, Any] = {"pos_emb": args.pos_emb, "threads": args.threads}
    if "speed" in args.parts:
        found["speed"] = _speed(args.pos_emb, args.repeats)
        targets.append(
            Target(
                f"{args.pos_emb} at {SPEED_LENGTH}: seconds / dense seconds",
                found["speed"]["ratio"],
                SPEED_LIMIT,
            )
        )
    if "memory" in args.parts:
        found["memory"] = [_memory(args, length) for length in args.lengths]
        rows = [["length", "peak GB", "seconds"]] + [
            [str(row["length"]), f"{row['peak_gb']:.2f}", f"{row['seconds']:.1f}"]
            for row in found["memory"]
        ]
        print(render_table(rows))
        targets += [
            Target(
                f"{args.pos_emb} at {row['length']}: GB of process memory",
                row["peak_gb"],
                MEMORY_LIMITS[row["length"]],
            )
            for row in found["memory"]
            if row["length"] in MEMORY_LIMITS
        ]
    print("\n".join(str(target) for target in targets))
    if args.output:
        args.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0 if all(target.holds for target in targets) else 1


def _speed(pos_emb: str, repeats: int) -> dict[str, Any]:
    """Both ways on the same weights and tokens; their losses must agree."""
    model = build(pos_emb)
    text = torch.randint(VOCABULARY, (1, SPEED_LENGTH + 1))
    tokens, labels = text[:, :-1], text[:, 1:]

    losses: dict[str, Tensor] = {}

    def ours() -> None:
        _set_engine(model, "auto")
        losses["ours"] = model.token_losses(tokens, labels).flatten()

    def dense_way() -> None:
        _set_engine(model, "naive")
        logits = model(tokens).float()
        losses["dense"] = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")

    contenders: dict[str, Callable[[], object]] = {"ours": ours, "dense": dense_way}
    with torch.inference_mode():
        timings = interleave(contenders, repeats)
    torch.testing.assert_close(losses["ours"], losses["dense"], rtol=1e-3, atol=1e-3)
    rows = [["way", "seconds", "tokens/s"]] + [
        [name, f"{timings.median(name):.3f}", f"{SPEED_LENGTH / timings.median(name):,.0f}"]
        for name in contenders
    ]
    print(render_table(rows))
    return {
        "length": SPEED_LENGTH,
        "ratio": timings.ratio("ours", "dense"),
        **{f"{name}_seconds": timings.median(name) for name in contenders},
    }


def _set_engine(model: GPTModel, engine: str) -> None:
    for layer in model.layers:
        layer.attention.engine = engine


def _memory(args: argparse.Namespace, length: int) -> dict[str, Any]:
    found = measure("evaluation", pos_emb=args.pos_emb, length=length, threads=args.threads)
    return {"length": length, "seconds": found["seconds"], "peak_gb": found["peak"] / GIGABYTE}
