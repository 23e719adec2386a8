"""Draw training runs from their metrics.jsonl: loss, rate, gradient norm, tokens/s, kernels.

tools/plot_run.py RUN [RUN ...] [--out FILE.png]

Several runs share the first row. Each run with learned kernels has a row of its own: every
parameter over the steps, a line per head, and the bias at the first and at the last step; a kernel
of your own needs --allow-kernel package.module:Class for its bias.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.atomic_files import check_writable, read_json
from megatron.errors import DataError, KerpleError
from megatron.neox_arguments.command_line import add_allow_kernel_argument
from megatron.neox_arguments.yaml_files import parse_yaml, read_text
from megatron.terminal import command_parser

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES = {
    "loss": "training loss (nats/token)",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens per second",
}
WIDTH, HEIGHT = 3.9, 3.0  # inches a panel
MAX_KERNELS = 24  # rows of one picture


@dataclass
class RunMetrics:
    """The numbers of one run by name: a list of (step, value)."""

    name: str
    values: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    kernels: list[tuple[int, dict[str, list[float]]]] = field(default_factory=list)
    config: Mapping[str, Any] = field(default_factory=dict)
    shared: dict[str, RunMetrics] = field(default_factory=dict)
    """The kernels of some layers, or of one, each as a run with a kernel, by their names in the
    file."""


def read_run(directory: Path) -> RunMetrics:
    """metrics.jsonl and, for the kernel's name, the config beside it."""
    from megatron.paper.run_files import finite, kernel_values, read_metrics, same_heads

    path = directory / "metrics.jsonl" if directory.is_dir() else directory
    if not path.is_file():
        raise DataError(f"{path}: no such file. Give a run's folder, the `save` of its training.")
    run = RunMetrics(path.parent.name, config=_config_in(path.parent))
    records = list(read_metrics(path))
    with path.open("rb") as file:
        left_out = sum(1 for line in file if line.strip()) - len(records)
    for record in records:
        step = record.pop("step")
        for name, value in record.items():
            if (number := finite(value)) is not None:
                run.values.setdefault(name, []).append((step, number))
        for name, kernel in record.items():
            if not (isinstance(kernel, dict) and (values := kernel_values(kernel))):
                continue
            owner = run
            if name.startswith(("kernel_shared", "kernel_layer")):
                owner = run.shared.setdefault(name, _of_some_layers(run, name))
            elif name != "kernel":
                continue
            if same_heads(values, owner.kernels[0][1] if owner.kernels else values):
                owner.kernels.append((step, values))
            else:
                left_out += 1
    if not run.values:
        raise DataError(f"{path}: holds no metrics; the first come after log_interval steps")
    if left_out:
        text = f"{path}: left out {left_out} line(s) that are no record of this run"
        warnings.warn(text, stacklevel=2)
    return run


def _config_in(folder: Path) -> Mapping[str, Any]:
    """The manifest's; of a run out of an archive its config.yml; else an empty one."""
    content, file = (read_json(folder / "manifest.json") or {}).get("config"), folder / "config.yml"
    if content is None and file.is_file():
        content = parse_yaml(read_text(file), str(file))
    return content if isinstance(content, dict) else {}


def _of_some_layers(run: RunMetrics, name: str) -> RunMetrics:
    """A run for the kernel of some layers, or of one: named by its layers, with its method."""
    from megatron.model.outline import layer_ranges
    from megatron.model.sizes import ModelSizes
    from megatron.neox_arguments import NeoXArgs

    try:
        outline = ModelSizes(NeoXArgs.from_dict(run.config)).outline
        kernels = {
            f"kernel_shared{place}": kernel for place, kernel in enumerate(outline.kernels())
        } | {f"kernel_layer{kernel[2][0]}": kernel for kernel in outline.kernels()}
        _, own, layers = kernels[name]
    except (KerpleError, LookupError):  # another program's file
        return RunMetrics(f"{run.name}, {name}", config={})
    config = {**run.config, "pos_emb": own.pos_emb}
    return RunMetrics(f"{run.name}, {layer_ranges(layers)} (from 1)", config=config)


