"""The Triton kernels compiled for the A100 and the H100, with no GPU: what they cost, and targets.

Compiled when the test runs; the counts are of machine code.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from megatron.engines import triton_launch
from megatron.engines.triton_runtime import interpreted, unavailable
from megatron.engines.triton_tiles import Tiles
from tools import compile_triton, sass, triton_ledger
from tools.compile_triton import Configuration, Report

pytestmark = pytest.mark.skipif(
    unavailable() is not None or interpreted() or os.name != "posix",
    reason="needs Triton, not in its interpreter",
)

A100 = [Configuration(64, "bf16", "bias", 80), Configuration(128, "bf16", "bias", 80)]
REPRESENTATIVE = [
    Configuration(64, "bf16", "bias", 90),
    Configuration(80, "fp16", "both", 80),
    Configuration(64, "bf16", "bias", 80, "all"),
    Configuration(256, "fp32", "both", 80),
]


def explain(report: Report) -> str:
    cells = zip(compile_triton.HEADER, report.row(), strict=True)
    return " ".join(f"{name}={cell}" for name, cell in cells)


def check(configuration: Configuration) -> None:
    reports = compile_triton.reports_of(configuration)
    assert {report.kernel for report in reports} >= {"forward", "delta", "dkdv", "dq"}
    assert [explain(report) for report in reports if not report.fits] == []


@pytest.mark.parametrize("configuration", A100, ids=str)
def test_targets_on_the_a100(configuration: Configuration) -> None:
    entries = triton_ledger.entries_of(configuration)
    assert entries.keys() == {"forward", "dkdv", "dq", "band", "steep band"}
    assert triton_ledger.misses_of(configuration, entries) == []
    for entry in entries.values():
        assert entry.loop.tensor_core == entry.ideal, entry.row()
        assert entry.loop.exponentials > 0, entry.row()
        assert entry.blocks >= 1, entry.row()


@pytest.mark.parametrize("configuration", REPRESENTATIVE, ids=str)
def test_stack_and_shared_memory_fit_and_nothing_is_atomic(configuration: Configuration) -> None:
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


def test_the_check_sees_a_kernel_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = Tiles(queries=128, keys=128, warps=4, stages=4)
    monkeypatch.setattr(triton_launch, "tiles_of", lambda *_: greedy)
    configuration = Configuration(128, "bf16", "bias", 80)
    launch = compile_triton.attention_launches(configuration)[1]
    report = compile_triton.compile_launch(launch, configuration)
    assert report.kernel == "forward"
    assert report.shared_bytes > compile_triton.SHARED_LIMIT[80]
    assert not report.fits


def test_the_ledger_sees_a_tile_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows than the head dimension: the warps lie along the keys."""
    monkeypatch.setattr(triton_launch, "tiles_of", lambda *_: Tiles(32, 64, 4, 2))
    configuration = Configuration(128, "bf16", "bias", 80)
    launch = compile_triton.attention_launches(configuration)[1]
    report = compile_triton.compile_launch(launch, configuration)
    loop = sass.inner_loop(sass.disassemble(report.cubin))
    assert loop is not None
    entry = triton_ledger.Entry(report, loop)
    assert entry.bound < 0.5
    assert any("barriers" in miss for miss in entry.misses()), entry.misses()


SASS = """
        /*0000*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDGSTS.E.BYPASS.128 [R1], [R2.64] ;
        /*0020*/                   LDSM.16.M88.4 R4, [R1] ;
        /*0030*/                   LDSM.16.MT88.2 R4, [R1] ;
        /*0040*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0050*/                   LDS.64 R2, [R1] ;
        /*0060*/                   LDS R2, [R1] ;
        /*0070*/                   MUFU.EX2 R2, R2 ;
        /*0080*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0090*/                   LDG.E R3, [R2.64] ;
        /*00a0*/               @P0 BRA `(.L_x_1) ;
        /*00b0*/                   EXIT ;
"""


def test_counts_of_a_loop_that_can_be_counted_by_hand() -> None:
    loop = sass.inner_loop(SASS)
    assert loop is not None
    assert (loop.instructions, loop.tensor_core, loop.barriers, loop.global_accesses) == (
        10,
        1,
        1,
        1,
    )
    assert loop.shared_bytes == 16 + 16 + 8 + 8 + 4
    clocks = loop.clocks(warps=8)
    assert clocks["tensor"] == 16
    assert clocks["shared"] == (52 / 4 + 1) * 8
    assert clocks["exp"] == 16
    assert clocks["issue"] == 20
    assert sass.inner_loop("/*0000*/ EXIT ;") is None


def test_a_missed_target_is_told_with_its_number() -> None:
    configuration = A100[0]
    entries = triton_ledger.entries_of(configuration)
    slow = entries["forward"].loop
    counts = slow.counts + slow.counts
    entries["forward"] = replace(entries["forward"], loop=replace(slow, counts=counts))
    told = triton_ledger.misses_of(configuration, entries)
    assert any("forward: bound" in line and "target 75%" in line for line in told), told


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


def test_the_ledger_command_prints_counts_formula_and_bounds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--ledger", "--dims", "64", "--tables", "bias", "--arch", "80"]
    assert compile_triton.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "bound = FLOP of the tile's products" in printed
    assert printed.count("sm_80") == 6
    assert "whole backward" in printed
    assert "MISSED" not in printed
