"""The Triton engine's host code on tensors without memory, its launches recorded instead of run.

On device "meta" every check, layout, stride, grid and workspace is made as on a GPU, for a million
tokens as for ten; a tensor that was left on the CPU raises where it meets the others.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.engines import triton_attention as engine
from megatron.engines.call import checked_call
from megatron.engines.triton_problem import Rows
from megatron.engines.triton_runtime import Launch, unavailable
from megatron.engines.triton_tiles import ROW_MULTIPLE, tiles_of

pytestmark = pytest.mark.skipif(unavailable() is not None, reason="Triton is not installed")

A100_PROCESSORS = 108
MAX_GRID = (2**31 - 1, 65535, 65535)


@dataclass
class Rehearsal:
    launches: list[Launch]
    inputs: dict[str, Tensor]
    out: Tensor

    def of(self, kernel: str) -> list[Launch]:
        name = f"attention_{kernel}_kernel"
        return [launch for launch in self.launches if _name(launch) == name]

    def argument(self, kernel: str, name: str) -> Any:
        return _arguments(self.of(kernel)[0])[name]


def _name(launch: Launch) -> str:
    return str(launch.kernel.fn.__name__)


def _parameters(launch: Launch) -> list[str]:
    return list(inspect.signature(launch.kernel.fn).parameters)


def _arguments(launch: Launch) -> dict[str, Any]:
    return dict(zip(_parameters(launch), launch.arguments, strict=False))


def _tensors(launch: Launch) -> list[Tensor]:
    """Also those inside of the tuples that kernels take."""

    def opened(x: Any) -> list[Tensor]:
        if isinstance(x, tuple):
            return [tensor for part in x for tensor in opened(part)]
        return [x] if isinstance(x, Tensor) else []

    return opened(launch.arguments)


def attend(*tensors: Tensor, **options: Any) -> Tensor:
    call = checked_call(*tensors, **options)
    assert engine.can_run(call) is None
    return engine.pruned_attention(call, None)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    launches: list[Launch] = []
    monkeypatch.setattr(Launch, "run", lambda launch: launches.append(launch))
    monkeypatch.setattr(engine, "_unsuitable_device", lambda device: None)
    return launches


def rehearse(
    launches: list[Launch],
    *,
    batch: int = 1,
    heads: int = 2,
    key_heads: int | None = None,
    length: int = 8192,
    q_length: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    operands: tuple[str, ...] = ("bias",),
    window: int | None = None,
) -> Rehearsal:
    """A forward and a backward on device meta."""

    def empty(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        x = torch.empty(shape, dtype=kind, device="meta")
        return x.requires_grad_() if x.is_floating_point() else x

    def rows(count: int, rows: int) -> Tensor:  # [B, L, H, D] in memory, as a projection gives them
        return empty(batch, rows, count, head_dim, kind=dtype)

    q_length = q_length or length
    shapes = {
        "bias": (heads, length),
        "weight": (heads, length + 5),
        "key_bias": (batch, heads, length),
        "sink": (heads,),
        "query_features": (batch, heads, q_length, 16),
        "distance_features": (1, 16, 1024),
        "row_scale": (batch, 1, q_length),
    }
    inputs = {
        "q": rows(heads, q_length),
        "k": rows(key_heads or heads, length),
        "v": rows(key_heads or heads, length),
        **{name: empty(*shape) for name, shape in shapes.items() if name in operands},
    }
    others = {name: x for name, x in inputs.items() if name not in "qkv"}
    if "first_key" in operands:
        others["first_key"] = empty(batch, q_length, kind=torch.int64)
    out = attend(
        *(inputs[name].transpose(1, 2) for name in "qkv"), scale=0.1, window=window, **others
    )
    out.sum().backward()
    return Rehearsal(launches, inputs, out)


ALL = ("bias", "weight", "key_bias", "sink", "first_key")
FEATURES = ("query_features", "distance_features")
CASES = [
    {},
    {"operands": ()},
    {"operands": ALL, "batch": 3, "heads": 4, "key_heads": 2, "q_length": 100, "length": 777},
    {"head_dim": 40, "dtype": torch.float16, "window": 100},
    {"head_dim": 160, "dtype": torch.float32, "length": 300, "operands": ALL},
    {"q_length": 1, "length": 5, "operands": ("weight", "key_bias")},
    {"length": 1 << 20, "head_dim": 128, "operands": ALL},
    {"length": 9000, "heads": 4, "key_heads": 2, "operands": (*FEATURES, "row_scale", "bias")},
    {"batch": 3, "q_length": 10, "length": 777, "operands": FEATURES, "head_dim": 128},
    {"dtype": torch.float32, "length": 300, "operands": (*FEATURES, "bias"), "window": 50},
    {"batch": 4096, "heads": 32, "length": 16},  # more sequences times heads than a grid's axis
]


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_every_launch_is_whole_and_every_gradient_has_its_place(
    recorded: list[Launch], settings: dict[str, Any]
) -> None:
    rehearsal = rehearse(recorded, **settings)
    for launch in rehearsal.launches:
        given = {**_arguments(launch), **launch.options}
        options = {"num_warps", "num_stages", "maxnreg", "enable_fp_fusion"}
        assert given.keys() - options == set(_parameters(launch)), _name(launch)
        assert all(x.device.type == "meta" for x in _tensors(launch))
        assert all(1 <= n <= limit for n, limit in zip(launch.grid, MAX_GRID, strict=False))
    for name, x in rehearsal.inputs.items():
        assert x.grad is not None, name
        assert (x.grad.shape, x.grad.dtype) == (x.shape, x.dtype), name
    assert rehearsal.out.shape[2] == settings.get("q_length", rehearsal.out.shape[2])


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_addresses_are_aligned_and_offsets_inside_a_tile_fit_32_bits(
    recorded: list[Launch], settings: dict[str, Any]
) -> None:
    for launch in rehearse(recorded, **settings).launches:
        named = _arguments(launch)
        constants = launch.options.get("C")
        sides = (64,) if constants is None else (constants.BLOCK_M.value, constants.BLOCK_N.value)
        tile = max(sides)
        for name, value in named.items():
            if isinstance(value, Rows):
                assert all(step % 16 == 0 for step in value[1:]), (_name(launch), name, value)
                assert tile * value.row < 2**31
            if name in ("copy_stride", "row_stride"):
                assert value % 16 == 0, (_name(launch), name, value)
        if (terms := named.get("terms")) is not None:
            assert all(step % 16 == 0 for step in terms[-3:]), terms
            assert 4 * terms.copy_stride < 2**31
            if (features := terms.features) is not None:
                assert all(step % 16 == 0 for step in features[-3:]), features
                assert constants is not None and constants.PITCH.value % 16 == 0
                assert max(features.slot, 8 * features.query.shape[-1] * features.line) < 2**31
        if constants is not None:
            blocks = (constants.BLOCK_M.value, constants.BLOCK_N.value)
            assert [ROW_MULTIPLE % block for block in blocks] == [0, 0]


@pytest.mark.parametrize("length", [8192, 32768, 1 << 20])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_two_heads_fill_an_a100_at_any_length(
    recorded: list[Launch], length: int, head_dim: int
) -> None:
    rehearsal = rehearse(recorded, length=length, head_dim=head_dim)
    for kernel in ("forward", "dkdv", "dq", "band"):
        for launch in rehearsal.of(kernel):
            assert prod(launch.grid) >= A100_PROCESSORS, (kernel, launch.grid)


@pytest.mark.parametrize("length", [8192, 1 << 20])
def test_memory_is_linear_without_a_workspace_of_the_size_of_dq(
    recorded: list[Launch], length: int
) -> None:
    rehearsal = rehearse(recorded, length=length, heads=16, head_dim=128, operands=ALL)
    kept = {id(x): x for launch in rehearsal.launches for x in _tensors(launch)}
    # beside q, k, v, the output and their gradients: all of it together is smaller than q
    others = [x for x in kept.values() if x.dtype != torch.bfloat16]
    q = rehearsal.inputs["q"]
    assert sum(x.numel() * x.element_size() for x in others) < q.numel() * q.element_size()
    shapes = {tuple(x.shape) for x in kept.values() if x.dtype == torch.bfloat16}
    assert shapes == {(1, 16, length, 128)}


def test_strips_take_memory_by_reach_and_not_by_length(recorded: list[Launch]) -> None:
    sizes = []
    for length in (8192, 1 << 20):
        recorded.clear()
        rehearse(recorded, length=length, heads=16, operands=(*FEATURES, "bias"))
        strips = [
            terms.features.strips
            for launch in recorded
            if (terms := _arguments(launch).get("terms")) is not None
        ]
        sizes.append([x.numel() * x.element_size() for x in strips if x is not None])
    assert sizes[0] == sizes[1] and len(sizes[0]) == 3
    assert max(sizes[0]) < 200 * 2**20


def test_a_cache_that_grows_has_few_pitches(recorded: list[Launch]) -> None:
    pitches: dict[str, set[int]] = {"forward": set(), "dkdv": set(), "dq": set()}
    for length in range(520, 1100, 100):
        recorded.clear()
        rehearsal = rehearse(recorded, length=length, operands=FEATURES)
        for kernel, found in pitches.items():
            found.add(rehearsal.of(kernel)[0].options["C"].PITCH.value)
    assert {kernel: len(found) for kernel, found in pitches.items()} == dict.fromkeys(pitches, 1)


def test_grouped_heads_are_read_in_place(recorded: list[Launch]) -> None:
    rehearsal = rehearse(recorded, heads=8, key_heads=2, length=1024)
    for kernel in ("forward", "dkdv", "dq", "band"):
        assert rehearsal.argument(kernel, "k").ptr.shape[1] == 2
        assert rehearsal.argument(kernel, "group") == 4
    assert rehearsal.argument("dkdv", "dk").ptr.shape == (1, 2, 1024, 64)
    blocks = 1024 // tiles_of("dkdv", 64, torch.bfloat16, weighted=False).keys
    assert rehearsal.of("dkdv")[0].grid == (blocks, 2, 1)


def test_nothing_is_launched_for_what_is_not_learned(recorded: list[Launch]) -> None:
    x = torch.empty(1, 2, 64, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    table = torch.empty(2, 64, device="meta")
    attend(x, x.detach(), x.detach(), table, scale=0.1).sum().backward()
    names = [_name(launch) for launch in recorded]
    assert "attention_band_kernel" not in names
    assert "attention_dkdv_kernel" not in names
    assert names.count("attention_dq_kernel") == 1


@pytest.mark.parametrize("table", ["bias", "weight"])
def test_kernels_mask_only_the_scores_that_nothing_else_masks(
    recorded: list[Launch], table: str
) -> None:
    """A bias table holds the edges itself, and a band leaves out distances that are not seen."""
    rehearsal = rehearse(recorded, operands=(table,), window=100)
    for kernel in ("forward", "dkdv", "dq", "band"):
        masks = table == "weight" and kernel != "band"
        for launch in rehearsal.of(kernel):
            constants = launch.options["C"]
            assert (constants.CAUSAL.value, constants.WINDOW.value) == (masks, masks), kernel


@pytest.mark.parametrize(
    ("operands", "in_loop"),
    [(("bias",), [False, True]), (("bias", "row_scale"), [True]), (("bias", "weight"), [True])],
)
def test_a_band_that_is_not_the_same_along_a_diagonal_reads_its_table_in_the_loop(
    recorded: list[Launch], operands: tuple[str, ...], in_loop: list[bool]
) -> None:
    bands = rehearse(recorded, operands=operands).of("band")
    assert [launch.options["IN_LOOP"] for launch in bands] == in_loop
