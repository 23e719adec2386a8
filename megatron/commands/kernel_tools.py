"""check_kernel.py (is a kernel conditionally positive definite?) and plot_kernels.py."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.atomic_files import check_writable
from megatron.errors import KerpleError
from megatron.machine import set_deepspeed_accelerator
from megatron.neox_arguments.catalogue import label_of
from megatron.neox_arguments.command_line import add_checkpoint_arguments
from megatron.terminal import command_parser

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

    from megatron.model.position_base import PositionalEmbedding
    from megatron.model.transformer import TransformerLayer

CHECK = """tools/check_kernel.py kerple_log                           a method, as it starts
tools/check_kernel.py examples.custom_kernel:RationalKernel  a class of your own
tools/check_kernel.py --power 2.5                          -d^p for a p of your choice

For 4, 8, 16, ... points: whether every head's bias is conditionally positive definite (CPD), its
smallest eigenvalue on coefficients that sum to zero, and the smallest constant c (to 1%) that makes
c + kernel positive definite (PD) for all heads. A weight, which multiplies scores, must be PD.

A bias without a lower bound needs a larger c for more points: the paper's Lemma 1 gives a c for
each finite set of positions, not one for all. Softmax cancels c.

A method is also tested for training: values and gradients must be finite (at distance 0 too), and
rounding to bf16 must not change a bias within 8 of its head's largest by over 0.25.

The exit code is 1 if a kernel fails.
"""
SMALLEST, LARGEST = 4, 128


def check_kernel(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(
        "check_kernel.py",
        "Test whether a kernel is conditionally positive definite, as the paper's theory requires.",
        CHECK,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a method, or module:Class")
    parser.add_argument("--power", type=float, action="append", default=[], metavar="P")
    parser.add_argument(
        "--points", type=int, default=LARGEST, help=f"largest number of points ({LARGEST})"
    )
    options = _parsed(parser, argv)
    if not options.names and not options.power:
        raise KerpleError("name a method, a module:Class, or give --power P")
    if options.points < SMALLEST:
        raise KerpleError(f"--points {options.points}: at least {SMALLEST}")
    good = True
    for name in options.names:
        good &= _report_training(name, options)
    for title, kind, table in _to_check(options):
        if not bool(table.isfinite().all()):
            raise KerpleError(f"{title}: not finite on {options.points} points; use fewer --points")
        good &= _report(title, kind, table, options.points)
    return 0 if good else 1


def _parsed(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, **most: int
) -> argparse.Namespace:
    """The options, with those of a method's shape; whole numbers from 1 to these, where given."""
    parser.add_argument("--heads", type=int, default=12, help="heads of a method (12)")
    parser.add_argument("--head-dim", type=int, default=64, help="head dim of a method (64)")
    options = parser.parse_args(argv)
    for name, limit in {"heads": 1024, "head_dim": 4096, **most}.items():
        value = getattr(options, name)
        if value is not None and not 1 <= value <= limit:
            parser.error(f"--{name.replace('_', '-')}: must be from 1 to {limit}")
    return options


def _sizes(most: int) -> list[int]:
    sizes = [SMALLEST << i for i in range(20) if SMALLEST << i < most]
    return [*sizes, most]


def _named(name: str, options: argparse.Namespace) -> Any:
    """A method's module as it starts, or that of a class of the user's own."""
    from megatron.model.position_names import kernel

    return kernel(name, heads=options.heads, head_dim=options.head_dim)


TRIED = 4096  # distances


def _report_training(name: str, options: argparse.Namespace) -> bool:
    from megatron.model.kernel_theory import bf16_error, training_problems

    module = _named(name, options)
    problems = training_problems(module, TRIED)
    for problem in problems:
        print(f"{name}: NO: {problem}")
    for kind, table in drawn_of(module, TRIED).items() if not problems else ():
        moved = f", bf16 moves it by up to {bf16_error(table):.2g}" if kind == "bias" else ""
        span = f"{float(table.min()):.4g} to {float(table.max()):.4g}"
        print(f"{name}: {kind} {span} below distance {TRIED}, gradients finite{moved}")
    return not problems


