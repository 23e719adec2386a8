"""check_kernel and plot_kernels: what is CPD and what is not, and pictures of any kernel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron.commands import run
from megatron.model.kernel_theory import counterexample, kernel_matrix
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


def test_features_of_distance_are_drawn_layer_by_layer(tmp_path: Path) -> None:
    config = tiny_config(pos_emb="kerple_inkling", inkling_features=3, inkling_distances=8)
    write_checkpoint(tmp_path / "run", config)
    assert run("plot_kernels", [str(tmp_path / "run"), "--out", str(tmp_path / "pictures")]) == 0
    names = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert names == ["features_layer1.png", "features_layer2.png", "kernels.png"]


def test_methods_and_a_class_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY))
    own = "examples.custom_kernel:RationalKernel"
    names = ["kerple_bias_wht", own]
    assert run("plot_kernels", [*names, "--heads", "3", "--out", str(tmp_path)]) == 0
    assert drawn(tmp_path / "kerple_bias_wht.png")
    assert drawn(tmp_path / "examples.custom_kernel.RationalKernel.png")


def test_rotations_and_terms_of_layers_are_drawn_from_the_layer_that_has_them(
    tmp_path: Path,
) -> None:
    pattern = [
        {"pos_emb": "rotary"},
        {"pos_emb": "cable"},
        {"pos_emb": "none"},
        {"pos_emb": "rotary"},
        {"pos_emb": "rotary", "rotary_pct": 0.5},
    ]
    config = tiny_config(layer_pattern=pattern, num_layers=5)
    write_checkpoint(tmp_path / "run", config)
    assert run("plot_kernels", [str(tmp_path / "run"), "--out", str(tmp_path / "pictures")]) == 0
    names = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert names == ["bias_layer2.png", "score_layer1.png", "score_layer5.png"]
    assert run("plot_kernels", ["xpos", "cable", "--heads", "1", "--out", str(tmp_path)]) == 0
    assert drawn(tmp_path / "xpos.png") and drawn(tmp_path / "cable.png")


def test_nothing_to_draw_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "run", tiny_config(pos_emb="learned"))
    for name in (str(tmp_path / "run"), str(tmp_path / "nowhere"), "learned", "kerple_lgo"):
        assert run("plot_kernels", [name]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert [line[:7] for line in lines if not line.startswith("warning: ")] == ["error: "]


def test_the_papers_figure_1_is_one_command(tmp_path: Path) -> None:
    assert run("plot_kernels", ["--framework", "--out", str(tmp_path)]) == 0
    assert drawn(tmp_path / "framework.png")


def shifts(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"yes +\S+ +([\d.]+)$", text, re.MULTILINE)]


def test_log_is_cpd_and_needs_a_larger_shift_with_more_points(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("check_kernel", ["kerple_log", "--heads", "3", "--points", "32"]) == 0
    found = shifts(capsys.readouterr().out)
    assert len(found) == 4 and found == sorted(found) and found[-1] > 1.5 * found[0]


def test_powers_up_to_two_are_cpd_and_beyond_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check_kernel", ["--power", "1", "--power", "1.9", "--points", "8"]) == 0
    capsys.readouterr()
    assert run("check_kernel", ["--power", "2", "--points", "8"]) == 0
    assert capsys.readouterr().out.count("none") == 2  # conditionally definite, no shift
    assert run("check_kernel", ["--power", "2.5", "--points", "8"]) == 1
    assert "these sum to 0, their form is negative" in capsys.readouterr().out


def test_a_counterexample_sums_to_zero_with_a_negative_form() -> None:
    table = -(torch.arange(6, dtype=torch.float64) ** 2.2)
    found = counterexample(table)
    assert found is not None
    assert abs(float(found.sum())) < 1e-12
    assert float(found @ kernel_matrix(table) @ found) < -1e-3
    assert counterexample(-(torch.arange(6, dtype=torch.float64))) is None


def test_weights_must_be_definite_and_classes_of_ones_own_are_taken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY))
    assert run("check_kernel", ["gauss_wht1", "--heads", "2", "--points", "8"]) == 0
    assert "PD  smallest eigenvalue" in capsys.readouterr().out
    own = "examples.custom_kernel:RationalKernel"
    assert run("check_kernel", [own, "--heads", "2", "--points", "8"]) in (0, 1)
    assert own in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "name a method"),
        (["--power", "-1"], "above 0"),
        (["--power", "nan"], "above 0"),
        (["--power", "1e9"], "not finite on 128 points"),
        (["rotary"], "rotary"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check_kernel", arguments) == 2
    error = capsys.readouterr().err
    assert reason in error and "Traceback" not in error


def test_a_kernel_whose_gradient_is_nan_at_distance_0_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sqrt_kernels.py").write_text(SQRT_KERNELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["--heads", "2", "--points", "8"]
    assert run("check_kernel", ["sqrt_kernels:NanAtZero", *words]) == 1
    assert "NO: the gradient of r2 is not finite at distance 0" in capsys.readouterr().out
    assert run("check_kernel", ["sqrt_kernels:Lifted", *words]) == 1
    assert "NO: bias: rounding to bf16 moves it by " in capsys.readouterr().out
    assert run("check_kernel", ["kerple_power", *words]) == 0
    assert "gradients finite, bf16 moves it by up to 0.0" in capsys.readouterr().out


SQRT_KERNELS = """
import torch
from megatron.model.positional_embeddings import DistanceKernel, Positive, Uniform

class NanAtZero(DistanceKernel):
    learnable = {"r1": Positive(Uniform(0, 2)), "r2": Positive(Uniform(0, 1))}

    def bias(self, d, r1, r2):
        return -r1 * torch.sqrt(torch.log1p(r2 * d))

class Lifted(NanAtZero):
    def bias(self, d, r1, r2):
        return 1000 - r1 * torch.log1p(r2 * d)
"""


def test_a_picture_needs_a_distance(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("plot_kernels", ["kerple_log", "--length", "1"])
    assert "--length: must be at least 2" in capsys.readouterr().err
