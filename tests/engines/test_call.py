"""Grouped heads, key biases, first keys and sinks: in every engine, alone and together; and what is
refused."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kerple import kernel
from megatron.engines import attention
from megatron.engines.cpu import tiled_forward_with_count
from megatron.errors import EngineError
from tests.engines.reference import reference_attention, relative_error

Engine = Callable[..., Tensor]


EVERY_TERM = "key_bias+first_key+sink+features+row_scale"


@dataclass
class Draw:
    """Arguments of a call; `check` compares an engine with float64, output and all gradients."""

    batch: int = 2
    heads: int = 6
    key_heads: int = 2
    q_len: int = 150
    k_len: int = 210
    dim: int = 16
    tables: str = "bias"
    terms: str = "key_bias+first_key+sink"
    shared: bool = False  # one key bias for all heads and sequences, one sink for all queries
    window: int | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0
    arguments: dict = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        batch, heads, k_len = self.batch, self.heads, self.k_len
        qkv = [(heads, self.q_len), (self.key_heads, k_len), (self.key_heads, k_len)]
        named: dict = {
            name: torch.randn(batch, h, length, self.dim).to(self.dtype)
            for name, (h, length) in zip("qkv", qkv, strict=True)
        }
        distance = torch.arange(k_len + 3)
        if "bias" in self.tables:
            named["bias"] = -2 * torch.rand(heads, 1) * torch.log1p(distance * torch.rand(heads, 1))
        if "weight" in self.tables:
            named["weight"] = torch.exp(-torch.rand(heads, 1) * distance / k_len)
        if "key_bias" in self.terms:
            named["key_bias"] = torch.randn((1, 1, k_len) if self.shared else (batch, heads, k_len))
        if "sink" in self.terms:
            named["sink"] = torch.randn((heads,) if self.shared else (batch, heads, self.q_len))
        if "features" in self.terms:
            named["query_features"] = torch.randn(batch, heads, self.q_len, 3)
            named["distance_features"] = 0.5 * torch.randn(heads, 3, 40)
        if "row_scale" in self.terms:
            named["row_scale"] = 0.3 + 1.5 * torch.rand(batch, heads, self.q_len)
        self.arguments = {name: x.requires_grad_() for name, x in named.items()}
        if "first_key" in self.terms:
            starts = torch.rand(batch, k_len) < 6 / k_len
            first = torch.where(starts, torch.arange(k_len), 0).cummax(-1).values
            self.arguments["first_key"] = first[:, k_len - self.q_len :]
        self.arguments["window"] = self.window

    def output_and_gradients(self, attend: Engine) -> dict[str, Tensor]:
        out = attend(**self.arguments)
        wanted = {
            name: x
            for name, x in self.arguments.items()
            if isinstance(x, Tensor) and x.requires_grad
        }
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
        grads = torch.autograd.grad(out, list(wanted.values()), grad)
        return {"out": out, **dict(zip(wanted, grads, strict=True))}

    def check(self, engine: Engine, tolerance: float = 4e-6) -> None:
        expected = self.output_and_gradients(reference_attention)
        actual = self.output_and_gradients(engine)
        errors = {name: relative_error(actual[name], expected[name]) for name in expected}
        assert max(errors.values()) < tolerance, errors


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tables", ["none", "bias", "weight", "bias+weight"])
def test_all_together_match_float64(engine: Engine, tables: str, shared: bool) -> None:
    Draw(tables=tables, shared=shared).check(engine)
    Draw(tables=tables, shared=shared, window=37, q_len=210).check(engine)


@pytest.mark.parametrize("terms", ["none", "key_bias", "first_key", "sink"])
@pytest.mark.parametrize("key_heads", [1, 3, 6])
def test_each_alone_matches_float64(engine: Engine, terms: str, key_heads: int) -> None:
    Draw(terms=terms, key_heads=key_heads, q_len=301, k_len=301).check(engine)


def test_bf16_inputs_with_fp32_terms(engine: Engine) -> None:
    draw = Draw(dtype=torch.bfloat16)
    grads = draw.output_and_gradients(engine)
    assert grads["k"].dtype == torch.bfloat16
    assert grads["key_bias"].dtype == grads["sink"].dtype == torch.float32
    draw.check(engine, 2e-2)


@pytest.mark.parametrize("tables", ["bias", "bias+weight"])
def test_bf16_errors_are_those_of_its_rounding(engine: Engine, tables: str) -> None:
    """Inputs, probabilities and their gradients are rounded to 2^-9; nothing may add up."""
    draw = Draw(
        q_len=701, k_len=777, dim=64, dtype=torch.bfloat16, terms="key_bias+sink", tables=tables
    )
    expected = draw.output_and_gradients(reference_attention)
    actual = draw.output_and_gradients(engine)
    for name, value in expected.items():
        difference = (actual[name].double() - value.double()).norm()
        assert difference < 6e-3 * value.double().norm(), name


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_combination_of_sizes_and_terms(engine: Engine, data: st.DataObject) -> None:
    q_len = data.draw(st.integers(1, 210))
    key_heads = data.draw(st.sampled_from([1, 2, 3]))
    draw = Draw(
        batch=data.draw(st.integers(1, 2)),
        heads=key_heads * data.draw(st.sampled_from([1, 2, 5])),
        key_heads=key_heads,
        q_len=q_len,
        k_len=q_len + data.draw(st.integers(0, 210)),
        dim=data.draw(st.sampled_from([1, 8, 24, 64])),
        window=data.draw(st.none() | st.integers(1, 300)),
        tables=data.draw(st.sampled_from(["none", "bias", "weight", "bias+weight"])),
        terms="+".join(data.draw(st.sets(st.sampled_from(["key_bias", "first_key", "sink"])))),
        shared=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 2**30)),
    )
    expected = draw.output_and_gradients(reference_attention)
    actual = draw.output_and_gradients(engine)
    for name, value in expected.items():
        # a table's gradient may be all rounding: a sum over hundreds of rows that ought to be 0
        torch.testing.assert_close(
            actual[name].double(), value.double(), rtol=1e-4, atol=1e-4, msg=name
        )


def gates(batch: int, heads: int, length: int, total: float) -> Tensor:
    """Key biases of forget gates whose logarithms add up to -total."""
    logarithms = torch.rand(batch, heads, length)
    logarithms *= total / logarithms.sum(-1, keepdim=True)
    return logarithms.double().cumsum(-1).float()


@pytest.mark.parametrize("sink", [False, True])
def test_gates_that_add_up_to_ten_thousand(engine: Engine, sink: bool) -> None:
    """fp32 has 0.001 left at 10,000: the query's own bias must go before the scores are added."""
    length = 900
    draw = Draw(q_len=length, k_len=length, terms="none", tables="bias")
    key_bias = gates(2, 6, length, 1e4)
    draw.arguments["key_bias"] = key_bias.requires_grad_()
    if sink:
        draw.arguments["sink"] = (key_bias.detach() + torch.randn(6, 1)).requires_grad_()
    draw.check(engine, 1e-5)