def _to_check(options: argparse.Namespace) -> Iterator[tuple[str, str, Tensor]]:
    """A title, `bias` or `weight`, and the table [heads, points] of all that was named."""
    import torch

    for name in options.names:
        for kind, table in drawn_of(_named(name, options), options.points).items():
            yield f"{name}: {kind} of {options.heads} heads", kind, table
    for power in options.power:
        if not power > 0:
            raise KerpleError(f"--power {power}: must be above 0")
        distance = torch.arange(options.points, dtype=torch.float64)
        yield f"-d^{power:g}", "bias", -(distance**power)[None]


def _report(title: str, kind: str, table: Tensor, most: int) -> bool:
    """A bias must be CPD, a weight PD."""
    from megatron.model import kernel_theory as theory

    of_bias = kind == "bias"
    word, holds, margins_of = (
        ("CPD", theory.is_cpd, theory.cpd_margin)
        if of_bias
        else ("PD", theory.is_pd, theory.pd_margin)
    )
    print(f"{title}\n  points  {word:>3}  smallest eigenvalue{'  shift c' if of_bias else ''}")
    good = True
    for points in _sizes(most):
        fine, margins = holds(table, points), margins_of(table, points)
        shift = (_largest_shift(table, points) if fine else "none") if of_bias else ""
        row = (
            f"  {points:6}  {'yes' if fine else 'NO':>3}  {float(margins.min()):19.3g}  {shift:>7}"
        )
        print(row.rstrip())
        if of_bias and good and not fine:
            worst = int(margins.argmin())
            found = theory.counterexample(table[worst], points)
            if found is not None:
                listed = ", ".join(f"{value:.3f}" for value in found.tolist())
                print(
                    f"          head {worst + 1}: these sum to 0, their form is negative: {listed}"
                )
        good &= fine
    return good


def _largest_shift(bias: Tensor, points: int) -> str:
    from megatron.errors import KernelAnalysisError
    from megatron.model.kernel_theory import smallest_shift

    try:
        return f"{max(smallest_shift(head, points, 0.01) for head in bias):.4g}"
    except KernelAnalysisError:
        return "none"  # conditionally definite, but not strictly: as -d^2


PLOT = """Draw the kernels of a checkpoint, of a method or of a class of yours.

tools/plot_kernels.py runs/first                          the kernels that a run has learned
tools/plot_kernels.py kerple_log alibi --heads 8           methods as they start
tools/plot_kernels.py examples.custom_kernel:RationalKernel  a class of your own
tools/plot_kernels.py --framework --out pictures           the paper's Figure 1

Each picture has the bias (or weight) over distance, a line per head, and the matrix over queries
and keys, for the heads whose bias decays fastest and slowest. Of a run with `inkling` or
`kerple_inkling` the features of distance are drawn for each layer, a line per feature; of one with
`fire` each layer's bias, of queries up to its threshold L and of one at 8 L; of one with `cable`
each layer's bias over tokens with w x = 0; of one with `rotary` or `xpos` the score of two equal
vectors, over that at distance 0.
"""
MATRIX = 64  # queries and keys shown
FEATURES = "features of distance"
FLOOR = -20.0  # softmax gives about 0 to a key with such a bias


class Drawn(NamedTuple):
    """One picture: its title, its file's name, and tables [heads, length] by name."""

    title: str
    file: Path
    tables: dict[str, Tensor]


def subjects(names: Sequence[str], options: argparse.Namespace) -> Iterator[Drawn]:
    """The pictures for every name on the command line."""
    for name in names:
        if Path(name).exists():
            yield from _of_checkpoint(Path(name), options)
        else:
            yield _of_method(name, options)


