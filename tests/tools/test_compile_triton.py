"""The Triton kernels compiled for the A100 and the H100, with no GPU: what they cost.

Compiled when the test runs.
"""

from __future__ import annotations

import os

import pytest

from megatron.engines import triton_launch
from megatron.engines.triton_runtime import interpreted, unavailable
from megatron.engines.triton_tiles import SHARED_MEMORY, Tiles
from tools import compile_triton, triton_memory
from tools.compile_triton import Configuration, Report

pytestmark = pytest.mark.skipif(
    unavailable() is not None or interpreted() or os.name != "posix",
    reason="needs Triton, not in its interpreter",
)

REPRESENTATIVE = [
    Configuration(64, "bf16", "bias", 90),
    Configuration(80, "fp16", "both", 80),
    Configuration(64, "bf16", "bias", 80, "every"),
    Configuration(256, "fp32", "both", 80),
]


def explain(report: Report) -> str:
    cells = zip(compile_triton.HEADER, report.row(), strict=True)
    return " ".join(f"{name}={cell}" for name, cell in cells)


def check(configuration: Configuration) -> None:
    reports = compile_triton.reports_of(configuration)
    assert {report.kernel for report in reports} >= {"forward", "delta", "dkdv", "dq"}
    assert [explain(report) for report in reports if not report.fits] == []


@pytest.mark.parametrize("configuration", REPRESENTATIVE, ids=str)
def test_stack_and_shared_memory_fit_and_nothing_is_atomic(configuration: Configuration) -> None:
    check(configuration)


def test_the_page_of_shared_memory_is_what_the_compiler_says() -> None:
    import triton

    page = triton_memory.PAGE.read_text()
    if f"with Triton {triton.__version__};" not in page:
        pytest.skip("the page was compiled with another Triton")
    compiled = {r.kernel: r.shared_bytes for r in compile_triton.reports_of(REPRESENTATIVE[2])}
    for row, cells in triton_memory.parse(page).items():
        if row[1:] == ("64", "bf16", "no", "yes"):
            assert cells[0][1] == compiled[row[0]], row


@pytest.mark.slow
@pytest.mark.parametrize("arch", compile_triton.KINDS)
@pytest.mark.parametrize("dtype", compile_triton.DTYPES)
@pytest.mark.parametrize("tables", compile_triton.TABLES)
def test_every_configuration_of_the_softmax(tables: str, dtype: str, arch: int) -> None:
    reports = compile_triton.reports_of(Configuration(64, dtype, tables, arch), "softmax")
    assert [explain(report) for report in reports if not report.fits] == []


@pytest.mark.slow
@pytest.mark.parametrize("configuration", compile_triton.all_configurations(), ids=str)
def test_every_configuration_the_launcher_can_choose(configuration: Configuration) -> None:
    check(configuration)


def test_the_check_sees_a_kernel_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = Tiles(queries=128, keys=128, warps=4, stages=4)
    monkeypatch.setattr(triton_launch, "tiles_of", lambda *_: greedy)
    configuration = Configuration(128, "bf16", "bias", 80)
    launch = compile_triton.attention_launches(configuration)[1]
    report = compile_triton.compile_launch(launch, configuration)
    assert report.kernel == "forward"
    assert report.shared_bytes > SHARED_MEMORY[80]
    assert not report.fits


@pytest.mark.parametrize("kernels", ["attention", "softmax"])
def test_the_command_prints_one_row_per_kernel(
    kernels: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--dims", "64", "--dtypes", "bf16", "--tables", "bias", "--arch", "80"]
    assert compile_triton.main([*arguments, "--kernels", kernels]) == 0
    printed = capsys.readouterr().out
    count = 8 if kernels == "attention" else 3  # two of the eight make copies of the table
    assert "registers" in printed
    assert printed.count("sm_80") == count
    assert f"{count} kernels compiled, 0 do not fit" in printed


def test_the_ledger_is_of_half_precision(capsys: pytest.CaptureFixture[str]) -> None:
    assert compile_triton.main(["--ledger", "--dtypes", "fp32"]) == 2
    assert "use --dtypes bf16 or fp16" in capsys.readouterr().err
