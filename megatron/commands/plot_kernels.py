"""Draw the kernels of a checkpoint, of a method or of a class of yours.

tools/plot_kernels.py runs/laptop                          the kernels that a run has learned
tools/plot_kernels.py kerple_log alibi --heads 8           methods as they start
tools/plot_kernels.py examples.custom_kernel:RationalKernel  a class of your own

Each picture has the bias (or weight) over distance, a line per head, and the matrix over queries
and keys that attention sees, for the heads that reach least and furthest.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.atomic_files import check_writable
from megatron.errors import KerpleError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

MATRIX = 64  # queries and keys shown
FLOOR = -20.0  # a key with such a bias is out of reach of softmax


class Drawn(NamedTuple):
    """One picture: its title, its file's name, and tables [heads, length] by name."""

    title: str
    file: Path
    tables: dict[str, Tensor]


def subjects(names: Sequence[str], options: argparse.Namespace) -> Iterator[Drawn]:
    """What there is to draw for every name on the command line."""
    for name in names:
        if Path(name).exists():
            yield from _of_checkpoint(Path(name), options)
        else:
            yield _of_method(name, options)


def _of_method(name: str, options: argparse.Namespace) -> Drawn:
    from megatron.model.standalone import kernel
    from megatron.neox_arguments import allow_kernel
    from megatron.neox_arguments.catalogue import label_of

    if "/" in name:
        raise KerpleError(f"{name}: no such run or checkpoint")
    if ":" in name:
        allow_kernel(name)  # the user has named it here
    module = kernel(name, heads=options.heads, head_dim=options.head_dim)
    title = f"{label_of(name)}, as it starts ({options.heads} heads of {options.head_dim})"
    return Drawn(title, Path(f"{name.replace(':', '.')}.png"), _tables(module, options.length))


def _of_checkpoint(path: Path, options: argparse.Namespace) -> Iterator[Drawn]:
    from megatron.generation.pretrained import load_pretrained
    from megatron.model.position_base import TableEmbedding
    from megatron.neox_arguments.catalogue import label_of

    model = load_pretrained(path, iteration=options.iteration)
    modules = [m for m in model.positional_embeddings() if isinstance(m, TableEmbedding)]
    if not modules:
        raise KerpleError(f"{path}: {model.spec.pos_emb} has no table over distance to draw")
    length = options.length or 4 * model.config.model.seq_length
    for number, module in enumerate(modules):
        layer = f", layer {number + 1}" if len(modules) > 1 else ""
        title = f"{path.name}: {label_of(model.spec.pos_emb)} at step {model.iteration}{layer}"
        file = path / (f"kernels_layer{number + 1}.png" if layer else "kernels.png")
        yield Drawn(title, file, _tables(module, length))


def _tables(module: Any, length: int | None) -> dict[str, Tensor]:
    import torch

    with torch.no_grad():
        tables = module(length or 513)._asdict()
    return {name: table.float() for name, table in tables.items() if table is not None}


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
            scale: dict[str, Any] = {
                "vmin": float(shown.min()),
                "vmax": float(shown.max()),
            }  # one for both heads
            for axes, (head, word) in zip(axes_row[1:], _extremes(table), strict=True):
                title = f"head {head + 1}, {word}: {name}"
                image = _draw_matrix(axes, table[head], title, scale)
            figure.colorbar(image, ax=axes_row[1:], shrink=0.85)
        figure.savefig(path, dpi=120)


def _draw_heads(axes: Axes, name: str, table: Tensor) -> None:
    import matplotlib as mpl

    heads = len(table)
    for head, row in enumerate(table):
        color = mpl.colormaps["viridis"](0.92 * head / max(heads - 1, 1))
        axes.plot(row.numpy(), color=color, linewidth=1.4, label=f"head {head + 1}")
    axes.set(xlabel="distance", ylabel=name)
    axes.margins(x=0)
    if float(table.min()) < FLOOR:
        axes.set_ylim(FLOOR, max(0.5, float(table.max())))
    axes.legend(fontsize=8, ncols=2 if heads > 8 else 1, loc="center left", bbox_to_anchor=(1, 0.5))


def _extremes(table: Tensor) -> list[tuple[int, str]]:
    """The heads that fall most and least from distance 0 to the end of the matrix."""
    fall = table[:, 0] - table[:, min(MATRIX, table.shape[1]) - 1]
    return [(int(fall.argmax()), "nearest sight"), (int(fall.argmin()), "furthest sight")]


def _draw_matrix(axes: Axes, row: Tensor, title: str, scale: dict[str, Any]) -> Any:
    import torch

    size = min(MATRIX, len(row))
    distance = torch.arange(size)[:, None] - torch.arange(size)[None, :]
    matrix = row[distance.clamp(min=0)].masked_fill(distance < 0, torch.nan)
    image = axes.imshow(matrix.numpy(), cmap="viridis", **scale)
    axes.set(xlabel="key", ylabel="query")
    axes.set_title(title, fontsize=10, fontweight="normal")
    axes.grid(visible=False)
    return image


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    from megatron.neox_arguments.command_line import add_allow_kernel_argument

    parser = argparse.ArgumentParser(
        prog="plot_kernels.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="+", metavar="RUN|METHOD|MODULE:CLASS")
    parser.add_argument(
        "--out", type=Path, help="folder of the pictures (default: the run's, or .)"
    )
    parser.add_argument("--length", type=int, help="distances (default: 4 x seq_length, or 513)")
    parser.add_argument("--iteration", type=int, help="which global_stepN of a run (latest)")
    parser.add_argument("--heads", type=int, default=12, help="of a method (12)")
    parser.add_argument("--head-dim", type=int, default=64, help="of a method (64)")
    add_allow_kernel_argument(parser)
    options = parser.parse_args(argv)
    for name in ("length", "heads", "head_dim"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: must be at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    from megatron.machine import settle_accelerator

    settle_accelerator()
    for drawn in subjects(options.names, options):
        path = options.out / drawn.file.name if options.out else drawn.file
        check_writable(path, "--out")
        draw(drawn, path)
        print(path, flush=True)
    return 0
