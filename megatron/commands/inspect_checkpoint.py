"""Show what a checkpoint holds, or what differs between two.

tools/inspect_checkpoint.py RUN
tools/inspect_checkpoint.py RUN/global_step1000 OTHER_RUN --json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.checkpoints import Checkpoint


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    from megatron.neox_arguments.command_line import add_allow_kernel_argument

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", metavar="PATH", help="run directory, global_stepN or HF folder")
    parser.add_argument("other", metavar="OTHER", nargs="?", help="compare with this one")
    parser.add_argument("--iteration", type=int, help="which global_stepN; default: latest")
    parser.add_argument("--no-weights", action="store_true", help="leave out the list of weights")
    parser.add_argument("--longest", type=int, default=20480, help="effective lengths up to this")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    add_allow_kernel_argument(parser)
    return parser.parse_args(arguments)


def report(args: argparse.Namespace) -> dict[str, Any]:
    """Everything there is to show, as plain data."""
    from megatron.machine import settle_accelerator

    settle_accelerator()
    from megatron.checkpoints import read_checkpoint
    from megatron.checkpoints.inspection import compare, describe, kernel_of

    checkpoint = read_checkpoint(args.path, iteration=args.iteration)
    content: dict[str, Any] = {"checkpoint": describe(checkpoint)}
    if args.other is not None:
        other = read_checkpoint(args.other)
        content["other"] = describe(other)
        content["differences"] = [dataclasses.asdict(d) for d in compare(checkpoint, other)]
        return content
    content["kernels"] = [dataclasses.asdict(k) for k in kernel_of(checkpoint, args.longest)]
    if not args.no_weights:
        content["weights"] = list(_weights(checkpoint))
    return content


def _weights(checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
    from megatron.checkpoints.weight_names import split_name

    for name, tensor in sorted(checkpoint.weights.items(), key=lambda item: split_name(item[0])):
        values = tensor.float()
        yield {
            "name": name,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "mean": float(values.mean()),
            "std": float(values.std(correction=0)),
        }


def as_text(content: dict[str, Any], longest: int) -> str:
    """The report for people."""
    lines = _facts(content["checkpoint"])
    if "other" in content:
        lines += ["", *_facts(content["other"]), "", "differences (first | second)"]
        lines += [f"  {d['name']}: {d['what']}" for d in content["differences"]] or ["  none"]
    for kernel in content.get("kernels", ()):
        lines += ["", *_kernel(kernel, longest)]
    if "weights" in content:
        lines += ["", "weights (layer index.name)"]
    for weight in content.get("weights", ()):
        shape = " x ".join(map(str, weight["shape"]))
        numbers = f"mean {weight['mean']: .2e}  std {weight['std']:.2e}"
        lines.append(f"  {weight['name']:<44}{shape:>16}  {weight['dtype']:<9}{numbers}")
    return "\n".join(lines)


def _facts(facts: dict[str, Any]) -> list[str]:
    lines = [f"{facts['path']}"]
    for key, value in facts.items():
        if key == "bytes":
            value = f"{value / 1e6:,.1f} MB"
        elif isinstance(value, int) and not isinstance(value, bool):
            value = f"{value:,}"
        elif isinstance(value, list):
            value = ", ".join(value) or "none"
        if key != "path":
            lines.append(f"  {key.replace('_', ' '):<22}{value}")
    return lines


def _kernel(kernel: dict[str, Any], longest: int) -> list[str]:
    where = "shared by all layers" if kernel["layer"] is None else f"layer {kernel['layer']}"
    columns = dict(kernel["values"])
    names = [*columns, *(["effective length"] if kernel["effective_lengths"] else [])]
    lines = [f"kernel, {where}", "  head  " + "  ".join(f"{name:>10}" for name in names)]
    heads = len(kernel["effective_lengths"]) or len(next(iter(columns.values()), ()))
    for head in range(heads):
        cells = [f"{values[head]:>10.4f}" for values in columns.values()]
        if kernel["effective_lengths"]:
            length = kernel["effective_lengths"][head]
            shown = f"> {longest}" if length is None else str(length)
            cells.append(f"{shown:>16}")
        lines.append(f"  {head:>4}  " + "  ".join(cells))
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    content = report(args)
    print(json.dumps(content, indent=2) if args.json else as_text(content, args.longest))
    return 0
