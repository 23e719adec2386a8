"""Draw every kernel over distance for docs/positional_embeddings.md.

python tools/draw_kernel_docs.py [--out docs/images/kernels]

One picture per method with tables, with terms of each layer or with a rotation, as it starts, in
the shape of the 162M model (12 heads of 64); and one picture with all families. A run's kernels,
or your own: tools/plot_kernels.py.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from _start import start_main

# isort: split
from megatron.commands.kernel_tools import FLOOR, drawn_of, head_colors, plot_over_distance
from megatron.neox_arguments.catalogue import METHODS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

    from megatron.model.content_positions import LayerTerms
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
        near = (table_name == "weight" and name != "ape") or name.startswith(("gauss", "cable"))
        shown = table[:, : NEAR if near else LENGTH].numpy()
        plot_over_distance(axes, shown, head_colors(len(shown)), table_name, linewidth=1.2)
        axes.grid(alpha=0.25)
    known = METHODS[name]
    formula = f":  ${known.formula}$" if known.formula else ""
    figure.suptitle(f"{known.label} ({name}){formula}", fontsize=11)
    figure.savefig(path, dpi=110)


def terms(name: str, **keys: Any) -> LayerTerms:
    """A layer's module, as it starts."""
    from megatron.model.position_names import build_positional_embedding, position_options

    built = build_positional_embedding(name, position_options(heads=12, head_dim=64, **keys))
    return cast("LayerTerms", built)


def bam_tables() -> dict[str, Tensor]:
    """`bam`, and `bam_ssmax` in a query that sees 512 keys."""
    bias = drawn_of(as_it_starts("bam"), LENGTH)["bias"]
    return {"bias": bias, "bias in bam_ssmax, 512 keys": bias * math.log(512)}


def cable_tables() -> dict[str, Tensor]:
    """The bias of one query over tokens that are drawn at random, as it starts and learned."""
    import torch

    tokens = torch.randn(1, NEAR, 12 * 64, generator=torch.Generator().manual_seed(1))
    module, tables = terms("cable"), {}
    for title, factor in (("bias, as it starts", 1.0), ("bias, w five times as large", 5.0)):
        with torch.no_grad():
            module.weight.mul_(factor)
            gates = module(tokens, NEAR, torch.arange(NEAR)[None]).log_gates
        assert gates is not None
        tables[title] = torch.nn.functional.pad(gates[0].flip(1).cumsum(1), (1, 0))[:, :NEAR]
    return tables


def inkling_tables() -> dict[str, Tensor]:
    """Three features of distance, chosen for the picture, as queries mix them."""
    import torch

    d, extent = torch.arange(float(LENGTH)), 128
    features = torch.stack([torch.exp(-d / 4), torch.exp(-((d / 32 - 1) ** 2)), d / extent])
    features[:, extent:] = 0
    queries = torch.tensor([[4.0, 0, 0], [0, 3, 0], [2, -2, -4], [-3, 1, 2]])
    bias = queries @ features
    return {
        f"features of distance, E = {extent}": features,
        "inkling: bias of four queries": bias,
        "kerple_inkling: the same": bias - torch.log1p(d),
    }


def rotated_scores(name: str, length: int, **keys: Any) -> Tensor:
    """Of two equal vectors of 64 numbers at each distance, over that at distance 0."""
    return next(iter(drawn_of(terms(name, **keys), length).values()))[0]


def draw_rotations(path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 3.4), layout="constrained")
    near, far = figure.subplots(1, 2)
    plot_rotations(near, 257)
    yarn = {"type": "yarn", "factor": 8.0, "original_max_position": 512}
    for label, scores in {
        "Rotary, a quarter rotated": rotated_scores("rotary", 4097, rotary_pct=0.25),
        "Rotary, YaRN factor 8": rotated_scores("rotary", 4097, rope_scaling=yarn),
        "Rotary": rotated_scores("rotary", 4097),
        "xPos": rotated_scores("xpos", 4097),
    }.items():
        far.plot(scores.numpy(), label=label, linewidth=0.8)
    for axes in (near, far):
        axes.set(xlabel="distance d", ylabel="score of two equal vectors", ylim=(-0.2, 1.4))
        axes.grid(alpha=0.25)
        axes.margins(x=0)
        axes.legend(fontsize=8, loc="upper right", ncols=2)
    figure.savefig(path, dpi=110)


def plot_rotations(axes: Axes, length: int) -> None:
    clipped = {"type": "clipped", "clipped_pairs": 16}
    for label, scores in {
        "Rotary": rotated_scores("rotary", length),
        "Rotary, 16 of 32 pairs clipped": rotated_scores("rotary", length, rope_scaling=clipped),
        "xPos": rotated_scores("xpos", length),
    }.items():
        axes.plot(scores.numpy(), label=label)


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
    plot_rotations(turned, 513)
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
        "Sandwich, head 12": drawn_of(as_it_starts("sandwich"), 1025)["bias"][11],
        "T5, head 1 as it starts": drawn_of(as_it_starts("rpe"), 1025)["bias"][0],
        "FIRE, head 1 as it starts": drawn_of(terms("fire"), 1025)["bias"][0],
    }


IN_ANOTHER = {"kerple_power_original": "alibi", "bam_ssmax": "bam", "kerple_inkling": "inkling"}
"""Tables that have no picture of their own, and whose picture says what they are."""


def main(argv: Sequence[str] | None = None) -> int:
    """Every table over distance, the terms of layers, rotations, and the families together."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs/images/kernels"))
    out = parser.parse_args(argv).out
    from megatron.model.position_base import TableEmbedding
    from megatron.model.position_names import POSITIONAL_EMBEDDINGS

    out.mkdir(parents=True, exist_ok=True)
    pictures = {
        name: drawn_of(as_it_starts(name), LENGTH)
        for name, cls in POSITIONAL_EMBEDDINGS.items()
        if issubclass(cls, TableEmbedding) and name not in IN_ANOTHER
    }
    pictures |= {
        "bam": bam_tables(),
        "cable": cable_tables(),
        "fire": drawn_of(terms("fire"), LENGTH),
        "inkling": inkling_tables(),
    }
    for name, tables in pictures.items():
        draw_kernel(name, tables, out / f"{name}.png")
        print(out / f"{name}.png")
    for name, picture in {"rotary": draw_rotations, "families": draw_families}.items():
        picture(out / f"{name}.png")
        print(out / f"{name}.png")
    return 0


if __name__ == "__main__":
    start_main(main)
