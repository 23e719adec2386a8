"""tools/check_kernel.py: what is CPD, what is not, and how the shift grows."""

from __future__ import annotations

import re

import pytest
import torch

from megatron.commands import run
from megatron.model.kernel_theory import counterexample, kernel_matrix
from tests.conftest import REPOSITORY


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
    [([], "name a method"), (["--power", "-1"], "above 0"), (["rotary"], "rotary")],
)
def test_mistakes_are_one_line(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check_kernel", arguments) == 2
    error = capsys.readouterr().err
    assert reason in error and "Traceback" not in error