def _of_method(name: str, options: argparse.Namespace) -> Drawn:
    if "/" in name:
        raise KerpleError(f"{name}: no such run or checkpoint")
    from megatron.model.position_base import TableEmbedding
    from megatron.model.position_names import position_options, positional_embedding_class

    title = f"{label_of(name)}, as it starts ({options.heads} heads of {options.head_dim})"
    file = Path(f"{name.replace(':', '.')}.png")
    if ":" in name or issubclass(method := positional_embedding_class(name), TableEmbedding):
        module = _named(name, options)
    else:
        module = method(position_options(heads=options.heads, head_dim=options.head_dim))
    tables = drawn_of(module, options.length or 513)
    if not tables:
        raise KerpleError(f"{name}: it has nothing over distance to draw")
    return Drawn(title, file, tables)


def _of_checkpoint(path: Path, options: argparse.Namespace) -> Iterator[Drawn]:
    from megatron.generation.pretrained import load_pretrained
    from megatron.model.outline import layer_ranges, outline_of
    from megatron.model.position_base import TableEmbedding

    model = load_pretrained(path, iteration=options.iteration)
    modules = [m for m in model.positional_embeddings() if isinstance(m, TableEmbedding)]
    length = options.length or 4 * model.config.model.seq_length
    by_layer = [_of_layer(layer, length) for layer in model.layers]
    if not modules and not any(by_layer):
        raise KerpleError(f"{path}: {model.spec.pos_emb} has nothing over distance to draw")
    kernels = outline_of(model.spec).kernels()  # in the order of the modules
    for number, (module, (_, own, layers)) in enumerate(zip(modules, kernels, strict=True)):
        layer = f", layer {number + 1} (from 1)" if len(modules) > 1 else ""
        file = path / (f"kernels_layer{number + 1}.png" if layer else "kernels.png")
        if model.spec.layer_pattern is not None:
            layer = f", {layer_ranges(layers)} (from 1)"
            file = path / (f"kernels_{number}.png" if len(modules) > 1 else "kernels.png")
        title = f"{path.name}: {label_of(own.pos_emb)} at step {model.iteration}{layer}"
        yield Drawn(title, file, drawn_of(module, length))
    for number, tables in enumerate(by_layer, 1):
        if tables and not _among(by_layer[: number - 1], tables):
            word = next(iter(tables))
            title = f"{path.name}: {word} at step {model.iteration}, layer {number} (from 1)"
            yield Drawn(title, path / f"{re.split('[ ,]', word)[0]}_layer{number}.png", tables)


def _of_layer(layer: TransformerLayer, length: int) -> dict[str, Tensor]:
    """What a layer has over distance beside the kernels: of its terms, and of its rotation."""
    modules = (layer.attention.terms, layer.attention.rotary)
    return {k: v for m in modules if m is not None for k, v in drawn_of(m, length).items()}


def _among(others: Sequence[dict[str, Tensor]], tables: dict[str, Tensor]) -> bool:
    """Whether a layer before has the same, as layers with one rotation do."""
    import torch

    return any(
        list(other) == list(tables) and all(torch.equal(other[k], tables[k]) for k in tables)
        for other in others
    )


def drawn_of(module: PositionalEmbedding, length: int) -> dict[str, Tensor]:
    """What it has over distance by name, as numbers to plot."""
    import torch

    with torch.no_grad():
        return {k: table.detach().float() for k, table in module.to_draw(length).items()}


def draw(drawn: Drawn, path: Path) -> None:
    """One row a table: curves, and the matrices of two heads."""
    from matplotlib.figure import Figure

    from megatron.paper.style import figure_style

    with figure_style():
        rows = len(drawn.tables)
        figure = Figure(figsize=(13, 3.6 * rows), layout="constrained")
        grid = figure.subplots(rows, 3, squeeze=False, width_ratios=[1.5, 1, 1])
        figure.suptitle(drawn.title, fontsize=12)
        for axes_row, (name, table) in zip(grid, drawn.tables.items(), strict=True):
            _draw_heads(axes_row[0], name, table)
            shown = table[:, :MATRIX].clamp(min=FLOOR)
            limits = float(shown.min()), float(shown.max())  # one scale for both heads
            heads = _extremes(table)
            if len(table) == 1:
                axes_row[2].remove()
                heads = heads[:1]
            for axes, (head, word) in zip(axes_row[1:], heads, strict=False):
                title = f"{_row(name)} {head + 1}, {word}: {name}" if len(table) > 1 else name
                image = _draw_matrix(axes, table[head], title, limits)
            figure.colorbar(image, ax=axes_row[1 : 1 + len(heads)], shrink=0.85)
        figure.savefig(path, dpi=120)


