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

from megatron.engines.call import Call, Gradients, Made, key_origin, sink_rows
from megatron.engines.pruning import DecayBounds, TileCount

_LOG2E = math.log2(math.e)
_MARGIN = 64  # floats around a table that the engine may read, or write zeros to
_TASKS_PER_THREAD = 4
_GROUPED_TASKS_PER_THREAD = 2  # longer ones; and every part has its own gradient of q


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
        *((name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads")),
        *((name, ctypes.c_int64) for name in ("q_len", "k_len", "dim")),
        *((name, ctypes.c_int64) for name in ("window", "bf16", "threads", "parts")),
        ("scale", ctypes.c_float),
        ("prune_log2", ctypes.c_float),
        *((name, _Rows) for name in ("q", "k", "v", "out", "grad_out")),
        *((name, _Rows) for name in ("grad_q", "grad_k", "grad_v")),
        *((name, ctypes.c_void_p) for name in ("lse", "bias", "weight")),
        *((name, ctypes.c_void_p) for name in ("grad_bias", "grad_weight")),
        *((name, ctypes.c_void_p) for name in ("bias_after", "weight_after")),
        ("key_bias", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("key_batch", "key_head")),
        *((name, ctypes.c_void_p) for name in ("key_origin", "grad_key_bias")),
        *((name, ctypes.c_void_p) for name in ("sink", "grad_sink", "first_key")),
        *((name, ctypes.c_int64) for name in ("table_row", "tiles", "tiles_visited")),
    ]


class CompiledBackend:
    """The C++ engine behind the interface that `tiled` expects."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._vector = int(library.attention_vector_length())
        self._bf16 = bool(library.attention_has_bf16())
        assert library.attention_problem_size() == ctypes.sizeof(_Problem)

    def _readable(self, call: Call) -> Call:
        """In fp32; q, k and v in bf16 where that is what they are and the CPU multiplies it."""
        keeps = self._bf16 and call.q.dtype == torch.bfloat16
        return call.in_fp32(besides=("q", "k", "v") if keeps else ())

    def forward(self, call: Call, bounds: DecayBounds | None) -> tuple[Made, TileCount]:
        call = self._readable(call)
        batch, heads, q_len, dim = call.q.shape
        job = _Job(call, bounds, self._vector, batch * heads)
        out = _rows_apart(batch, heads, q_len, job.dim)
        lse = torch.empty(batch, heads, q_len)
        job.set_rows("out", out)
        job.set_pointer("lse", lse)
        self._library.attention_forward(ctypes.byref(job.problem))
        tiles = TileCount(job.problem.tiles, job.problem.tiles_visited)
        return Made(out[..., :dim], lse), tiles

    def backward(
        self, call: Call, bounds: DecayBounds | None, made: Made, grad: Tensor, wanted: set[str]
    ) -> Gradients:
        call = self._readable(call)
        batch, heads, q_len, dim = call.q.shape
        kv_heads = call.k.shape[1]
        job = _Job(call, bounds, self._vector, batch * kv_heads)
        parts = job.problem.parts
        job.set_rows("out", made.out.to(call.q.dtype))
        job.set_rows("grad_out", grad.to(call.q.dtype))
        job.set_pointer("lse", made.lse)
        grad_q = _rows_apart(parts * batch, heads, q_len, job.dim)
        grad_k = _rows_apart(batch, kv_heads, call.k_len, job.dim)
        grad_v = _rows_apart(batch, kv_heads, call.k_len, job.dim)
        for name, rows in (("grad_q", grad_q), ("grad_k", grad_k), ("grad_v", grad_v)):
            job.set_rows(name, rows)
        grad_bias = job.set_table_gradient("grad_bias") if "bias" in wanted else None
        grad_weight = job.set_table_gradient("grad_weight") if "weight" in wanted else None
        grad_key_bias = job.set_gradient("key_bias", call.k_len) if "key_bias" in wanted else None
        grad_sink = job.set_gradient("sink", q_len) if "sink" in wanted else None
        self._library.attention_backward(ctypes.byref(job.problem))
        if parts > 1:
            grad_q = grad_q.view(parts, batch, heads, q_len, job.dim).sum(0)
        return Gradients(
            grad_q[..., :dim],
            grad_k[..., :dim],
            grad_v[..., :dim],
            _by_distance(grad_bias, call.k_len),
            _by_distance(grad_weight, call.k_len),
            grad_key_bias,
            sink=grad_sink,
        )


class _Job:
    """A call as C++ sees it: the struct, and the tensors whose memory it points to."""

    def __init__(self, call: Call, bounds: DecayBounds | None, vector: int, pairs: int) -> None:
        batch, heads, q_len, dim = call.q.shape
        k_len = call.k_len
        self.dim = -(-dim // vector) * vector
        self._alive: list[Tensor] = []
        self.problem = problem = _Problem()
        problem.batch, problem.heads, problem.kv_heads = batch, heads, call.k.shape[1]
        problem.q_len, problem.k_len = q_len, k_len
        problem.dim = self.dim
        problem.window = call.reach
        problem.bf16 = call.q.dtype == torch.bfloat16
        problem.threads = torch.get_num_threads()
        problem.parts = _parts(problem.threads, pairs, call.heads_per_key_head > 1)
        problem.scale = call.scale * _LOG2E
        problem.table_row = k_len + 2 * _MARGIN
        for name, tensor in (("q", call.q), ("k", call.k), ("v", call.v)):
            self.set_rows(name, tensor)
        self._set_tables(call, heads, k_len)
        self._set_terms(call)
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

    def set_gradient(self, name: str, length: int) -> Tensor:
        grad = torch.empty(self.problem.batch, self.problem.heads, length)
        self.set_pointer(f"grad_{name}", grad)
        return grad

    def set_table_gradient(self, name: str) -> Tensor:
        problem = self.problem
        shape = (problem.parts * problem.batch, problem.heads, problem.table_row)
        grad = torch.zeros(shape, dtype=torch.float32)
        self.set_pointer(name, grad, _MARGIN)
        return grad

    def _set_tables(self, call: Call, heads: int, k_len: int) -> None:
        table = torch.full((heads, self.problem.table_row), -math.inf)
        visible = table[:, _MARGIN : _MARGIN + k_len]
        if call.bias is None:
            visible.zero_()
        else:
            torch.mul(call.bias[:, :k_len].flip(-1), _LOG2E, out=visible)
        if call.window is not None:
            visible[:, : k_len - call.window] = -math.inf
        self.set_pointer("bias", table, _MARGIN)
        if call.weight is not None:
            weight = torch.zeros_like(table)
            weight[:, _MARGIN : _MARGIN + k_len] = call.weight[:, :k_len].flip(-1)
            self.set_pointer("weight", weight, _MARGIN)

    def _set_terms(self, call: Call) -> None:
        if call.key_bias is not None:
            padded = torch.nn.functional.pad(call.key_bias, (0, _MARGIN)).contiguous()
            self.set_pointer("key_bias", padded)
            self.problem.key_batch, self.problem.key_head = (
                padded.stride(i) if padded.shape[i] > 1 else 0 for i in (0, 1)
            )
            origin = key_origin(call.key_bias, call.q_len)
            rows = origin.expand(call.q.shape[:3]).reshape(-1)
            self.set_pointer("key_origin", torch.nn.functional.pad(rows, (0, _MARGIN)))
        sink = sink_rows(call)
        if sink is not None:
            self.set_pointer("sink", (sink * _LOG2E).contiguous())
        if call.first_key is not None:
            self.set_pointer("first_key", call.first_key.to(torch.int64).contiguous())

    def _set_bounds(self, bounds: DecayBounds) -> None:
        self.problem.prune_log2 = bounds.margin_log2
        self.set_pointer("bias_after", (bounds.bias_after * _LOG2E).contiguous())
        if bounds.weight_after is not None:
            self.set_pointer("weight_after", bounds.weight_after.contiguous())


def _parts(threads: int, pairs: int, grouped: bool) -> int:
    """Into how many tasks to split a pair, so that no thread is idle for long."""
    if threads == 1:
        return 1
    tasks = threads * (_GROUPED_TASKS_PER_THREAD if grouped else _TASKS_PER_THREAD)
    return max(1, -(-tasks // pairs))


def _rows_apart(batch: int, heads: int, length: int, dim: int) -> Tensor:
    """[B, H, L, D] in memory as [B, L, H, D], as the model's next reshape wants it."""
    return torch.empty(batch, length, heads, dim).transpose(1, 2)


def _by_distance(grad: Any, k_len: int) -> Tensor | None:
    if grad is None:
        return None
    total: Tensor = grad.sum(0)[:, _MARGIN : _MARGIN + k_len]
    return total.flip(-1)
