"""Tiled attention by the compiled C++ engine: prepares its tables and calls it.

The engine wants scores in base 2, tables by rising key position (so reversed), with room around
them for the tiles that stick out, and head dims that fill its vectors.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

from megatron.engines.pruning import DecayBounds, TileCount
from megatron.engines.tiling import Gradients, Inputs, Saved

__all__ = ["CompiledBackend"]

_LOG2E = math.log2(math.e)
_MARGIN = 64  # floats around a table that the engine may read, or write zeros to
_TASKS_PER_THREAD = 4


class _Rows(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("row", ctypes.c_int64),
    ]


class _Problem(ctypes.Structure):
    """Mirror of `struct Problem` in cpp/problem.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "heads", "q_len", "k_len", "dim")),
        *((name, ctypes.c_int64) for name in ("window", "threads", "parts")),
        ("scale", ctypes.c_float),
        ("prune_log2", ctypes.c_float),
        *((name, _Rows) for name in ("q", "k", "v", "out", "grad_out")),
        *((name, _Rows) for name in ("grad_q", "grad_k", "grad_v")),
        *((name, ctypes.c_void_p) for name in ("lse", "bias", "weight")),
        *((name, ctypes.c_void_p) for name in ("grad_bias", "grad_weight")),
        *((name, ctypes.c_void_p) for name in ("bias_after", "weight_after")),
        *((name, ctypes.c_int64) for name in ("table_row", "tiles", "tiles_visited")),
    ]


class CompiledBackend:
    """The C++ engine behind the interface that `tiled` expects."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._vector = int(library.attention_vector_length())
        assert library.attention_problem_size() == ctypes.sizeof(_Problem)

    def forward(self, inputs: Inputs, bounds: DecayBounds | None) -> tuple[Saved, TileCount]:
        call = _Call(inputs, bounds, self._vector)
        batch, heads, q_len, _ = inputs.q.shape
        out = _rows_apart(batch, heads, q_len, call.dim)
        lse = inputs.q.new_empty(batch, heads, q_len)
        call.set_rows("out", out)
        call.set_pointer("lse", lse)
        self._library.attention_forward(ctypes.byref(call.problem))
        tiles = TileCount(call.problem.tiles, call.problem.tiles_visited)
        return Saved(out[..., : inputs.q.shape[3]], lse), tiles

    def backward(
        self, inputs: Inputs, bounds: DecayBounds | None, saved: Saved, grad_out: Tensor
    ) -> Gradients:
        call = _Call(inputs, bounds, self._vector)
        problem, parts = call.problem, call.problem.parts
        batch, heads, q_len, dim = inputs.q.shape
        k_len = inputs.k.shape[2]
        call.set_rows("out", saved.out)
        call.set_rows("grad_out", grad_out)
        call.set_pointer("lse", saved.lse)
        grad_q = _rows_apart(parts * batch, heads, q_len, call.dim)
        grad_k = _rows_apart(batch, heads, k_len, call.dim)
        grad_v = _rows_apart(batch, heads, k_len, call.dim)
        for name, grad in (("grad_q", grad_q), ("grad_k", grad_k), ("grad_v", grad_v)):
            call.set_rows(name, grad)
        grad_bias = grad_weight = None
        if inputs.needs_bias_grad:
            grad_bias = call.set_table_gradient("grad_bias")
        if inputs.needs_weight_grad:
            grad_weight = call.set_table_gradient("grad_weight")
        self._library.attention_backward(ctypes.byref(problem))
        if parts > 1:
            grad_q = grad_q.view(parts, batch, heads, q_len, call.dim).sum(0)
        return Gradients(
            grad_q[..., :dim],
            grad_k[..., :dim],
            grad_v[..., :dim],
            _by_distance(grad_bias, k_len),
            _by_distance(grad_weight, k_len),
        )


class _Call:
    """The C struct of one call, and the tensors whose memory it points to."""

    def __init__(self, inputs: Inputs, bounds: DecayBounds | None, vector: int) -> None:
        batch, heads, q_len, dim = inputs.q.shape
        k_len = inputs.k.shape[2]
        self.dim = -(-dim // vector) * vector
        self._alive: list[Tensor] = []
        self.problem = problem = _Problem()
        problem.batch, problem.heads, problem.q_len, problem.k_len = batch, heads, q_len, k_len
        problem.dim = self.dim
        problem.window = k_len if inputs.window is None else inputs.window
        problem.threads = torch.get_num_threads()
        problem.parts = max(1, -(-_TASKS_PER_THREAD * problem.threads // (batch * heads)))
        problem.scale = inputs.scale * _LOG2E
        problem.table_row = k_len + 2 * _MARGIN
        for name, tensor in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v)):
            self.set_rows(name, tensor)
        self._set_tables(inputs, heads, k_len)
        if bounds is not None:
            self._set_bounds(bounds)

    def set_pointer(self, name: str, tensor: Tensor, offset: int = 0) -> None:
        self._alive.append(tensor)
        setattr(self.problem, name, tensor.data_ptr() + offset * tensor.element_size())

    def set_rows(self, name: str, tensor: Tensor) -> None:
        if tensor.shape[-1] != self.dim:
            tensor = torch.nn.functional.pad(tensor, (0, self.dim - tensor.shape[-1]))
        if tensor.stride(-1) != 1:
            tensor = tensor.contiguous()
        self._alive.append(tensor)
        setattr(self.problem, name, _Rows(tensor.data_ptr(), *tensor.stride()[:3]))

    def set_table_gradient(self, name: str) -> Tensor:
        problem = self.problem
        shape = (problem.parts * problem.batch, problem.heads, problem.table_row)
        grad = torch.zeros(shape, dtype=torch.float32)
        self.set_pointer(name, grad, _MARGIN)
        return grad

    def _set_tables(self, inputs: Inputs, heads: int, k_len: int) -> None:
        table = torch.full((heads, self.problem.table_row), -math.inf)
        visible = table[:, _MARGIN : _MARGIN + k_len]
        if inputs.bias is None:
            visible.zero_()
        else:
            torch.mul(inputs.bias[:, :k_len].flip(-1), _LOG2E, out=visible)
        if inputs.window is not None:
            visible[:, : k_len - inputs.window] = -math.inf
        self.set_pointer("bias", table, _MARGIN)
        if inputs.weight is not None:
            weight = torch.zeros_like(table)
            weight[:, _MARGIN : _MARGIN + k_len] = inputs.weight[:, :k_len].flip(-1)
            self.set_pointer("weight", weight, _MARGIN)

    def _set_bounds(self, bounds: DecayBounds) -> None:
        self.problem.prune_log2 = bounds.margin_log2
        self.set_pointer("bias_after", (bounds.bias_after * _LOG2E).contiguous())
        if bounds.weight_after is not None:
            self.set_pointer("weight_after", bounds.weight_after.contiguous())


def _rows_apart(batch: int, heads: int, length: int, dim: int) -> Tensor:
    """[B, H, L, D] in memory as [B, L, H, D], as the model's next reshape wants it."""
    return torch.empty(batch, length, heads, dim).transpose(1, 2)


def _by_distance(grad: Any, k_len: int) -> Tensor | None:
    if grad is None:
        return None
    total: Tensor = grad.sum(0)[:, _MARGIN : _MARGIN + k_len]
    return total.flip(-1)
