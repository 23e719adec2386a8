"""Draw every kernel over distance for docs/positional_embeddings.md.

python tools/draw_kernel_docs.py [--out docs/images/kernels]

One picture per kernel: the bias (or weight) of each head as it starts, in the shape of the 162M
model (12 heads of 64); and one picture that compares the families. A run's kernels, or your own:
tools/plot_kernels.py.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from _start import start_main

# isort: split
from megatron.commands.kernel_tools import FLOOR, head_colors, plot_over_distance, tables_of
from megatron.neox_arguments.catalogue import METHODS

if TYPE_CHECKING:
    from megatron.model.position_base import TableEmbedding

LENGTH = 513
NEAR = 33  # Gaussians decay to 0 within a few positions


def as_it_starts(name: str) -> TableEmbedding:
    from kerple import kernel

    return kernel(name, heads=12, head_dim=64)


def draw_kernel(name: str, path: Path) -> None:
    from matplotlib.figure import Figure

    tables = tables_of(as_it_starts(name), LENGTH)
    figure = Figure(figsize=(5.2 * len(tables), 3.2), layout="constrained")
    axes_row = figure.subplots(1, len(tables), squeeze=False)[0]
    for axes, (table_name, table) in zip(axes_row, tables.items(), strict=True):
        near = table_name == "weight" or name.startswith("gauss")
        shown = table[:, : NEAR if near else LENGTH].numpy()
        plot_over_distance(axes, shown, head_colors(len(shown)), table_name, linewidth=1.2)
        axes.grid(alpha=0.25)
    known = METHODS[name]
    figure.suptitle(f"{known.label} ({name}):  ${known.formula}$", fontsize=11)
    figure.savefig(path, dpi=110)


def draw_families(path: Path) -> None:
    """The paper's two views: shapes side by side, and heads within their effective length."""
    import torch
    from matplotlib.figure import Figure

    from megatron.model.kernel_theory import effective_length, heads_within
    from megatron.paper.style import distance_axis

    figure = Figure(figsize=(10.4, 3.6), layout="constrained")
    shapes, counts = figure.subplots(1, 2)
    d = torch.arange(1025.0)
    for label, bias in {
        "log: $-2\\log(1+d)$": -2 * torch.log1p(d),
        "power: $-0.5\\,d^{0.5}$": -0.5 * d**0.5,
        "ALiBi: $-2^{-4}d$": -(2**-4) * d,
        "BAM: $-e^{-8}d^{1.5}$": -math.exp(-8) * d**1.5,
        "CABLE as it starts: $-d\\log 2$": -math.log(2) * d,
        "Gaussian bias: $2\\exp(-0.01 d^2)$": 2 * torch.exp(-0.01 * d**2),
        "Sandwich, head 12": tables_of(as_it_starts("sandwich"), 1025)["bias"][11],
    }.items():
        shapes.plot(d[1:], bias[1:], label=label)
    shapes.set(xlabel="distance d", ylabel="bias", ylim=(1.5 * FLOOR, 3))
    for name in ("kerple_log", "kerple_power", "alibi"):
        heads = heads_within(effective_length(as_it_starts(name)))
        counts.plot(range(1, len(heads)), heads[1:], label=METHODS[name].label)
    counts.set(xlabel="distance d", ylabel="heads with effective length $\\leq d$")
    counts.set_ylim(0, 12.4)
    for axes, corner in ((shapes, "lower left"), (counts, "upper left")):
        distance_axis(axes)
        axes.legend(fontsize=8, loc=corner)
        axes.grid(alpha=0.25)
        axes.margins(x=0)
    figure.savefig(path, dpi=160)


def main(argv: Sequence[str] | None = None) -> int:
    """Every table over distance, and the families beside each other."""
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
            draw_kernel(name, out / f"{name}.png")
            print(out / f"{name}.png")
    draw_families(out / "families.png")
    print(out / "families.png")
    return 0


if __name__ == "__main__":
    start_main(main)
