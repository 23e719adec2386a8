"""One call through the emulated engine against the plain formula in float64."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.engines import attention
from megatron.engines.triton_softmax import triton_fused_softmax
from tests.engines.reference import reference_attention
from tests.engines.triton_cases import (
    Case,
    Inputs,
    dropout_of,
    in_double,
    inputs_of,
    kept_weights,
    outputs_and_gradients,
)
from tests.ptx.findings import PtxError
from tests.ptx.host import Emulation, emulated

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# root mean square and largest error, over those of what is expected
TOLERANCE = {BF16: (8e-3, 1.6e-2), FP16: (1.2e-3, 2.5e-3), FP32: (1e-5, 3e-5)}
# Factors to the tolerance. In a sink's gradient, a sum over rows, terms of both signs cancel; so do
# they in a row scale's, a sum over keys.
# The backward takes sum(out * dout) from the rounded output, as FlashAttention does: where a steep
# table leaves one key almost all of the weight, that rounding is all of the bias's gradient.
_SINK_SLACK, _STEEP_SLACK, _SCALE_SLACK = 5.0, 3.0, 2.0
Errors = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class AttentionCase(Case):
    """A call of the engine, as the interpreter's tests have them, and what only matters here."""

    dtype: torch.dtype = BF16
    arch: int = 80
    layout: str = "rows"  # [B, L, H, D] as the model has it; heads: [B, H, L, D]; fused: q, k, v
    table: str = "random"  # the bias: random, steep, log, decay (worth pruning), inf
    pruning: bool = False
    frozen: tuple[str, ...] = ()  # operands without gradients
    compiled: bool = False  # through torch.compile
    seed: int = 0


@dataclass(frozen=True)
class SoftmaxCase:
    """A call of the dense engine's fused softmax."""

    q_length: int
    k_length: int
    batch: int = 1
    heads: int = 2
    dtype: torch.dtype = BF16
    bias: bool = True
    weight: bool = False
    window: int | None = None
    arch: int = 80
    seed: int = 0


AnyCase = AttentionCase | SoftmaxCase


def name_of(case: AnyCase) -> str:
    """GPU, dtype, sizes, and what differs from the defaults."""
    told = [f"sm_{case.arch}", str(case.dtype).removeprefix("torch.")]
    told.append(f"D {case.head_dim}" if isinstance(case, AttentionCase) else "softmax")
    told.append(f"{case.q_length}x{case.k_length}")
    for entry in fields(case):
        value = getattr(case, entry.name)
        if entry.default not in (MISSING, value) and entry.name not in ("arch", "dtype"):
            told.append(f"{entry.name}={value}")
    return " ".join(told)


@dataclass
class Outcome:
    """What one case gave."""

    case: AnyCase
    errors: Errors = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)  # outputs and gradients beyond the tolerance
    findings: list[str] = field(default_factory=list)
    launches: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return not self.wrong and not self.findings

    def line(self) -> str:
        errors = ", ".join(f"{name} {a:.1e}/{b:.1e}" for name, (a, b) in self.errors.items())
        launches = " ".join(f"{name.replace(' ', '_')}x{n}" for name, n in self.launches.items())
        verdict = "ok" if self.good else " ".join(["WRONG", *self.wrong])
        parts = (verdict, name_of(self.case), errors, launches, f"{self.seconds:.0f}s")
        return "\n    ".join([" | ".join(parts), *self.findings])


def run_case(case: AnyCase, **options: Any) -> Outcome:
    """Run one case; `options` are those of `Emulation`."""
    began = time.monotonic()
    order = np.random.default_rng(case.seed).permutation
    emulation = Emulation(case.arch, order=order, **options)
    outcome = Outcome(case)
    compare = _attention if isinstance(case, AttentionCase) else _softmax
    try:
        found, expected = compare(case, emulation)
        outcome.errors = {name: _error(found[name], x) for name, x in expected.items()}
    except PtxError as error:
        outcome.wrong.append(str(error))
    outcome.wrong += _beyond_tolerance(case, outcome.errors)
    outcome.findings = emulation.report.lines()
    outcome.launches = dict(emulation.launches)
    outcome.seconds = time.monotonic() - began
    return outcome