def test_gentle_gates_on_top_of_a_large_sum(engine: Engine) -> None:
    """Most of the sum before the queries: all scores count, and none may lose its digits."""
    draw = Draw(q_len=200, k_len=200, terms="none")
    draw.arguments["key_bias"] = (gates(2, 6, 200, 5.0) + 1e4).requires_grad_()
    draw.check(engine, 1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_hides_keys_and_empty_rows_give_zero(engine: Engine, side: str) -> None:
    draw = Draw(q_len=210, k_len=210, terms="key_bias")
    key_bias = draw.arguments["key_bias"]
    with torch.no_grad():
        key_bias[1] += 3000.0
        key_bias[1, :, slice(0, 70) if side == "left" else slice(140, None)] = -math.inf
    draw.check(engine)
    result = draw.output_and_gradients(engine)
    assert all(x.isfinite().all() for x in result.values())
    hidden = slice(0, 70) if side == "left" else slice(140, None)
    assert result["k"][1, :, hidden].eq(0).all()
    assert result["v"][1, :, hidden].eq(0).all()
    if side == "left":
        assert result["out"][1, :, :70].eq(0).all()
        assert result["q"][1, :, :70].eq(0).all()


def test_all_keys_hidden_leaves_the_sink_alone(engine: Engine) -> None:
    draw = Draw(terms="key_bias+sink", q_len=210)
    with torch.no_grad():
        draw.arguments["key_bias"].fill_(-math.inf)
    result = draw.output_and_gradients(engine)
    assert all(x.eq(0).all() for x in result.values())


def test_packed_documents_equal_each_document_alone(engine: Engine) -> None:
    """Outputs and gradients, of documents whose ends fall anywhere in a block."""
    lengths = [1, 95, 96, 97, 300, 2, 190]
    total = sum(lengths)
    draw = Draw(batch=1, q_len=total, k_len=total, terms="sink", shared=True, tables="bias+weight")
    starts = torch.tensor([sum(lengths[:i]) for i in range(len(lengths))])
    first = starts.repeat_interleave(torch.tensor(lengths))[None]
    arguments = draw.arguments
    tables = {name: arguments[name] for name in ("bias", "weight", "sink")}
    qkv = [arguments[name] for name in "qkv"]
    packed = engine(*qkv, **tables, first_key=first)
    alone = torch.cat(
        [
            engine(*(x[:, :, s : s + n] for x in qkv), **tables)
            for s, n in zip(starts.tolist(), lengths, strict=True)
        ],
        2,
    )
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=2e-6)
    wanted = [*qkv, *tables.values()]
    grad = torch.randn_like(packed)
    for a, b in zip(
        torch.autograd.grad(packed, wanted, grad),
        torch.autograd.grad(alone, wanted, grad),
        strict=True,
    ):
        assert relative_error(a, b) < 4e-6


