"""Parts 2 and 3, numbers: every engine and the fused softmax against float64, in all dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kerple import attention
from megatron.engines.call import checked_call
from megatron.engines.dispatch import why_not_triton
from megatron.engines.reference import fused_softmax
from megatron.errors import EngineError

from .findings import Finding, Settings, guarded, verdict

PART = "numbers"
# Largest difference over the largest value: some roundings of the result, in its own precision.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Case:
    """One attention call by its sizes; queries are the last positions of the keys."""

    queries: int
    keys: int
    dim: int
    window: int | None = None
    tables: str = "bias"

    def __str__(self) -> str:
        window = "" if self.window is None else f" window {self.window}"
        return f"{self.queries}x{self.keys} D{self.dim} {self.tables}{window}"


def _cases(quick: bool) -> Iterator[Case]:
    yield Case(33, 33, 32)
    yield Case(1, 70, 64)
    yield Case(65, 65, 64, window=17, tables="bias and weight")
    if not quick:
        for dim in (32, 64, 80, 128, 256):
            yield Case(513, 513, dim)
            yield Case(1000, 1000, dim, tables="bias and weight")
        yield Case(100, 1024, 64, window=200)
        yield Case(4096, 4096, 64)
        yield Case(2048, 16_384, 128)


def check(settings: Settings) -> list[Finding]:
    """Outputs and gradients of each engine that runs here, repeats, the softmax, the refusals."""
    engines = ("naive", "flex", "triton") if settings.on_gpu else ("naive", "tiled")
    findings = [
        guarded(PART, f"{engine} {dtype} {case}", partial(_compare, settings, engine, dtype, case))
        for engine in engines
        for dtype in TOLERANCE
        for case in _cases(settings.quick)
        if engine != "naive" or case.keys <= 4096
    ]
    best = engines[-1]
    findings.append(guarded(PART, "bitwise repeat", partial(_repeat, settings, best)))
    findings += [
        guarded(PART, f"fused softmax {dtype}", partial(_softmax, settings, dtype))
        for dtype in TOLERANCE
    ]
    return [*findings, *_refusals(settings)]


def _tensors(case: Case, device: torch.device, dtype: torch.dtype) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    heads, distance = 4, torch.arange(case.keys)
    slopes = torch.rand(heads, 1, generator=generator)
    bias = (-slopes * torch.log1p(distance)).to(device)
    weight = torch.exp(-slopes * distance / case.keys).to(device)
    return [
        normal(2, heads, case.queries, case.dim),
        normal(2, heads, case.keys, case.dim),
        normal(2, heads, case.keys, case.dim),
        bias,
        weight if "weight" in case.tables else None,
    ]


def _run(tensors: list[Tensor | None], engine: str, window: int | None) -> list[Tensor]:
    """The output and all gradients, for a fixed gradient of the output."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    q, k, v, bias, weight = leaves
    assert q is not None and k is not None and v is not None
    out = attention(q, k, v, bias, weight, window=window, engine=engine)
    pattern = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype)
    wanted = [leaf for leaf in leaves if leaf is not None]
    return [out.detach(), *torch.autograd.grad(out, wanted, pattern.view_as(out))]


def _difference(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1.0))
        for a, b in zip(found, expected, strict=True)
    )


def _compare(settings: Settings, engine: str, dtype: torch.dtype, case: Case) -> Finding:
    tensors = _tensors(case, settings.device, dtype)
    exact = [None if t is None else t.double() for t in tensors]
    error = _difference(_run(tensors, engine, case.window), _run(exact, "naive", case.window))
    status = verdict(error <= TOLERANCE[dtype])
    name = f"{engine} {dtype} {case}"
    return Finding(
        PART, name, status, f"{error:.1e}", {"error": error, "at_most": TOLERANCE[dtype]}
    )


def _repeat(settings: Settings, engine: str) -> Finding:
    """The same call must give the same bits, gradients of the tables included."""
    times = 3 if settings.quick else 50
    tensors = _tensors(Case(257, 257, 64), settings.device, torch.bfloat16)
    first = _run(tensors, engine, None)
    same = all(
        all(torch.equal(a, b) for a, b in zip(first, _run(tensors, engine, None), strict=True))
        for _ in range(times)
    )
    return Finding(PART, f"bitwise repeat, {engine}", verdict(same), f"{times} times")


def _softmax(settings: Settings, dtype: torch.dtype) -> Finding:
    """The fused softmax that ALiBi and KERPLE share, with its bias."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(2, 4, 65, 65, generator=generator).to(settings.device, dtype)
    bias = (-torch.log1p(torch.arange(65.0)) * torch.ones(4, 1)).to(settings.device)
    error = _difference(
        [fused_softmax(scores, bias)], [fused_softmax(scores.double(), bias.double())]
    )
    status = verdict(error <= TOLERANCE[dtype])
    return Finding(PART, f"fused softmax {dtype}", status, f"{error:.1e}", {"error": error})


def _refusals(settings: Settings) -> list[Finding]:
    """What the Triton engine cannot do is said, not silently done densely."""
    size = (1, 1, 8)
    q = torch.zeros(*size, 512, device=settings.device, dtype=torch.bfloat16)
    findings = []
    for name, call in (
        ("head dim 512", checked_call(q, q, q)),
        ("float64", checked_call(*[q[..., :64].double()] * 3)),
    ):
        reason = why_not_triton(call)
        findings.append(Finding(PART, f"Triton refuses {name}", verdict(reason), reason or "runs"))
    try:
        attention(q, q, q, engine="triton")
        refused = "ran"
    except EngineError as error:
        refused = str(error)
    return [*findings, Finding(PART, "a forced engine", verdict(refused != "ran"), refused)]
