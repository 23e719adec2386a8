"""Part 5, tiles: a short list per kernel against the fixed table, and what to change in it.

The table never changes by itself (see megatron/engines/triton_tiles.py): a proposal is a line for
whoever edits it. A tile is proposed if it gives the same numbers and is faster by more than noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kerple import attention
from megatron.engines import triton_attention, triton_launch
from megatron.engines.call import checked_call
from megatron.engines.triton_tiles import ROW_MULTIPLE, Tiles
from tools.benchmarks.timing import interleave

from .findings import Finding, Settings, first_line

PART = "tiles"
NOW = "now"
GAIN = 0.97
"""A proposal takes at most this share of the table's time, by the median over rounds."""
HEADS, LENGTH, TOKENS = 12, 4096, 16_384


@dataclass(frozen=True)
class Place:
    """An entry of the table: a kernel, with a weight table or not, at a head dimension."""

    kernel: str
    weighted: bool
    dim: int


# For half precision: what the ledger puts closest to the table's own.
SHORT_LIST: dict[Place, tuple[Tiles, ...]] = {
    Place("forward", False, 64): (Tiles(128, 64, 8, 2), Tiles(128, 32, 4, 3), Tiles(64, 64, 4, 2)),
    Place("forward", False, 128): (Tiles(128, 64, 8, 2), Tiles(128, 32, 4, 3), Tiles(64, 32, 4, 2)),
    Place("forward", True, 64): (Tiles(128, 64, 8, 2), Tiles(64, 32, 4, 2)),
    Place("dkdv", False, 64): (Tiles(64, 128, 8, 2), Tiles(32, 64, 4, 2), Tiles(32, 128, 4, 3)),
    Place("dkdv", False, 128): (Tiles(32, 128, 8, 2), Tiles(32, 64, 4, 2)),
    Place("dkdv", True, 64): (Tiles(32, 128, 8, 2), Tiles(16, 64, 4, 2)),
    Place("dq", False, 64): (Tiles(128, 64, 8, 2), Tiles(64, 32, 4, 2), Tiles(128, 32, 4, 3)),
    Place("dq", False, 128): (Tiles(128, 16, 4, 2), Tiles(128, 32, 8, 2)),
    Place("dq", True, 64): (Tiles(128, 32, 8, 2), Tiles(64, 32, 4, 2)),
    Place("band", False, 64): (Tiles(128, 64, 8, 2), Tiles(128, 32, 4, 2)),
    Place("band", False, 128): (Tiles(128, 64, 4, 2), Tiles(128, 32, 8, 2)),
    Place("band", True, 64): (Tiles(128, 32, 8, 2), Tiles(64, 32, 4, 2)),
}
# For the interpreter, which is slow and has no bf16: every kernel once, in fp32.
QUICK_LIST: dict[Place, tuple[Tiles, ...]] = {
    Place("forward", False, 32): (Tiles(32, 32, 4, 1),),
    Place("dkdv", False, 32): (Tiles(32, 32, 4, 1),),
    Place("dq", False, 32): (Tiles(32, 32, 4, 1),),
    Place("band", True, 32): (Tiles(32, 32, 4, 1),),
}
Run = Callable[[], list[Tensor]]


def check(settings: Settings) -> list[Finding]:
    """One finding for each entry of the table that has rivals."""
    probe = torch.zeros(1, 1, 32, 32, device=settings.device)
    reason = triton_attention.can_run(checked_call(probe, probe, probe))
    if reason is not None:
        return [Finding(PART, "short list", "not run", reason)]
    places = QUICK_LIST if settings.quick else SHORT_LIST
    return [_compare(settings, place, rivals) for place, rivals in places.items()]


