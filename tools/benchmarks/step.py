"""One optimizer step of the 162M model per positional embedding, interleaved.

The models share all weights but the kernels' own parameters, so that they fit in memory together
and differ in nothing else. A step is forward, loss, backward, clipping and fused AdamW, in fp32.
The target is a difference of a few percent, finer than the noise of one step on a shared machine,
which only ever adds time: it is judged by each contender's fastest round. Medians are shown too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from megatron.model import GPTModel, ModelSpec
from megatron.model.loss import DEFAULT_LOSS_CHUNK

from .peak_memory import measure
from .timing import Target, interleave, render_table

EMBEDDINGS = ("kerple_log", "kerple_power", "alibi", "rpe", "none")
PADDED_VOCABULARY = 50_304
SPREAD_AT_MOST = 1.03
POSITION_LAYER = "sequential.1."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--embeddings", nargs="+", default=list(EMBEDDINGS))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=PADDED_VOCABULARY, help="padded size")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    parser.add_argument(
        "--loss-memory",
        action="store_true",
        help="instead: peak memory of one step, the loss in pieces and of all tokens at once",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "meta"),
        default="cpu",
        help="of --loss-memory: run the step, or count its live tensors without computing",
    )
    parser.add_argument(
        "--sequence-parallel",
        type=int,
        nargs="+",
        metavar="N",
        help="instead: peak memory of a rank where N ranks share one sequence of --length",
    )
    parser.add_argument(
        "--kept-memory",
        action="store_true",
        help="instead: CPU time of a step where malloc keeps freed memory, as train.py sets it",
    )
    parser.add_argument("--recompute", action="store_true", help="with checkpoint_activations")


def run(args: argparse.Namespace) -> int:
    if args.loss_memory:
        return compare_loss_memory(args)
    if args.sequence_parallel:
        return compare_shares(args)
    if args.kept_memory:
        return compare_kept_memory(args)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    models = build_models(args)
    parameters = {id(p): p for model in models.values() for p in model.parameters()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-4, weight_decay=0.0, fused=True)
    tokens = torch.randint(args.vocabulary, (args.batch, args.length + 1))
    steps: dict[str, Callable[[], object]] = {
        name: _step(model, optimizer, tokens) for name, model in models.items()
    }
    timings = interleave(steps, args.repeats)
    base = args.embeddings[-1]
    ratios = {name: timings.best(name) / timings.best(base) for name in steps}
    rows = [["positional embedding", "seconds, median", "seconds, fastest", f"times {base}"]]
    rows += [
        [name, f"{timings.median(name):.3f}", f"{timings.best(name):.3f}", f"{ratios[name]:.3f}"]
        for name in steps
    ]
    count = models[args.embeddings[0]].num_parameters()
    print(
        f"{count:,} parameters, length {args.length}, batch {args.batch}, fp32,"
        f" {args.threads} threads; GPU: not measured\n"
    )
    print(render_table(rows))
    spread = Target(
        "slowest over fastest", max(ratios.values()) / min(ratios.values()), SPREAD_AT_MOST
    )
    print(f"\n{spread}")
    if args.json:
        content = {"seconds": timings.rounds, "spread": spread.value, "holds": spread.holds}
        args.json.write_text(json.dumps(content, indent=2) + "\n")
    return 0 if spread.holds else 1


def compare_loss_memory(args: argparse.Namespace) -> int:
    """Each in a process of its own; the losses must be equal."""
    spec = {**model_sizes(args), "pos_emb": args.embeddings[0]}
    spec["checkpoint_activations"] = args.recompute
    ways: dict[str, int | None] = {"all at once": None, "in pieces": DEFAULT_LOSS_CHUNK}
    shared = {"shape": (args.batch, args.length), "threads": args.threads, "device": args.device}
    found = {
        name: measure("step", spec=spec, chunk=chunk, **shared) for name, chunk in ways.items()
    }
    rows = [["the loss", "peak, GiB", "seconds", "value"]]
    rows += [
        [name, f"{one['peak'] / 2**30:.2f}", f"{one['seconds']:.0f}", f"{one['loss']:.6f}"]
        for name, one in found.items()
    ]
    print(
        f"one step of {args.batch} x {args.length:,} tokens on {args.device}, {spec['pos_emb']}, "
        f"fp32, checkpoint_activations {args.recompute}, {args.threads} threads; no GPU here\n"
    )
    print(render_table(rows))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if abs(found["all at once"]["loss"] - found["in pieces"]["loss"]) < 1e-4 else 1


def compare_kept_memory(args: argparse.Namespace) -> int:
    """Processes take turns; the first step of each, which meets no freed memory, is left out."""
    spec = {**model_sizes(args), "pos_emb": args.embeddings[0]}
    options = {"shape": (args.batch, args.length), "threads": args.threads, "steps": 4}
    found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for _ in range(args.repeats):
        for kept, runs in found.items():
            runs.append(measure("steps", spec=spec, kept=kept, **options))
    fastest, peak = (
        {kept: min(value(one) for one in runs) for kept, runs in found.items()}
        for value in (lambda one: min(one["seconds"][1:]), lambda one: one["peak"])
    )
    rows = [["freed memory is", "CPU seconds, fastest", "peak, GiB"]]
    rows += [
        ["kept" if kept else "given back", f"{fastest[kept]:.3f}", f"{peak[kept] / 2**30:.2f}"]
        for kept in found
    ]
    print(render_table(rows))
    ratio = Target("kept over given back", fastest[True] / fastest[False], 1.0)
    print(f"\n{ratio}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if ratio.holds else 1


def compare_shares(args: argparse.Namespace) -> int:
    """Forward and backward of one sequence; every number of ranks must give the same loss."""
    spec = {**model_sizes(args), "pos_emb": args.embeddings[0]}
    spec["checkpoint_activations"] = args.recompute
    found: dict[int, list[dict[str, Any]]] = {}
    for size in args.sequence_parallel:
        with TemporaryDirectory() as directory, ThreadPoolExecutor(size) as ranks:
            shared = {"spec": spec, "length": args.length, "threads": args.threads, "size": size}
            work = partial(measure, "shared", store=f"{directory}/store", **shared)
            found[size] = list(ranks.map(lambda rank, run=work: run(rank=rank), range(size)))
    rows = [["ranks that share the sequence", "peak of a rank, MiB", "loss"]]
    rows += [
        [str(size), f"{max(x['peak'] for x in ranks) / 2**20:.0f}", f"{ranks[0]['loss']:.6f}"]
        for size, ranks in found.items()
    ]
    print(
        f"forward and backward of 1 x {args.length:,} tokens, {spec['pos_emb']}, fp32, "
        f"checkpoint_activations {args.recompute}; resident memory above weights, gradients "
        "and a first short step; no GPU here\n"
    )
    print(render_table(rows))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    losses = [ranks[0]["loss"] for ranks in found.values()]
    return 0 if max(losses) - min(losses) < 1e-4 else 1


def model_sizes(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "padded_vocab_size": args.vocabulary,
        "num_layers": args.layers,
        "hidden_size": args.hidden,
        "num_attention_heads": args.heads,
        "max_position_embeddings": args.length,
        "no_weight_tying": True,
    }


def build_models(args: argparse.Namespace) -> dict[str, GPTModel]:
    """One model per positional embedding, all with the first one's weights."""
    models: dict[str, GPTModel] = {}
    for name in args.embeddings:
        model = GPTModel(ModelSpec(**model_sizes(args), pos_emb=name))
        if models:
            share_parameters(next(iter(models.values())), model)
        models[name] = model
    return models


def share_parameters(source: nn.Module, target: nn.Module) -> None:
    """Gives the target the source's own parameters wherever both have one of that name."""
    wanted = {name for name, _ in target.named_parameters()}
    for name, parameter in source.named_parameters():
        if name in wanted and not name.startswith(POSITION_LAYER):
            owner, _, leaf = name.rpartition(".")
            setattr(target.get_submodule(owner), leaf, parameter)


def _step(
    model: GPTModel, optimizer: torch.optim.Optimizer, tokens: Tensor
) -> Callable[[], object]:
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> None:
        model.train()
        model(inputs, labels).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