def head_colors(heads: int) -> list[tuple[float, ...]]:
    """A colour for each head, from dark to light."""
    import matplotlib as mpl

    return [mpl.colormaps["viridis"](0.92 * head / max(heads - 1, 1)) for head in range(heads)]


def plot_over_distance(
    axes: Axes, table: Any, colors: Sequence[Any], name: str, *, row: str = "head", **look: Any
) -> None:
    """A line per row of [heads, length] from distance 1 on, cut where softmax gives about 0.

    On a linear axis the heads that fall fast would be one vertical line.
    """
    from megatron.paper.style import distance_axis

    for number, (values, color) in enumerate(zip(table, colors, strict=True), 1):
        axes.plot(range(1, len(values)), values[1:], color=color, label=f"{row} {number}", **look)
    axes.set(xlabel="distance", ylabel=name)
    distance_axis(axes)
    if float(table.min()) < FLOOR:
        axes.set_ylim(FLOOR, max(0.5, float(table.max())))


def _draw_heads(axes: Axes, name: str, table: Tensor) -> None:
    colors = head_colors(len(table))
    plot_over_distance(axes, table.numpy(), colors, name, row=_row(name), linewidth=1.4)
    columns = 2 if len(table) > 8 else 1
    if len(table) > 1:
        axes.legend(fontsize=8, ncols=columns, loc="center left", bbox_to_anchor=(1, 0.5))


def _row(name: str) -> str:
    """What a row of this table belongs to."""
    return "feature" if name == FEATURES else "head"


def _extremes(table: Tensor) -> list[tuple[int, str]]:
    """The heads whose table falls most and least from distance 0 to the end of the matrix."""
    fall = table[:, 0] - table[:, min(MATRIX, table.shape[1]) - 1]
    return [(int(fall.argmax()), "fastest decay"), (int(fall.argmin()), "slowest decay")]


def _draw_matrix(axes: Axes, row: Tensor, title: str, limits: tuple[float, float]) -> Any:
    import torch

    size = min(MATRIX, len(row))
    distance = torch.arange(size)[:, None] - torch.arange(size)[None, :]
    matrix = row[distance.clamp(min=0)].masked_fill(distance < 0, torch.nan)
    image = axes.imshow(matrix.numpy(), cmap="viridis", vmin=limits[0], vmax=limits[1])
    axes.set(xlabel="key", ylabel="query")
    axes.set_title(title, fontsize=10, fontweight="normal")
    axes.grid(visible=False)
    return image


def plot_kernels(argv: Sequence[str] | None = None) -> int:
    parser = command_parser("plot_kernels.py", PLOT)
    parser.add_argument("names", nargs="*", metavar="RUN|METHOD|MODULE:CLASS")
    parser.add_argument(
        "--framework", action="store_true", help="the paper's Figure 1, as framework.png"
    )
    parser.add_argument(
        "--out", type=Path, help="folder of the pictures (default: the run's, or .)"
    )
    parser.add_argument("--length", type=int, help="distances (default: 4 x seq_length, or 513)")
    add_checkpoint_arguments(parser)
    options = _parsed(parser, argv, length=1 << 24)
    if options.length == 1:  # curves begin at distance 1
        parser.error("--length: must be at least 2")
    if not options.names and not options.framework:
        parser.error("name a run, a method or module:Class, or use --framework")
    set_deepspeed_accelerator()
    for drawn in subjects(options.names, options):
        path = options.out / drawn.file.name if options.out else drawn.file
        check_writable(path, "--out")
        draw(drawn, path)
        print(path, flush=True)
    if options.framework:
        from megatron.paper.kernel_figures import framework_illustration

        path = (options.out or Path()) / "framework.png"
        check_writable(path, "--out")
        framework_illustration().savefig(path, dpi=120)
        print(path, flush=True)
    return 0