def _compare(settings: Settings, place: Place, rivals: tuple[Tiles, ...]) -> Finding:
    run = _work(settings, place)
    runs: dict[str, Run] = {NOW: run}
    tiles = {named(rival): rival for rival in rivals}
    unfit: dict[str, str] = {}
    expected = run()
    for name, rival in tiles.items():
        attempt = _with_tiles(run, place.kernel, rival)
        problem = _problem(attempt, expected)
        if problem is None:
            runs[name] = attempt
        else:
            unfit[name] = problem
    timings = interleave(runs, 1 if settings.quick else 10)
    ratios = {name: timings.ratio(name, NOW) for name in runs if name != NOW}
    hopper = settings.on_gpu and torch.cuda.get_device_capability(settings.device)[0] >= 9
    return judge(place, ratios, tiles, unfit, half=not settings.quick, hopper=hopper)


def judge(
    place: Place,
    ratios: Mapping[str, float],
    tiles: Mapping[str, Tiles],
    unfit: Mapping[str, str],
    *,
    half: bool,
    hopper: bool = False,
) -> Finding:
    """What was measured, and the line to change if a rival is faster by more than noise."""
    best = min(ratios, key=lambda name: ratios[name], default=None)
    proposal = None
    if best is not None and ratios[best] <= GAIN:
        kernel, weighted, dim = place.kernel, place.weighted, place.dim
        ampere = f'_TILES["{kernel}"][{half}, {weighted}][{dim}]'
        entry = f'_HOPPER["{kernel}", {half}, {weighted}, {dim}]' if hopper else ampere
        proposal = f"{entry} = {tiles[best]}"
    values: dict[str, Any] = {"ratios": dict(ratios), "unfit": dict(unfit), "proposal": proposal}
    weight = " with a weight table" if place.weighted else ""
    text = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()) or "no rival fits"
    advice = f"; proposal: {proposal}" if proposal else "; the table stays"
    name = f"{place.kernel}, head dim {place.dim}{weight}"
    return Finding(PART, name, "measured", f"times the table's: {text}{advice}", values)


def named(tiles: Tiles) -> str:
    return f"{tiles.queries}x{tiles.keys} w{tiles.warps} s{tiles.stages}"


def _work(settings: Settings, place: Place) -> Run:
    """A forward pass for the forward kernel, forward and backward for the others."""
    dtype = torch.float32 if settings.quick else torch.bfloat16
    batch, heads, length = (1, 1, 40) if settings.quick else (TOKENS // LENGTH, HEADS, LENGTH)
    backward = place.kernel != "forward"
    generator = torch.Generator(settings.device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=settings.device, generator=generator)

    q, k, v = (
        draw(batch, heads, length, place.dim).to(dtype).requires_grad_(backward) for _ in range(3)
    )
    bias = (-draw(heads, length).abs()).requires_grad_(backward)
    weight = draw(heads, length).requires_grad_(backward) if place.weighted else None
    inputs = [x for x in (q, k, v, bias, weight) if x is not None]

    def run() -> list[Tensor]:
        out = attention(q, k, v, bias, weight, engine="triton", pruning=False)
        results = [out]
        if backward:
            results += torch.autograd.grad(out, inputs, out.detach())
        settings.synchronize()
        return results

    return run


def _with_tiles(run: Run, kernel: str, tiles: Tiles) -> Run:
    assert ROW_MULTIPLE % tiles.queries == 0, tiles
    real = triton_launch.tiles_of

    def chosen(name: str, *key: Any) -> Tiles:
        return tiles if name == kernel else real(name, *key)

    def attempt() -> list[Tensor]:
        with patch.object(triton_launch, "tiles_of", chosen):
            return run()

    return attempt


def _problem(attempt: Run, expected: list[Tensor]) -> str | None:
    """Why a tile cannot be used: too large for this GPU, or not the same numbers."""
    try:
        found = attempt()
    except Exception as error:
        return first_line(error)
    tolerance = 1e-4 if expected[0].dtype == torch.float32 else 2e-2
    for one, other in zip(found, expected, strict=True):
        worst = (one - other).abs().max() / other.abs().max().clamp(min=1e-9)
        if not float(worst) <= tolerance:
            return f"other numbers than the table's: {float(worst):.1e}"
    return None
