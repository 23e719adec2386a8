"""Part 4, speed: TFLOP/s and ratios to SDPA, FlexAttention with a learned bias and dense scores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tools.benchmarks.contenders import Contender, Inputs, sdpa_causal, tiled
from tools.benchmarks.timing import interleave

from .findings import Finding, Settings, first_line

PART = "speed"
HEADS, DIM, TOKENS = 12, 64, 16_384


def check(settings: Settings) -> list[Finding]:
    """All contenders at each length take turns in one run; a ratio is of the fastest rounds."""
    lengths = (64, 128) if settings.quick else (512, 1024, 2048, 4096, 8192, 16_384, 32_768)
    return [
        finding
        for length in lengths
        for backward in (False, True)
        for finding in _at_length(settings, length, backward)
    ]


def _at_length(settings: Settings, length: int, backward: bool) -> list[Finding]:
    batch = 1 if settings.quick else max(1, TOKENS // length)
    what = f"{'forward+backward' if backward else 'forward'} at {length} (batch {batch})"
    runs: dict[str, Contender] = {}
    findings = []
    for name, build in _contenders(settings, batch, length, backward).items():
        try:
            run = partial(_to_its_end, settings, build())
            run()  # compiles, or says that it cannot
            runs[name] = run
        except Exception as error:
            findings.append(Finding(PART, f"{name}, {what}", "not run", first_line(error)))
    timings = interleave(runs, 2 if settings.quick else 10)
    seconds = {name: timings.best(name) for name in runs}
    # Two products forward and five backward over half of the square; recomputation not counted.
    flop = 2 * 2 * batch * HEADS * length**2 * DIM / 2 * (3.5 if backward else 1.0)
    values: dict[str, Any] = {
        name: {
            "seconds": value,
            "tflops": flop / value / 1e12,
            "over_sdpa": value / seconds["sdpa"],
        }
        for name, value in seconds.items()
        if "sdpa" in seconds
    }
    text = ", ".join(f"{n} {v['tflops']:.1f} TF ({v['over_sdpa']:.2f})" for n, v in values.items())
    return [Finding(PART, what, "measured", text, values), *findings]


def _contenders(
    settings: Settings, batch: int, length: int, backward: bool
) -> dict[str, Callable[[], Contender]]:
    """Those of `tools/benchmark.py attention`, yet to be built."""
    dtype = torch.bfloat16 if settings.on_gpu else torch.float32
    device = settings.device
    inputs = Inputs(batch, HEADS, length, DIM, train=backward, dtype=dtype, device=device)
    builders: dict[str, Callable[[], Contender]] = {
        "sdpa": partial(sdpa_causal, inputs),
        "ours": partial(tiled, inputs, "kerple_log", engine="auto"),
    }
    if length <= 4096:
        builders["dense"] = partial(tiled, inputs, "kerple_log", engine="naive")
    if not settings.quick:
        builders["flex"] = partial(tiled, inputs, "kerple_log", engine="flex")
    return builders


def _to_its_end(settings: Settings, run: Contender) -> torch.Tensor:
    """A GPU is waited for."""
    out = run()
    settings.synchronize()
    return out
