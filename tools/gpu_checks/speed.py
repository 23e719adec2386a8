"""Part 4, speed: TFLOP/s and ratios to SDPA, FlexAttention with a learned bias and dense scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron import attention
from tools.benchmarks.timing import interleave

from .findings import Finding, Settings

PART = "speed"
HEADS, DIM, TOKENS = 12, 64, 16_384
Run = Callable[[], Tensor]


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
    work = _Work(settings, batch, length, backward)
    what = f"{'forward+backward' if backward else 'forward'} at {length} (batch {batch})"
    runs: dict[str, Run] = {}
    findings = []
    for name, run in work.contenders().items():
        try:
            run()  # compiles, or says that it cannot
            runs[name] = run
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            findings.append(Finding(PART, f"{name}, {what}", "not run", first[:200]))
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


class _Work:
    """One size: the tensors, and each contender as a function without arguments."""

    def __init__(self, settings: Settings, batch: int, length: int, backward: bool) -> None:
        dtype = torch.bfloat16 if settings.on_gpu else torch.float32
        shape = (batch, HEADS, length, DIM)
        self.q, self.k, self.v = (
            torch.randn(shape, device=settings.device, dtype=dtype, requires_grad=backward)
            for _ in range(3)
        )
        table = -torch.log1p(torch.arange(length, device=settings.device)) * torch.rand(
            HEADS, 1, device=settings.device
        )
        self.bias = table.requires_grad_(backward)
        self.settings, self.length, self.backward = settings, length, backward

    def contenders(self) -> dict[str, Run]:
        runs: dict[str, Run] = {
            "sdpa": lambda: F.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=True),
            "ours": lambda: attention(self.q, self.k, self.v, self.bias),
        }
        if self.length <= 4096:
            runs["dense"] = lambda: attention(self.q, self.k, self.v, self.bias, engine="naive")
        if not self.settings.quick:
            runs["flex"] = self._flex()
        return {name: self._whole(run) for name, run in runs.items()}

    def _flex(self) -> Run:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + self.bias[h, torch.clamp(i - j, min=0)]

        device = str(self.q.device)
        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, self.length, self.length, device=device
        )
        compiled: Any = torch.compile(flex_attention, dynamic=False)
        return lambda: compiled(self.q, self.k, self.v, score_mod=add, block_mask=mask)

    def _whole(self, forward: Run) -> Run:
        """To its end: a GPU is waited for."""

        def run() -> Tensor:
            out = forward()
            if self.backward:
                out.backward(out.detach())
                for tensor in (self.q, self.k, self.v, self.bias):
                    tensor.grad = None
            self.settings.synchronize()
            return out

        return run
