"""tools/plot_run.py: pictures of runs, and one line for what is no run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from megatron.commands import run
from megatron.commands.plot_run import read_run
from megatron.commands.watch import Watched, as_data
from tests.neox_arguments.samples import TINY


def write_metrics(folder: Path, pos_emb: str = "kerple_log", steps: int = 5) -> Path:
    folder.mkdir()
    (folder / "manifest.json").write_text(
        json.dumps({"config": {"pos_emb": pos_emb, "seq_length": 16}})
    )
    lines = []
    for step in range(1, steps + 1):
        lines.append({"step": step, "kernel": {"r1": [step * 0.5, 1.0], "r2": [1.0, 0.1 * step]}})
        lines.append(
            {"step": step, "loss": 5.0 / step, "lr": 0.1, "grad_norm": 1.0, "tokens_per_second": 9}
        )
    lines.append({"step": steps, "valid_loss": 1.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_one_run_and_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = write_metrics(tmp_path / "one"), write_metrics(tmp_path / "other", "alibi")
    assert run("plot_run", [str(one)]) == 0
    assert capsys.readouterr().out == f"{one / 'plot.png'}\n"
    assert (one / "plot.png").read_bytes()[:4] == b"\x89PNG"
    both = tmp_path / "new" / "both.svg"
    assert run("plot_run", [str(one), str(other), "--out", str(both)]) == 0
    assert both.read_text("utf-8").startswith("<?xml")


def test_a_class_of_ones_own_leaves_the_panels_their_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its bias is drawn with --allow-kernel; otherwise one line says so, beside the figure."""
    name = "own_kernels_of_plot_run:SquareRootOfLogarithmKernel"
    folder = write_metrics(tmp_path / f"tiny.stdlib.{name}.1235", name)
    widths: list[float] = []
    steps: list[float] = []
    saved = Figure.savefig

    def measured(figure: Figure, *arguments: Any, **options: Any) -> None:
        saved(figure, *arguments, **options)
        widths.extend(axes.get_position().width for axes in figure.axes)
        steps.extend(x for a in figure.axes if a.get_xlabel() == "step" for x in a.get_xticks())

    monkeypatch.setattr(Figure, "savefig", measured)
    assert run("plot_run", [str(folder)]) == 0
    assert f"pos_emb: '{name}' names a class to import" in capsys.readouterr().err
    assert min(widths) > 0.15
    assert len(steps) > 12 and all(step == int(step) for step in steps), "no half steps"
    kernel = "from megatron.model.positional_embeddings import KerpleLog as Base\n\n"
    kernel += "class SquareRootOfLogarithmKernel(Base):\n    pass\n"
    (tmp_path / "own_kernels_of_plot_run.py").write_text(kernel)
    monkeypatch.syspath_prepend(tmp_path)
    assert run("plot_run", [str(folder), "--allow-kernel", name]) == 0
    assert capsys.readouterr().err == ""