def _error(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """The root mean square and the largest error, relative."""
    assert found.shape == expected.shape
    difference, largest = found.double() - expected, expected.abs().max().item()
    top = difference.abs().max().item()
    if largest < 1e-6:  # nothing to compare with
        return top, top
    return _rms(difference) / _rms(expected), top / largest


def _beyond_tolerance(case: AnyCase, errors: Errors) -> list[str]:
    slack = {"dsink": _SINK_SLACK, "drow_scale": _SCALE_SLACK}
    if isinstance(case, AttentionCase) and case.table == "steep":
        slack["dbias"] = _STEEP_SLACK
    limits = TOLERANCE[case.dtype]
    wrong = []
    for name, pair in errors.items():
        within = (x <= slack.get(name, 1.0) * y for x, y in zip(pair, limits, strict=True))
        if not all(within):  # a NaN is not within
            wrong.append(name)
    return wrong


def _rms(x: Tensor) -> float:
    return x.pow(2).mean().sqrt().item()


# Attention


def _attention(case: AttentionCase, emulation: Emulation) -> tuple[dict[str, Tensor], ...]:
    inputs = attention_inputs(case)
    settings: dict[str, Any] = {"window": case.window}
    grad = torch.randn(inputs["q"].shape, generator=torch.Generator().manual_seed(99))
    grad = grad.to(case.dtype)
    engine: Callable[..., Tensor] = attention
    if case.compiled:
        engine = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=False)
    with emulated(emulation):
        given = {"engine": "triton", "pruning": case.pruning, **settings, **dropout_of(case)}
        found = outputs_and_gradients(engine, inputs, grad, **given)
    exact = in_double(inputs)
    for name in case.frozen:
        exact[name] = exact[name].detach()
    settings |= kept_weights(case)
    expected = outputs_and_gradients(reference_attention, exact, grad.double(), **settings)
    return found, {name: torch.nan_to_num(x) for name, x in expected.items()}


def attention_inputs(case: AttentionCase) -> Inputs:
    inputs = inputs_of(case, case.seed)
    generator = torch.Generator().manual_seed(case.seed + 1)
    if case.layout == "fused":  # q, k and v side by side, as a projection gives them
        sizes = (case.batch, case.k_length, case.heads, 3 * case.head_dim)
        rows = torch.randn(sizes, generator=generator).to(case.dtype)
        parts = (x.transpose(1, 2) for x in rows.split(case.head_dim, -1))
        inputs |= dict(zip("qkv", parts, strict=True))
    elif case.layout == "rows":
        for name in "qkv":
            inputs[name] = inputs[name].transpose(1, 2).contiguous().transpose(1, 2)
    if case.bias:
        inputs["bias"] = _bias(case, inputs["bias"])
    for name, x in inputs.items():
        if x is not None and x.is_floating_point():
            inputs[name] = x.detach().requires_grad_(name not in case.frozen)
    return inputs


def _bias(case: AttentionCase, drawn: Tensor) -> Tensor:
    distance = torch.arange(drawn.shape[1]).float()
    head = torch.arange(case.heads).float()[:, None]
    if case.table == "steep":  # falls by far more than 120 of log2 in a band
        return -(0.5**head) * 3.0 * distance
    if case.table == "log":
        return -(1 + head) * torch.log1p(0.7 * distance)
    if case.table == "decay":
        return -(0.6 / (1 + 3 * head)) * distance
    bias = drawn.detach().clone()
    if case.table == "inf":
        bias[:, 40:] = -math.inf
        bias[:, 5] = -math.inf
    return bias


# The fused softmax

_SCALE = 0.3


def _softmax(case: SoftmaxCase, emulation: Emulation) -> tuple[dict[str, Tensor], ...]:
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.batch, case.heads, case.q_length, case.k_length)
    scores = (3 * torch.randn(shape, generator=generator)).to(case.dtype)
    grad = torch.randn(shape, generator=generator).to(case.dtype)
    table = (case.heads, case.k_length + 7)
    inputs: Inputs = {
        "scores": scores.requires_grad_(),
        "bias": (-3 * torch.rand(table, generator=generator)).requires_grad_(),
        "weight": (0.2 + torch.rand(table, generator=generator)).requires_grad_(),
    }
    inputs |= {name: None for name in ("bias", "weight") if not getattr(case, name)}
    settings = {"scale": _SCALE, "window": case.window}
    with emulated(emulation):
        found = outputs_and_gradients(triton_fused_softmax, inputs, grad, **settings)
    exact = in_double(inputs)
    return found, outputs_and_gradients(_plain_softmax, exact, grad.double(), **settings)


def _plain_softmax(
    scores: Tensor, bias: Tensor | None, weight: Tensor | None, scale: float, window: int | None
) -> Tensor:
    q_length, k_length = scores.shape[-2:]
    position = torch.arange(k_length)
    distance = position[k_length - q_length :, None] - position
    seen = (distance >= 0) & (distance < (window or k_length))
    logits, at = scores * scale, distance.clamp(min=0)
    logits = logits if weight is None else logits * weight[:, at]
    logits = logits if bias is None else logits + bias[:, at]
    return torch.softmax(logits.masked_fill(~seen, -math.inf), -1)
