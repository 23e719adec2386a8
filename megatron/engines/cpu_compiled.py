"""Tiled attention by the compiled C++ engine: lays out its operands and calls it.

The engine expects scores in base 2, tables by rising key position (so reversed) with padding for
tiles that cross an edge, and head dims that are multiples of its vector length.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.engines.call import Call, empty_blhd, key_origin, sink_rows
from megatron.engines.dropout import kept_scale, row_keys, threshold
from megatron.engines.pruning import DecayBounds, TileCount

_LOG2E = math.log2(math.e)
# The engine's own buffers, independent of torch.set_default_dtype and set_default_device.
_FP32: Any = {"dtype": torch.float32, "device": torch.device("cpu")}
_FEATURE_MARGIN = 128  # padding around the distances of features, for tiles that cross an edge
_MARGIN = 64  # floats of padding around a table, which the engine may read or set to zero
_TASKS_PER_THREAD = 4
_GROUPED_TASKS_PER_THREAD = 2  # grouped tasks are longer, and each needs its own gradient of q


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class _Rows(ctypes.Structure):
    _fields_ = _fields(ctypes.c_void_p, "data") + _fields(ctypes.c_int64, "batch head row")


class _Problem(ctypes.Structure):
    """Mirror of `struct Problem` in cpp/problem.h."""

    _fields_ = [
        *_fields(ctypes.c_int64, "batch heads kv_heads q_len k_len dim window bf16 threads parts"),
        *_fields(ctypes.c_float, "scale prune_log2"),
        *_fields(_Rows, "q k v out grad_out grad_q grad_k grad_v"),
        *_fields(ctypes.c_void_p, "lse bias weight grad_bias grad_weight bias_after weight_after"),
        *_fields(ctypes.c_void_p, "key_bias"),
        *_fields(ctypes.c_int64, "key_batch key_head"),
        *_fields(ctypes.c_void_p, "key_origin grad_key_bias sink grad_sink first_key"),
        *_fields(ctypes.c_int64, "table_row rank extent"),
        *_fields(ctypes.c_void_p, "query_features distance_features distance_across"),
        *_fields(ctypes.c_int64, "feature_head feature_row"),
        *_fields(ctypes.c_void_p, "grad_query_features grad_distance_features"),
        *_fields(ctypes.c_void_p, "row_scale grad_row_scale row_keys"),
        *_fields(ctypes.c_int64, "drop_below"),
        *_fields(ctypes.c_float, "kept_scale"),
        *_fields(ctypes.c_int64, "tiles tiles_visited"),
    ]


class CompiledBackend:
    """The C++ engine behind the interface of `TorchBackend`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._vector = int(library.attention_vector_length())
        self._bf16 = bool(library.attention_has_bf16())
        assert library.attention_problem_size() == ctypes.sizeof(_Problem)

    def _readable(self, call: Call) -> Call:
        """In fp32; q, k and v stay bf16 if the CPU has bf16 dot products."""
        keeps = self._bf16 and call.q.dtype == torch.bfloat16
        return call.in_fp32(besides=("q", "k", "v") if keeps else ())

    def forward(self, call: Call, bounds: DecayBounds | None) -> tuple[Tensor, Tensor, TileCount]:
        dtype, call = call.q.dtype, self._readable(call)
        batch, heads, q_len, dim = call.q.shape
        job = _Job(call, bounds, self._vector, batch * heads)
        out = job.set_new_rows("out", batch, heads, q_len)
        lse = torch.empty(batch, heads, q_len, **_FP32)
        job.set_pointer("lse", lse)
        self._library.attention_forward(ctypes.byref(job.problem))
        tiles = TileCount(job.problem.tiles, job.problem.tiles_visited)
        return out[..., :dim].to(dtype), lse, tiles

    def backward(
        self, call: Call, bounds: DecayBounds | None, made: Sequence[Tensor], wanted: set[str]
    ) -> dict[str, Tensor]:
        call = self._readable(call)
        batch, heads, q_len, dim = call.q.shape
        kv_heads = call.k.shape[1]
        job = _Job(call, bounds, self._vector, batch * kv_heads)
        parts = job.problem.parts
        out, lse, grad = made
        job.set_rows("out", out.to(call.q.dtype))
        job.set_rows("grad_out", grad.to(call.q.dtype))
        job.set_pointer("lse", lse)
        rows = {"q": job.set_new_rows("grad_q", parts * batch, heads, q_len)}
        rows |= {x: job.set_new_rows(f"grad_{x}", batch, kv_heads, call.k_len) for x in "kv"}
        lengths = {"key_bias": call.k_len, "sink": q_len}
        has_origin = call.sink is not None and "row_scale" in wanted
        asked = wanted | {"sink"} if has_origin else wanted
        terms = {x: job.set_gradient(x, batch, n) for x, n in lengths.items() if x in asked}
        table = (parts * batch, job.problem.table_row, _MARGIN)
        tables = {x: job.set_gradient(x, *table) for x in ("bias", "weight") if x in wanted}
        by_row = job.set_row_gradients(parts * batch, wanted)
        self._library.attention_backward(ctypes.byref(job.problem))
        if parts > 1:
            rows["q"] = rows["q"].view(parts, batch, heads, q_len, job.dim).sum(0)
        visible = slice(_MARGIN, _MARGIN + call.k_len)
        by_distance = {name: x.sum(0)[:, visible].flip(-1) for name, x in tables.items()}
        terms |= job.row_gradients(call, by_row)
        if has_origin and call.key_bias is not None:
            # the engine's scores do not include the key origin
            terms["row_scale"] -= key_origin(call.key_bias, q_len) * terms["sink"]
        return {name: x[..., :dim] for name, x in rows.items()} | terms | by_distance


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
        self._set_features(call, vector)
        problem.kept_scale = 1.0
        if call.dropout > 0.0:
            problem.kept_scale = kept_scale(call.dropout)
            problem.drop_below = threshold(call.dropout)
            rows = row_keys(call).flatten()
            self.set_pointer("row_keys", torch.nn.functional.pad(rows, (0, _MARGIN)))
        if bounds is not None:
            problem.prune_log2 = bounds.margin_log2
            self.set_pointer("bias_after", (bounds.bias_after * _LOG2E).contiguous())
            if bounds.weight_after is not None:
                self.set_pointer("weight_after", bounds.weight_after.contiguous())

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

    def set_new_rows(self, name: str, batch: int, heads: int, length: int) -> Tensor:
        rows = empty_blhd((batch, heads, length, self.dim), **_FP32)
        self.set_rows(name, rows)
        return rows

    def set_gradient(self, name: str, batch: int, length: int, margin: int = 0) -> Tensor:
        grad = torch.zeros(batch, self.problem.heads, length, **_FP32)
        self.set_pointer(f"grad_{name}", grad, margin)
        return grad

    def _set_tables(self, call: Call, heads: int, k_len: int) -> None:
        table = torch.full((heads, self.problem.table_row), -math.inf, **_FP32)
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
        if call.row_scale is not None:
            self.set_pointer("row_scale", call.row_scale.expand(call.q.shape[:3]).contiguous())

    def _set_features(self, call: Call, vector: int) -> None:
        features, table = call.query_features, call.distance_features
        if features is None or table is None:
            return
        missing = -features.shape[-1] % vector
        extent = min(table.shape[-1], call.k_len)
        problem = self.problem
        problem.rank, problem.extent = features.shape[-1] + missing, extent
        problem.feature_row = extent + 2 * _FEATURE_MARGIN
        problem.feature_head = problem.rank * problem.feature_row if table.shape[0] > 1 else 0
        padded = torch.nn.functional.pad(features * _LOG2E, (0, missing))
        self.set_pointer("query_features", padded.contiguous())
        margins = (_FEATURE_MARGIN, _FEATURE_MARGIN, 0, missing)
        reversed_ = torch.nn.functional.pad(table[..., :extent].flip(-1), margins)
        self.set_pointer("distance_features", reversed_, self._feature_start)
        across = reversed_.mT.contiguous()
        self.set_pointer("distance_across", across, self._feature_start * problem.rank)

    @property
    def _feature_start(self) -> int:
        """Where distance k_len - 1 would be in a row of distance features."""
        return _FEATURE_MARGIN - (self.problem.k_len - self.problem.extent)

    def set_row_gradients(self, shares: int, wanted: set[str]) -> dict[str, Tensor]:
        """Allocate gradients of features and row_scale: partial sums, one set per share."""
        problem, found = self.problem, {}
        if wanted & {"query_features", "distance_features"}:
            length = problem.q_len * problem.rank
            found["query_features"] = self.set_gradient("query_features", shares, length)
        if "distance_features" in wanted:
            length, start = problem.feature_row * problem.rank, self._feature_start * problem.rank
            found["distance_features"] = self.set_gradient(
                "distance_features", shares, length, start
            )
        if "row_scale" in wanted:
            found["row_scale"] = self.set_gradient("row_scale", shares, problem.q_len)
        return found

    def row_gradients(self, call: Call, by_row: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those gradients in their operands' shapes, the partial sums added in a fixed order."""
        problem, found = self.problem, {}
        sums = {name: x.unflatten(0, (-1, problem.batch)).sum(0) for name, x in by_row.items()}
        if call.query_features is not None and "query_features" in sums:
            count = call.query_features.shape[-1]
            rows = sums["query_features"].unflatten(-1, (-1, problem.rank))
            found["query_features"] = rows[..., :count]
        if call.distance_features is not None and "distance_features" in sums:
            count = call.distance_features.shape[1]
            table = sums["distance_features"].sum(0).unflatten(-1, (-1, problem.rank))
            seen = slice(_FEATURE_MARGIN, _FEATURE_MARGIN + problem.extent)
            found["distance_features"] = table[:, seen, :count].flip(1).mT / _LOG2E
        if "row_scale" in sums:
            found["row_scale"] = sums["row_scale"]
        return found


def _parts(threads: int, pairs: int, grouped: bool) -> int:
    """Into how many tasks to split a pair, so that no thread is idle for long."""
    if threads == 1:
        return 1
    tasks = threads * (_GROUPED_TASKS_PER_THREAD if grouped else _TASKS_PER_THREAD)
    return max(1, -(-tasks // pairs))
