"""Inner loops of kernels compiled for the A100 and the H100, with no GPU, against the targets."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from megatron.engines import triton_launch
from megatron.engines.triton_runtime import interpreted, unavailable
from megatron.engines.triton_tiles import Tiles
from tools import compile_triton, sass, triton_ledger
from tools.compile_triton import Configuration

pytestmark = pytest.mark.skipif(
    unavailable() is not None or interpreted() or os.name != "posix",
    reason="needs Triton, not in its interpreter",
)

A100 = [Configuration(64, "bf16", "bias", 80), Configuration(128, "bf16", "bias", 80)]
H100 = [replace(configuration, arch=90) for configuration in A100]


@pytest.mark.parametrize("configuration", A100, ids=str)
def test_targets_on_the_a100(configuration: Configuration) -> None:
    entries = triton_ledger.entries_of(configuration)
    assert entries.keys() == {"forward", "dkdv", "dq", "band", "steep band"}
    assert triton_ledger.misses_of(configuration, entries) == []
    for entry in entries.values():
        assert entry.loop.tensor_core == entry.ideal, entry.row()
        assert entry.loop.exponentials > 0, entry.row()
        assert entry.blocks >= 1, entry.row()


@pytest.mark.slow
@pytest.mark.parametrize("configuration", H100, ids=str)
def test_targets_on_the_h100(configuration: Configuration) -> None:
    entries = triton_ledger.entries_of(configuration)
    assert triton_ledger.misses_of(configuration, entries) == []
    for entry in entries.values():
        assert entry.loop.tensor_core == entry.ideal, entry.row()
        assert entry.loop.tensor_bytes > 0, entry.row()
    assert entries["steep band"].report.shared_bytes < 220 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
def test_targets_within_the_features_reach_on_the_a100(dim: int) -> None:
    configuration = Configuration(dim, "bf16", "none", 80, "features")
    entries = triton_ledger.entries_of(configuration)
    assert triton_ledger.misses_of(configuration, entries) == []
    for entry in entries.values():
        assert entry.loop.tensor_core == entry.ideal or entry.kernel == "dkdv", entry.row()


def test_the_ledger_sees_a_tile_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows than the head dimension: the warps lie along the keys."""
    monkeypatch.setattr(triton_launch, "tiles_of", lambda *_: Tiles(32, 64, 4, 2))
    configuration = Configuration(128, "bf16", "bias", 80)
    launch = compile_triton.attention_launches(configuration)[1]
    report = compile_triton.compile_launch(launch, configuration)
    loops = sass.inner_loops(sass.disassemble(report.cubin))
    loop = max(loops, key=lambda found: found.instructions)
    entry = triton_ledger.Entry(report, loop)
    assert entry.bound < 0.5
    assert any("barriers" in miss for miss in entry.misses()), entry.misses()


def test_a_missed_target_is_told_with_its_number() -> None:
    configuration = A100[0]
    entries = triton_ledger.entries_of(configuration)
    slow = entries["forward"].loop
    counts = slow.counts + slow.counts
    entries["forward"] = replace(entries["forward"], loop=replace(slow, counts=counts))
    told = triton_ledger.misses_of(configuration, entries)
    assert any("forward: bound" in line and "target 75%" in line for line in told), told


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
