"""`auto` picks what can do the job; a forced engine that cannot says why and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from megatron.engines import ENGINES, attention, flex, triton_attention
from megatron.engines.call import Call, checked_call
from megatron.engines.dispatch import choose_engine, explain_engine
from megatron.errors import EngineError
from tests.engines.reference import reference_attention, relative_error


def make(length: int = 32, heads: int = 2, dim: int = 16, keys: int | None = None) -> list:
    return [torch.randn(1, heads, n, dim) for n in (length, keys or length, keys or length)]


def call(length: int, dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> Call:
    q, k, v = (x.to(dtype) for x in make(length))
    return Call(q, k, v, scale=0.25, dropout=dropout)


def test_auto_on_cpu_goes_by_length_and_dtype() -> None:
    assert choose_engine(call(512)) == "tiled"
    assert choose_engine(call(512, torch.bfloat16)) == "tiled"
    assert choose_engine(call(1)) == "naive"
    assert choose_engine(call(512, dropout=0.1)) == "tiled"
    assert choose_engine(call(512, torch.float64)) == "naive"


@pytest.mark.parametrize(
    ("engine", "place"), [("naive", "reference.naive"), ("tiled", "cpu.tiled")]
)
def test_the_engine_that_is_asked_for_runs(
    engine: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"megatron.engines.{place}_attention", lambda call: (engine, call.k_len))
    assert attention(*make(), engine=engine) == (engine, 32)


@pytest.mark.parametrize("engine", ["auto", "naive", "tiled"])
def test_scale_defaults_to_the_root_of_the_head_dim(engine: str) -> None:
    q, k, v = make()
    expected = attention(q, k, v, scale=1 / math.sqrt(16), engine=engine)
    assert torch.equal(attention(q, k, v, engine=engine), expected)


@pytest.mark.parametrize("length", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_auto_does_every_job(length: int, dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in make(length, keys=40))
    bias = -torch.rand(2, 40)
    for dropout in (0.0, 0.5):
        out = attention(q, k, v, bias, dropout=dropout)
        assert out.dtype == dtype
        assert out.shape == q.shape
    out = attention(q, k, v, bias)
    assert relative_error(out, reference_attention(q, k, v, bias)) < 1e-2


@pytest.mark.parametrize(
    ("engine", "change", "says"),
    [
        ("tiled", {"dtype": torch.float64}, "float64"),
        ("triton", {}, "runs on GPU"),
        ("flash", {}, "auto, naive, tiled, triton, flex"),
        ("flex", {"dropout": 0.1}, "dropout=0.1"),
    ],
)
def test_forced_engine_that_cannot_says_why_and_the_fix(
    engine: str, change: dict, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q, k, v = (x.to(change.get("dtype", torch.float32)) for x in make())
    with pytest.raises(EngineError, match=says) as raised:
        attention(q, k, v, engine=engine, dropout=change.get("dropout", 0.0))
    assert "use " in str(raised.value)


def test_engine_error_is_a_value_error_and_engines_are_named() -> None:
    assert issubclass(EngineError, ValueError)
    assert ENGINES == ("auto", "naive", "tiled", "triton", "flex")


@pytest.fixture
def on_a_gpu() -> Iterator[None]:
    """Tensors that say they are on a GPU, and take no memory."""
    with FakeTensorMode():
        yield


def gpu_call(length: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Call:
    q = torch.empty(8, 12, length, 64, device="cuda", dtype=dtype)
    return checked_call(q, q, q, **options)


@pytest.mark.usefixtures("on_a_gpu")
def test_a_gpu_takes_triton_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "can_run", lambda *_: None)
    assert choose_engine(gpu_call(4096)) == "triton"
    monkeypatch.setattr(triton_attention, "can_run", lambda *_: "no C compiler was found")
    monkeypatch.setattr(flex, "is_fall_back", lambda _: False)  # an A100 without a compiler
    assert choose_engine(gpu_call(2048)) == "naive"


@pytest.mark.usefixtures("on_a_gpu")
def test_a_gpu_that_triton_has_no_kernels_for_takes_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "can_run", lambda *_: "it runs on NVIDIA GPUs")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert choose_engine(gpu_call(16_384)) == "flex"
    assert choose_engine(gpu_call(1)) == "naive"  # dense scores of one query are small
    assert choose_engine(gpu_call(64, torch.float64)) == "naive"
    assert choose_engine(gpu_call(64, dropout=0.1)) == "naive"
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, engine in (((7, 5), "flex"), ((8, 0), "naive"), ((9, 0), "naive")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert choose_engine(gpu_call(64)) == engine


@pytest.mark.usefixtures("on_a_gpu")
def test_falling_back_to_dense_scores_is_refused_beyond_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_attention, "can_run", lambda *_: "no C compiler was found")
    monkeypatch.setattr(flex, "is_fall_back", lambda _: False)
    with pytest.raises(EngineError, match=r"96 GB of scores .* no C compiler was found"):
        choose_engine(gpu_call(16_384))
    assert choose_engine(gpu_call(16_384), "naive") == "naive"  # asked for: it is done
    assert choose_engine(gpu_call(1)) == "naive"


def test_the_start_says_which_engine_runs_and_why() -> None:
    def explained(engine: str, dropout: float = 0.0) -> str:
        kind = {"device": torch.device("cpu"), "dtype": torch.float32}
        return explain_engine(engine, head_dim=64, dropout=dropout, **kind)

    assert explained("auto") == "tiled"
    assert explained("naive") == "naive (as asked for)"
    assert explained("auto", dropout=0.1) == "tiled"


@pytest.mark.parametrize("engine", ["naive", "tiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_neither_numbers_nor_dtype(engine: str, dtype: torch.dtype) -> None:
    """The tensors' dtype decides; what `auto` takes at a length would show in the output else."""
    torch.manual_seed(0)
    q, k, v, features = (torch.randn(1, 2, 20, 8).to(dtype) for _ in range(4))
    tables = {"query_features": features, "distance_features": torch.randn(1, 8, 20)}
    plain = attention(q, k, v, torch.randn(2, 20), **tables, engine=engine, pruning=False)
    torch.manual_seed(0)
    q, k, v, features = (torch.randn(1, 2, 20, 8).to(dtype).requires_grad_() for _ in range(4))
    tables = {"query_features": features, "distance_features": torch.randn(1, 8, 20)}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = attention(q, k, v, torch.randn(2, 20), **tables, engine=engine, pruning=False)
    assert under.dtype == plain.dtype == dtype and torch.equal(under, plain)
    under.sum().backward()
    assert q.grad is not None and q.grad.dtype == dtype and bool(q.grad.isfinite().all())


def test_a_scale_that_should_learn_is_refused() -> None:
    """It is a number: its gradient would be lost in silence."""
    q = torch.randn(1, 2, 4, 8)
    assert attention(q, q, q, scale=torch.tensor(0.5)).shape == q.shape
    with pytest.raises(EngineError, match=r"scale requires a gradient.* multiply q by it"):
        attention(q, q, q, scale=torch.tensor(0.5, requires_grad=True))
