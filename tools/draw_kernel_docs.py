"""Draw every kernel over distance for docs/positional_embeddings.md.

python tools/draw_kernel_docs.py [--out docs/images/kernels]

One picture per kernel: the bias (or weight) of each head as it starts, in the shape of the 162M
model (12 heads of 64); and one picture with all families. A run's kernels, or your own:
tools/plot_kernels.py.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _start import start_main

# isort: split
from megatron.commands.kernel_tools import (
    FLOOR,
    head_colors,
    plot_over_distance,
    tables_of,
)
from megatron.neox_arguments.catalogue import METHODS

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.model.position_base import TableEmbedding

LENGTH = 513
NEAR = 33  # Gaussians decay to 0 within a few positions


def as_it_starts(name: str) -> TableEmbedding:
    from kerple import kernel

    return kernel(name, heads=12, head_dim=64)


def draw_kernel(name: str, tables: dict[str, Tensor], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(tables), 3.2), layout="constrained")
    axes_row = figure.subplots(1, len(tables), squeeze=False)[0]
    for axes, (table_name, table) in zip(axes_row, tables.items(), strict=True):
        near = (table_name == "weight" and name != "ape") or name.startswith("gauss")
        shown = table[:, : NEAR if near else LENGTH].numpy()
        plot_over_distance(axes, shown, head_colors(len(shown)), table_name, linewidth=1.2)
        axes.grid(alpha=0.25)
    known = METHODS[name]
    formula = f":  ${known.formula}$" if known.formula else ""
    figure.suptitle(f"{known.label} ({name}){formula}", fontsize=11)
    figure.savefig(path, dpi=110)


def fire_tables(length: int) -> dict[str, Tensor]:
    """Of queries up to FIRE's threshold, and of one at eight times it."""
    from megatron.model.content_positions import Fire
    from megatron.model.position_names import position_options

    return tables_of(Fire(position_options(heads=12, head_dim=64)), length)


def rotated_scores(name: str, **keys: Any) -> Tensor:
    """Of two equal vectors at each distance, over that at distance 0: the mean of all pairs."""
    import torch

    from megatron.model.position_names import build_positional_embedding, position_options

    options = position_options(heads=1, head_dim=64, **keys)
    ones = torch.ones(1, 1, LENGTH, 64)
    q, k = build_positional_embedding(name, options)(ones, ones)
    return (k[0, 0] @ q[0, 0, -1]).flip(0) / 64


def draw_families(path: Path) -> None:
    """Shapes side by side, rotations, and the paper's heads within their effective length."""
    from matplotlib.figure import Figure

    from megatron.model.kernel_theory import effective_length, heads_within
    from megatron.paper.style import distance_axis

    figure = Figure(figsize=(16.6, 3.8), layout="constrained")
    shapes, turned, counts = figure.subplots(1, 3)
    for label, bias in family_shapes().items():
        shapes.plot(range(1, len(bias)), bias[1:], label=label)
    shapes.set(xlabel="distance d", ylabel="bias", ylim=(1.5 * FLOOR, 3))
    clipped = {"type": "clipped", "clipped_pairs": 16}
    for label, scores in {
        "Rotary": rotated_scores("rotary"),
        "Rotary, 16 of 32 pairs clipped": rotated_scores("rotary", rope_scaling=clipped),
        "xPos": rotated_scores("xpos"),
    }.items():
        turned.plot(scores.numpy(), label=label)
    turned.set(xlabel="distance d", ylabel="score of two equal vectors")
    for name in ("kerple_log", "kerple_power", "alibi"):
        heads = heads_within(effective_length(as_it_starts(name)))
        counts.plot(range(1, len(heads)), heads[1:], label=METHODS[name].label)
    counts.set(xlabel="distance d", ylabel="heads with effective length $\\leq d$")
    counts.set_ylim(0, 12.4)
    shapes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    turned.legend(fontsize=8, loc="upper right")
    counts.legend(fontsize=8, loc="upper left")
    distance_axis(shapes)
    distance_axis(counts)
    for axes in (shapes, turned, counts):
        axes.grid(alpha=0.25)
        axes.margins(x=0)
    figure.savefig(path, dpi=160)


def family_shapes() -> dict[str, Tensor]:
    """One bias over distance of each family."""
    import torch

    d = torch.arange(1025.0)
    return {
        "log: $-2\\log(1+d)$": -2 * torch.log1p(d),
        "power: $-0.5\\,d^{0.5}$": -0.5 * d**0.5,
        "ALiBi: $-2^{-4}d$": -(2**-4) * d,
        "BAM: $-e^{-8}d^{1.5}$": -math.exp(-8) * d**1.5,
        "APE: $-(0.01d+\\log(1+d)+0.2\\sqrt{d})$": -(0.01 * d + torch.log1p(d) + 0.2 * d**0.5),
        "CABLE as it starts: $-d\\log 2$": -math.log(2) * d,
        "Gaussian bias: $2\\exp(-0.01 d^2)$": 2 * torch.exp(-0.01 * d**2),
        "Sandwich, head 12": tables_of(as_it_starts("sandwich"), 1025)["bias"][11],
        "T5, head 1 as it starts": tables_of(as_it_starts("rpe"), 1025)["bias"][0],
        "FIRE, head 1 as it starts": next(iter(fire_tables(1025).values()))[0],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Every table over distance, FIRE's, and the families beside each other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs/images/kernels"))
    out = parser.parse_args(argv).out
    from megatron.model.position_base import TableEmbedding
    from megatron.model.position_names import POSITIONAL_EMBEDDINGS

    out.mkdir(parents=True, exist_ok=True)
    for name, cls in POSITIONAL_EMBEDDINGS.items():
        if issubclass(cls, TableEmbedding):
            draw_kernel(name, tables_of(as_it_starts(name), LENGTH), out / f"{name}.png")
            print(out / f"{name}.png")
    draw_kernel("fire", fire_tables(LENGTH), out / "fire.png")
    print(out / "fire.png")
    draw_families(out / "families.png")
    print(out / "families.png")
    return 0


if __name__ == "__main__":
    start_main(main)