def test_the_bias_of_a_run_out_of_an_archive_and_no_empty_panel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has config.yml instead of the manifest; without either there is no bias, nor its title."""
    folder = write_metrics(tmp_path / "run")
    (folder / "manifest.json").unlink()
    titles: list[str] = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *_, **__: titles.append(figure.axes[6].get_title("right"))
    )
    assert run("plot_run", [str(folder)]) == 0
    (folder / "config.yml").write_text("pos_emb: kerple_log\nseq_length: 16\n")
    assert run("plot_run", [str(folder)]) == 0
    assert titles == ["", "bias at step 1 (dotted) and 5"]


def test_the_kernels_of_a_pattern_have_a_row_each(tmp_path: Path) -> None:
    folder = tmp_path / "pattern"
    folder.mkdir()
    pattern = [{"count": 2, "pos_emb": "kerple_log"}, {"pos_emb": "kerple_power"}]
    config = {**TINY, "num_layers": 3, "layer_pattern": pattern}
    (folder / "manifest.json").write_text(json.dumps({"config": config}))
    lines = [
        {"step": step, "loss": 1.0, "kernel_shared0": {"r1": [step, 1.0], "r2": [1.0, 0.5]},
         "kernel_shared1": {"r1": [1.0, 2.0], "r2": [0.5, 1.0]}}
        for step in (1, 2)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = read_run(folder).shared.values()
    assert (first.name, first.config["pos_emb"]) == ("pattern, layers 1-2 (from 1)", "kerple_log")
    assert (second.name, second.config["pos_emb"]) == ("pattern, layer 3 (from 1)", "kerple_power")
    assert [step for step, _ in second.kernels] == [1, 2]
    assert run("plot_run", [str(folder)]) == 0
    shown = as_data([Watched(folder)])[0]["kernels"]
    layers = ("layers 1-2 (from 1)", "layer 3 (from 1)")
    assert list(shown) == [f"pattern, {x}: {name}" for x in layers for name in ("r1", "r2")]


def test_a_kernel_for_each_layer_has_a_row_each(tmp_path: Path) -> None:
    """As after `kerple extend`: `kerple_share: per_layer`, of layers with and without kernels."""
    folder = tmp_path / "layers"
    folder.mkdir()
    pattern = [{"pos_emb": "rotary"}, {"pos_emb": "kerple_log"}]
    config = {**TINY, "num_layers": 4, "layer_pattern": pattern, "kerple_share": "per_layer"}
    (folder / "manifest.json").write_text(json.dumps({"config": config}))
    kernel = {"r1": [1.0, 1.0], "r2": [1.0, 0.5]}
    lines = [
        {"step": step, "loss": 1.0, "kernel_layer1": kernel, "kernel_layer3": kernel}
        for step in (1, 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_run(folder).shared
    assert [one.name for one in found.values()] == [
        "layers, layer 2 (from 1)",
        "layers, layer 4 (from 1)",
    ]
    assert {one.config["pos_emb"] for one in found.values()} == {"kerple_log"}
    assert run("plot_run", [str(folder)]) == 0
    assert list(as_data([Watched(folder)])[0]["kernels"]) == [
        f"layers, layer {layer} (from 1): {name}" for layer in (2, 4) for name in ("r1", "r2")
    ]


def test_a_run_in_the_middle_of_a_line_is_read(tmp_path: Path) -> None:
    folder = write_metrics(tmp_path / "going_on")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    with pytest.warns(UserWarning, match=r"left out 1 line\(s\)"):
        assert [step for step, _ in read_run(folder).values["loss"]] == [1, 2, 3, 4, 5]


def test_what_is_left_out_is_counted_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_metrics(tmp_path / "spoiled")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('not json\n{"loss": 1}\n{"step": 6, "kernel": {"r1": [1.0], "r2": [2.0]}}\n')
    assert run("plot_run", [str(folder)]) == 0
    shown = capsys.readouterr()
    path = folder / "metrics.jsonl"
    assert shown.err == f"warning: {path}: left out 3 line(s) that are no record of this run\n"
    assert shown.out == f"{folder / 'plot.png'}\n"


def test_what_is_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = write_metrics(tmp_path / "broken")
    (broken / "metrics.jsonl").write_text("not json\n" * 3)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").write_text("")
    fine = write_metrics(tmp_path / "fine")
    for arguments in (
        [str(tmp_path / "nowhere")],
        [str(broken)],
        [str(empty)],
        [str(fine), "--out", str(tmp_path / "x.gif")],
        [str(fine), "--out", str(fine / "metrics.jsonl" / "x.png")],
    ):
        assert run("plot_run", arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")


def test_the_bias_of_a_class_of_ones_own_needs_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "kernel_of_plot_run:Falling"
    (tmp_path / "kernel_of_plot_run.py").write_text(
        "from megatron.model.positional_embeddings import DistanceKernel, Positive, Uniform\n"
        "class Falling(DistanceKernel):\n"
        "    learnable = {n: Positive(Uniform(0, 1)) for n in ('r1', 'r2')}\n"
        "    def bias(self, d, r1, r2):\n"
        "        return -r1 * (d + r2)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = write_metrics(tmp_path / "own", name)
    assert run("plot_run", [str(folder)]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "own: the bias is not drawn" in line and f"--allow-kernel {name}" in line
    assert run("plot_run", [str(folder), "--allow-kernel", name]) == 0
    assert capsys.readouterr().err == ""