def draw(runs: Sequence[RunMetrics], out: Path) -> None:
    """The whole picture."""
    from matplotlib.figure import Figure

    from megatron.paper.style import figure_style

    owners = [owner for run in runs for owner in (run, *run.shared.values())]
    with_kernels = [owner for owner in owners if len(owner.kernels) > 1]
    if len(with_kernels) > MAX_KERNELS:
        text = f"drawn: the first {MAX_KERNELS} of {len(with_kernels)} kernels"
        warnings.warn(text, stacklevel=2)
        with_kernels = with_kernels[:MAX_KERNELS]
    columns = max([4, *(len(run.kernels[0][1]) + 1 for run in with_kernels)])
    rows = 1 + len(with_kernels)
    with figure_style():
        figure = Figure(figsize=(WIDTH * columns, HEIGHT * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False)
        _draw_curves(grid[0], runs)
        handles, names = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower left", ncols=max(1, columns // 2))
        for row, run in zip(grid[1:], with_kernels, strict=True):
            _draw_kernels(row, run)
        for axes in grid.flat:
            if axes.get_xlabel() == "step":
                axes.locator_params(axis="x", integer=True)
        figure.savefig(out, dpi=120)


def _draw_curves(axes_row: Sequence[Axes], runs: Sequence[RunMetrics]) -> None:
    from megatron.paper.style import in_lines

    for axes, (name, title) in zip(axes_row, CURVES.items(), strict=False):
        for number, run in enumerate(runs):
            color = f"C{number}"
            _line(axes, run.values.get(name, []), color=color, label=in_lines(run.name))
            if name == "loss":
                _line(axes, run.values.get("valid_loss", []), color=color, linestyle="--")
        axes.set(xlabel="step", ylabel=title)
    axes_row[0].set_title("dashed: validation", fontsize=10, fontweight="normal")
    axes_row[3].set_ylim(bottom=0)
    for axes in axes_row[len(CURVES) :]:
        axes.set_axis_off()


def _line(axes: Axes, points: Sequence[tuple[int, float]], **options: Any) -> None:
    if points:
        marker = "o" if len(points) == 1 else None
        axes.plot([x for x, _ in points], [y for _, y in points], marker=marker, **options)


def _draw_kernels(axes_row: Sequence[Axes], run: RunMetrics) -> None:
    from megatron.commands.kernel_tools import head_colors
    from megatron.paper.style import EndLabel, direct_labels, in_lines

    steps = [step for step, _ in run.kernels]
    names = list(run.kernels[0][1])
    colors = head_colors(len(run.kernels[0][1][names[0]]))
    for axes, name in zip(axes_row, names, strict=False):
        ends = []
        for head, color in enumerate(colors):
            values = [kernel[name][head] for _, kernel in run.kernels]
            axes.plot(steps, values, color=color)
            ends.append(EndLabel(f"head {head + 1}", color, values[-1]))
        axes.set(xlabel="step", ylabel=f"{name} of each head")
        if len(colors) <= 12:
            direct_labels(axes, ends)
    axes_row[0].set_title(in_lines(run.name, 44), fontsize=10, loc="left")
    _draw_drift(axes_row[len(names)], run, colors)
    for axes in axes_row[len(names) + 1 :]:
        axes.set_axis_off()


def _draw_drift(axes: Axes, run: RunMetrics, colors: Sequence[Any]) -> None:
    """The bias over distance, dotted at the first step and solid at the last."""
    from megatron.commands.kernel_tools import plot_over_distance
    from megatron.paper.kernel_figures import kernel_bias

    trained = run.config.get("seq_length")
    length = 4 * trained if isinstance(trained, int) and 0 < trained < 1 << 22 else 512
    name = str(run.config.get("pos_emb", "none"))
    for (_, values), style in ((run.kernels[0], ":"), (run.kernels[-1], "-")):
        try:
            table = kernel_bias(name, values, len(colors), length)
        except KerpleError as error:
            table = None
            warnings.warn(f"{run.name}: the bias is not drawn. {error}", stacklevel=2)
        if table is None:
            axes.set_axis_off()
            return
        plot_over_distance(axes, table, colors, "bias", linestyle=style, linewidth=1.2)
    title = f"bias at step {run.kernels[0][0]} (dotted) and {run.kernels[-1][0]}"
    axes.set_title(title, fontsize=10, fontweight="normal", loc="right")


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser("plot_run.py", __doc__ or "")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a training's `save`")
    parser.add_argument("--out", type=Path, help="PNG, PDF or SVG (default: RUN/plot.png)")
    add_allow_kernel_argument(parser)
    options = parser.parse_args(argv)
    first = options.runs[0]
    default = (first if first.is_dir() else first.parent) / "plot.png"
    out = options.out or (default if len(options.runs) == 1 else Path("runs.png"))
    if out.suffix not in (".png", ".pdf", ".svg"):
        raise DataError(f"--out {out}: end it with .png, .pdf or .svg")
    runs = [read_run(path) for path in options.runs]
    check_writable(out, "--out")
    draw(runs, out)
    print(out)
    return 0
