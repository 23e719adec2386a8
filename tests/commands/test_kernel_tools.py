"""tools/plot_kernels.py: a run's kernels, methods, and a class of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.commands import run
from tests.conftest import REPOSITORY
from tests.evaluation.helpers import tiny_config, write_checkpoint


def drawn(path: Path) -> bool:
    return path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 10_000


def test_the_kernels_of_a_run_go_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "run", tiny_config())
    assert run("plot_kernels", [str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run' / 'kernels.png'}\n"
    assert drawn(tmp_path / "run" / "kernels.png")


def test_every_layer_of_a_run_with_kernels_of_its_own(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run", tiny_config(kerple_share="per_layer"))
    assert run("plot_kernels", [str(tmp_path / "run"), "--out", str(tmp_path / "pictures")]) == 0
    names = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert names == ["kernels_layer1.png", "kernels_layer2.png"]


def test_methods_and_a_class_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY))
    own = "examples.custom_kernel:RationalKernel"
    names = ["kerple_bias_wht", own]
    assert run("plot_kernels", [*names, "--heads", "3", "--out", str(tmp_path)]) == 0
    assert drawn(tmp_path / "kerple_bias_wht.png")
    assert drawn(tmp_path / "examples.custom_kernel.RationalKernel.png")


def test_nothing_to_draw_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "run", tiny_config(pos_emb="rotary"))
    for name in (str(tmp_path / "run"), str(tmp_path / "nowhere"), "rotary", "kerple_lgo"):
        assert run("plot_kernels", [name]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert [line[:7] for line in lines if not line.startswith("warning: ")] == ["error: "]


def test_the_papers_figure_1_is_one_command(tmp_path: Path) -> None:
    assert run("plot_kernels", ["--framework", "--out", str(tmp_path)]) == 0
    assert drawn(tmp_path / "framework.png")