def test_tiles_of_other_documents_are_not_visited(tiled: Engine) -> None:
    draw = Draw(batch=1, q_len=2048, k_len=2048, terms="none")
    q, k, v = (draw.arguments[name] for name in "qkv")
    first = (torch.arange(2048) // 256 * 256)[None]
    _, one = tiled_forward_with_count(q, k, v)
    _, eight = tiled_forward_with_count(q, k, v, first_key=first)
    assert eight.visited < 0.3 * one.visited


def test_sink_of_minus_infinity_is_none(engine: Engine) -> None:
    draw = Draw(terms="none")
    without = engine(**draw.arguments)
    nothing = engine(**draw.arguments, sink=torch.full((6,), -math.inf))
    torch.testing.assert_close(nothing, without, rtol=1e-6, atol=1e-6)


def test_same_call_gives_the_same_bits(tiled: Engine) -> None:
    draw = Draw(tables="bias+weight", q_len=400, k_len=400)
    first, second = (draw.output_and_gradients(tiled) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("tables", ["none", "bias"])
def test_pruning_with_gates_changes_only_rounding(tiled: Engine, tables: str) -> None:
    """Gates prune what tables alone could not; large values and padding are still seen."""
    length = 2000
    draw = Draw(batch=1, q_len=length, k_len=length, terms="sink", tables="none")
    if tables == "bias":
        draw.arguments["bias"] = (-torch.rand(6, 1) * torch.arange(length)).requires_grad_()
    key_bias = gates(1, 6, length, 500.0)
    key_bias[:, :, 700] += 300.0  # one key that stands out wins for a long time
    key_bias[:, :, 1500:1520] = -math.inf
    draw.arguments["key_bias"] = key_bias.requires_grad_()
    with torch.no_grad():
        draw.arguments["k"][:, :, 40] *= 30
        draw.arguments["v"][:, :, 41] *= 1e6
    pruned = draw.output_and_gradients(lambda **x: tiled(**x, pruning=True))
    full = draw.output_and_gradients(lambda **x: tiled(**x, pruning=False))
    for name, value in full.items():
        assert (pruned[name] - value).abs().max() <= 3e-6 * value.abs().max(), name


_MEMORY_PROBE = """
import sys, torch
from kerple import attention
torch.set_num_threads(1)
def megabytes(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))
def run(length):
    q = torch.randn(1, 16, length, 32, requires_grad=True)
    k, v = (torch.randn(1, 1, length, 32, requires_grad=True) for _ in range(2))
    bias = (-torch.arange(length).log1p()).repeat(16, 1).requires_grad_()
    key_bias = torch.randn(1, 16, length, requires_grad=True)
    sink = torch.zeros(16, requires_grad=True)
    first = (torch.arange(length) // 1000 * 1000)[None]
    return q, lambda: attention(q, k, v, bias, key_bias=key_bias, sink=sink, first_key=first,
                                engine="tiled").sum().backward()
run(256)[1]()
q, call = run(16384)
before = megabytes('VmRSS')
call()
print((megabytes('VmHWM') - before) / (q.numel() * 4 / 2**20))
"""


@pytest.mark.parametrize(("backend", "limit"), [("compiled", 6.0), ("python", 11.0)])
def test_no_copies_of_heads_and_no_dense_masks(backend: str, limit: float) -> None:
    """16 heads on one key head at 16,384, in multiples of q's 32 MiB: a dense mask is 512 of them.

    Output, its gradient and that of q are three; keys and values copied for each head, with their
    gradients, would be four more.
    """
    result = subprocess.run(
        [sys.executable, "-c", _MEMORY_PROBE],
        env={**os.environ, "KERPLE_TILED_BACKEND": backend},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(result.stdout) < limit, result.stdout


# What a call may be.


def plain() -> list[Tensor]:
    return [torch.randn(1, 2, 32, 16) for _ in range(3)]


@pytest.mark.parametrize("engine", ["naive", "tiled"])
def test_longer_table_is_cut_and_gets_zero_gradient_beyond(engine: str) -> None:
    q, k, v = plain()
    table = (-torch.rand(2, 50)).requires_grad_()
    out = attention(q, k, v, table, engine=engine)
    torch.testing.assert_close(out, attention(q, k, v, table[:, :32], engine=engine))
    (grad,) = torch.autograd.grad(out.square().sum(), table)
    assert grad.shape == table.shape
    assert grad[:, 32:].eq(0).all()
    assert grad[:, :32].ne(0).any()


@pytest.mark.parametrize("engine", ["auto", "naive", "tiled"])
@pytest.mark.parametrize("name", ["bias", "weight"])
def test_shorter_table_is_an_error(engine: str, name: str) -> None:
    with pytest.raises(EngineError, match=f"{name} must be a table .heads=2, at least 32"):
        attention(*plain(), **{name: torch.zeros(2, 31)}, engine=engine)


BAD = {
    "three dimensions": (lambda q, k, v: (q[0], k, v), "batch, heads, length, head_dim"),
    "heads of k and v differ": (lambda q, k, v: (q, k[:, :1], v), "agree"),
    "key heads no divisor": (lambda q, k, v: (q[:, :1], k, v), "must divide those of q, 1"),
    "values shorter": (lambda q, k, v: (q, k, v[:, :, 1:]), "agree"),
    "more queries": (lambda q, k, v: (q, k[:, :, 1:], v[:, :, 1:]), "more queries than keys"),
    "mixed dtypes": (lambda q, k, v: (q.bfloat16(), k, v), "one floating dtype"),
    "integers": (lambda q, k, v: (q.int(), k.int(), v.int()), "one floating dtype"),
    "numpy": (lambda q, k, v: (q.numpy(), k, v), "q must be a torch tensor; got ndarray"),
    "empty": (lambda q, k, v: (q[:, :, :0], k, v), "must not be empty"),
}


def test_a_kernels_tables_are_given_one_by_one() -> None:
    tables = kernel("kerple_log", heads=2)(32)
    with pytest.raises(EngineError, match=r"bias must be a tensor; got Tables.*tables\.bias"):
        attention(*plain(), tables)


@pytest.mark.parametrize("name", BAD)
def test_bad_tensors_are_named(name: str) -> None:
    change, says = BAD[name]
    with pytest.raises(EngineError, match=says):
        attention(*change(*plain()))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"window": 0}, "window=0"),
        ({"window": 4.5}, "window=4.5: must be a whole number"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"dropout": -0.1}, "dropout=-0.1"),
        ({"scale": math.inf}, "scale=inf"),
        ({"bias": torch.zeros(3, 32)}, "bias must be a table"),
        ({"bias": torch.zeros(2, 32, dtype=torch.int64)}, "bias must be floating"),
        (
            {"key_bias": torch.zeros(1, 2, 31)},
            "key_bias must be .batch=1 or 1, heads=2 or 1, keys=32",
        ),
        ({"key_bias": torch.zeros(1, 2, 32).long()}, "key_bias must be floating"),
        ({"sink": torch.zeros(3)}, "sink must be .heads=2. or"),
        ({"first_key": torch.zeros(1, 32)}, "first_key must hold int32 or int64"),
        ({"first_key": torch.zeros(32).long()}, "first_key must be .batch=1, queries=32."),
        ({"first_key": torch.arange(32)[None] + 1}, "own position at most"),
        ({"first_key": torch.arange(32)[None].flip(-1) - 31}, "must rise"),
        ({"first_key": torch.tensor([[0] * 10 + [5] * 10 + [4] * 12])}, "must rise"),
        ({"row_scale": torch.ones(1, 3, 32)}, "row_scale must be .batch=1 or 1, heads=2 or 1, que"),
        ({"row_scale": torch.zeros(1, 2, 32)}, "row_scale must be positive and finite"),
        (
            {
                "query_features": torch.ones(1, 2, 31, 4),
                "distance_features": torch.ones(2, 4, 32),
            },
            "query_features must be .batch=1, heads=2, queries=32, features.",
        ),
    ],
)
def test_bad_options_are_named(options: dict, says: str) -> None:
    with pytest.raises(EngineError, match=says):
        attention(*plain(), **options)
    if "query_features" in options:  # one query more, and they are taken
        attention(*plain(), **{**options, "query_features": torch.ones(1, 2, 32, 4)})


def test_lengths_before_heads_are_told() -> None:
    """[batch, length, heads, head_dim], as flash-attention takes them."""
    swapped = [torch.randn(1, 150, 2, 16) for _ in range(3)]
    with pytest.raises(EngineError, match=r"look like \[batch, length, heads, head_dim\]"):
        attention(*swapped, torch.zeros(2, 150))
    with pytest.warns(UserWarning, match=r"150 heads and 2 keys.*transpose\(1, 2\)"):
        attention(*swapped)
    for heads, queries in ((1, 150), (2, 7)):  # grouped heads; cached keys
        q, k = torch.randn(1, queries, 2, 16), torch.randn(1, 150, heads, 16)
        with pytest.raises(EngineError, match=r"taken as \[batch, heads, length, head_dim\]"):
            attention(q, k, k)
