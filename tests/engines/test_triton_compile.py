"""The Triton kernels compiled for the A100 and the H100, with no GPU: no spills, no overflow."""

from __future__ import annotations

import os

import pytest

from megatron.engines import triton_launch
from megatron.engines.triton_compat import interpreted, unavailable
from tools import compile_triton
from tools.compile_triton import Configuration, Report

pytestmark = pytest.mark.skipif(
    unavailable() is not None or interpreted() or os.name != "posix",
    reason="needs Triton, not in its interpreter",
)

REPRESENTATIVE = [
    Configuration(64, "bf16", "bias", 80),
    Configuration(64, "bf16", "bias", 90),
    Configuration(128, "bf16", "bias", 80),
    Configuration(128, "fp16", "both", 90),
    Configuration(80, "bf16", "weight", 80),
    Configuration(256, "bf16", "bias", 80),
    Configuration(64, "fp32", "bias", 80),
    Configuration(192, "fp32", "both", 80),
    Configuration(256, "fp32", "both", 90),
    Configuration(64, "bf16", "none", 80),
]


def explain(report: Report) -> str:
    cells = zip(compile_triton.HEADER, report.row(), strict=True)
    return " ".join(f"{name}={cell}" for name, cell in cells)


def check(configuration: Configuration) -> None:
    reports = compile_triton.reports_of(configuration)
    assert {report.kernel for report in reports} >= {"forward", "delta", "backward"}
    for report in reports:
        assert report.spill_bytes == 0, explain(report)
        assert report.shared_bytes <= compile_triton.SHARED_LIMIT[configuration.arch], explain(
            report
        )
        assert report.atomics == 0, explain(report)


@pytest.mark.parametrize("configuration", REPRESENTATIVE, ids=str)
def test_no_spills_no_atomics_and_shared_memory_fits(configuration: Configuration) -> None:
    check(configuration)


@pytest.mark.slow
@pytest.mark.parametrize("arch", compile_triton.ARCHITECTURES)
@pytest.mark.parametrize("dtype", compile_triton.DTYPES)
@pytest.mark.parametrize("tables", compile_triton.TABLES)
def test_every_configuration_of_the_softmax(tables: str, dtype: str, arch: int) -> None:
    reports = compile_triton.reports_of(Configuration(64, dtype, tables, arch), "softmax")
    assert [explain(report) for report in reports if not report.fits] == []


@pytest.mark.slow
@pytest.mark.parametrize("configuration", compile_triton.all_configurations(), ids=str)
def test_every_configuration_the_launcher_can_choose(configuration: Configuration) -> None:
    check(configuration)


def test_the_check_sees_a_configuration_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = triton_launch.Tiles(rows=128, columns=128, warps=4, stages=4)
    monkeypatch.setattr(triton_launch, "forward_tiles", lambda *_: greedy)
    configuration = Configuration(128, "bf16", "bias", 80)
    report = compile_triton.compile_launch(
        compile_triton.attention_launches(configuration)[0], configuration
    )
    assert report.spill_bytes > 0 or report.shared_bytes > compile_triton.SHARED_LIMIT[80]
    assert not report.fits


@pytest.mark.parametrize("kernels", ["attention", "softmax"])
def test_the_command_prints_one_row_per_kernel(
    kernels: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--dims", "64", "--dtypes", "bf16", "--tables", "bias", "--arch", "80"]
    assert compile_triton.main([*arguments, "--kernels", kernels]) == 0
    printed = capsys.readouterr().out
    assert "registers" in printed
    assert printed.count("sm_80") == 3
    assert "3 kernels compiled, 0 do not fit" in printed
