"""One attention call: its tensors and options, and the checks that every engine relies on.

Shapes: B batch, H heads (of q), L length (q: Lq, k and v: Lk), D head dim.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron.errors import EngineError

# The tensors of a call: its first fields, in the order in which engines pass them to autograd.
OPERANDS = (
    *("q", "k", "v", "bias", "weight", "key_bias", "first_key", "sink"),
    *("query_features", "distance_features", "row_scale", "seed"),
)
MAX_FEATURES = 64
MANY_HEADS = 128  # more than these, and fewer keys: lengths and heads are probably swapped


@dataclass(frozen=True)
class Call:
    """A checked attention call. Shapes and meaning as in `attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    weight: Tensor | None = None
    key_bias: Tensor | None = None
    first_key: Tensor | None = None
    sink: Tensor | None = None
    query_features: Tensor | None = None
    distance_features: Tensor | None = None
    row_scale: Tensor | None = None
    seed: Tensor | None = None  # of the dropout: one integer
    window: int | None = None  # None where it would hide nothing
    scale: float = 1.0
    dropout: float = 0.0
    pruning: bool = True

    @property
    def heads_per_key_head(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    @property
    def q_len(self) -> int:
        return self.q.shape[2]

    @property
    def k_len(self) -> int:
        return self.k.shape[2]

    @property
    def offset(self) -> int:
        """Position of the first query."""
        return self.k_len - self.q_len

    @property
    def reach(self) -> int:
        """How many of the nearest keys a query may see: the window, or all."""
        return self.k_len if self.window is None else self.window

    def operands(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, name) for name in OPERANDS)

    def in_fp32(self, besides: Sequence[str] = ()) -> Call:
        """The same call with detached tensors, in fp32 except those named in `besides`."""
        changed: dict[str, Any] = {}
        for name, x in zip(OPERANDS, self.operands(), strict=True):
            if x is not None:
                stays = name in besides or not x.is_floating_point()
                changed[name] = x.detach() if stays else x.detach().float()
        return replace(self, **changed)

    def match_operands(self, gradients: Mapping[str, Tensor | None]) -> list[Tensor | None]:
        """Gradients in the operands' order, dtypes and shapes.

        An engine computes them without broadcasting: tables over the distances 0 .. Lk-1, key_bias
        [B, H, Lk], sink [B, H, Lq].
        """
        operands = zip(OPERANDS, self.operands(), strict=True)
        return [match_operand(gradients.get(name), x) for name, x in operands]


def match_operand(grad: Tensor | None, operand: Tensor | None) -> Tensor | None:
    """The gradient in the operand's dtype and shape: padded to a longer table, or summed."""
    if grad is None or operand is None:
        return None
    if operand.dim() == 1:  # a sink per head, from [B, H, Lq]
        grad = grad.sum((0, 2))
    elif (unseen := operand.shape[-1] - grad.shape[-1]) > 0:  # distances beyond the keys
        grad = torch.nn.functional.pad(grad, (0, unseen))
    return grad.sum_to_size(operand.shape).to(operand.dtype)


def empty_blhd(
    shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    """An empty [B, H, L, D] tensor in memory order B, L, H, D, so that merging heads is a view."""
    batch, heads, length, dim = shape
    return torch.empty(batch, length, heads, dim, dtype=dtype, device=device).transpose(1, 2)


def key_origin(key_bias: Tensor, q_len: int) -> Tensor:
    """What to subtract from a query's key biases before they are added, [.., Lq].

    A softmax is invariant to it, rounding is not: cumulative gates reach 10^4, where fp32 has three
    decimals left. It is the bias of the query's own key, or of the nearest earlier key whose bias
    is finite (padding has -inf), or 0 if there is none.
    """
    position = torch.arange(key_bias.shape[-1], device=key_bias.device)
    latest = torch.where(key_bias.isfinite(), position, -1).cummax(-1).values[..., -q_len:]
    found = key_bias.gather(-1, latest.clamp(min=0))
    return found.masked_fill(latest < 0, 0.0).detach()


def sink_rows(call: Call) -> Tensor | None:
    """The sink of every query less its key origin, [B, H, Lq]; None without a sink. No autograd."""
    if call.sink is None:
        return None
    rows = call.sink[:, None] if call.sink.dim() == 1 else call.sink
    if call.key_bias is not None:
        origin = key_origin(call.key_bias, call.q_len)
        rows = rows - (origin if call.row_scale is None else origin * call.row_scale)
    return rows.expand(call.q.shape[:3])


def checked_call(*tensors: Any, scale: float | None = None, **options: Any) -> Call:
    """The call of `attention`'s arguments; `EngineError` with the fix if they do not fit."""
    call = Call(*tensors, **options)
    _check_qkv(call.q, call.k, call.v)
    _check_terms(call)
    _check_features(call)
    if call.k_len < call.q.shape[1] > MANY_HEADS:
        warnings.warn(
            f"attention: {call.q.shape[1]} heads and {call.k_len} keys. q, k, v are "
            "[batch, heads, length, head_dim]; from [batch, length, heads, head_dim] give "
            "q.transpose(1, 2) and so on",
            stacklevel=3,
        )
    if not torch.compiler.is_compiling():
        check_values(call)
    if call.window is not None and (isinstance(call.window, float) or call.window < 1):
        raise EngineError(
            f"window={call.window}: must be a whole number, at least 1, so that a query sees itself"
        )
    if not 0.0 <= call.dropout < 1.0:
        raise EngineError(f"dropout={call.dropout}: must be at least 0 and below 1")
    if call.seed is not None and (call.seed.numel() != 1 or call.seed.is_floating_point()):
        raise EngineError(
            f"seed must be one integer; got {call.seed.dtype} of shape {tuple(call.seed.shape)}"
        )
    if isinstance(scale, Tensor) and scale.requires_grad:
        raise EngineError(
            "scale requires a gradient, and none is computed: multiply q by it, and give scale=1"
        )
    scale = 1.0 / math.sqrt(call.q.shape[-1]) if scale is None else float(scale)
    if not math.isfinite(scale):
        raise EngineError(f"scale={scale}: must be a finite number")
    hides_nothing = call.window is not None and call.window >= call.k_len
    return replace(call, scale=scale, window=None if hides_nothing else call.window)


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise EngineError(
                f"{name} must be a torch tensor; got {type(x).__name__} (torch.as_tensor makes one)"
            )
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise EngineError(f"q, k, v must be [batch, heads, length, head_dim]; got {shapes}")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise EngineError(
            f"q, k, v must agree in batch and head_dim, and k, v in heads and length; got {shapes}"
        )
    if 0 in q.shape or 0 in k.shape:
        raise EngineError(f"q, k, v must not be empty; got {shapes}")
    if q.shape[1] % k.shape[1] != 0:
        raise EngineError(
            f"the heads of k and v must divide those of q, {q.shape[1]}; got {shapes}, taken as "
            "[batch, heads, length, head_dim]"
        )
    if q.shape[2] > k.shape[2]:
        raise EngineError(
            f"more queries than keys ({shapes}, taken as [batch, heads, length, head_dim]): the "
            "queries are the last positions, so k and v must hold at least as many"
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise EngineError(
            f"q, k, v must share one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if not q.device == k.device == v.device:
        raise EngineError(f"q, k, v must be on one device; got {q.device}, {k.device}, {v.device}")


def _check_terms(call: Call) -> None:
    q, k_len, first_key = call.q, call.k_len, call.first_key
    batch, heads, q_len, _ = q.shape
    for name in OPERANDS[3:]:
        if name in ("first_key", "seed"):
            continue
        x = getattr(call, name)
        if x is not None and not isinstance(x, Tensor):
            raise EngineError(
                f"{name} must be a tensor; got {type(x).__name__}: of a kernel's tables give "
                "tables.bias and tables.weight"
            )
        if x is not None and not (x.is_floating_point() and x.device == q.device):
            raise EngineError(
                f"{name} must be floating and on {q.device}; got {x.dtype} on {x.device}"
            )
    for name, table in (("bias", call.bias), ("weight", call.weight)):
        if table is None:
            continue
        if table.dim() != 2 or table.shape[0] != heads or table.shape[1] < k_len:
            if table.dim() == 2 and table.shape[0] == q_len and table.shape[1] >= heads:
                raise EngineError(
                    f"q has {heads} heads and {q_len} queries, {name} has {table.shape[0]} heads: "
                    "q, k, v look like [batch, length, heads, head_dim]; give q.transpose(1, 2) "
                    "and so on, [batch, heads, length, head_dim]"
                )
            raise EngineError(
                f"{name} must be a table [heads={heads}, at least {k_len} distances]; got"
                f" {tuple(table.shape)}: compute it for these heads and the length of the keys"
            )
    for name, what, length in (("key_bias", "keys", k_len), ("row_scale", "queries", q_len)):
        x = getattr(call, name)
        shapes = [(b, h, length) for b in (1, batch) for h in (1, heads)]
        if x is not None and tuple(x.shape) not in shapes:
            raise EngineError(
                f"{name} must be [batch={batch} or 1, heads={heads} or 1, {what}={length}]; got"
                f" {tuple(x.shape)}"
            )
    if call.sink is not None and tuple(call.sink.shape) not in ((heads,), (batch, heads, q_len)):
        raise EngineError(
            f"sink must be [heads={heads}] or [batch={batch}, heads={heads}, queries={q_len}];"
            f" got {tuple(call.sink.shape)}"
        )
    if first_key is not None:
        if not isinstance(first_key, Tensor):
            raise EngineError(f"first_key must be a tensor; got {type(first_key).__name__}")
        if first_key.dtype not in (torch.int32, torch.int64) or first_key.device != q.device:
            raise EngineError(
                f"first_key must hold int32 or int64 on {q.device}; got {first_key.dtype} on"
                f" {first_key.device}"
            )
        if tuple(first_key.shape) != (batch, q_len):
            raise EngineError(
                f"first_key must be [batch={batch}, queries={q_len}]; got {tuple(first_key.shape)}"
            )


def _check_features(call: Call) -> None:
    features, table = call.query_features, call.distance_features
    if features is None and table is None:
        return
    if features is None or table is None:
        given, lacking = ("query_features", "distance_features")[:: 1 if table is None else -1]
        raise EngineError(f"{given} is given without {lacking}: the term is their product")
    batch, heads, q_len, _ = call.q.shape
    if features.dim() != 4 or features.shape[:3] != call.q.shape[:3]:
        raise EngineError(
            f"query_features must be [batch={batch}, heads={heads}, queries={q_len}, features];"
            f" got {tuple(features.shape)}"
        )
    count = features.shape[3]
    if not 1 <= count <= MAX_FEATURES:
        raise EngineError(f"query_features has {count} features: must be 1 to {MAX_FEATURES}")
    if table.dim() != 3 or table.shape[0] not in (1, heads) or table.shape[1] != count:
        raise EngineError(
            f"distance_features must be [heads={heads} or 1, features={count}, distances]; got"
            f" {tuple(table.shape)}"
        )


def check_values(call: Call) -> None:
    """Check the values of first_key and row_scale; on CPU only, where that needs no device sync."""
    first, scale = call.first_key, call.row_scale
    if call.q.device.type != "cpu":
        return
    if scale is not None and not bool(((scale > 0) & scale.isfinite()).all()):
        least, largest = (float(x) for x in scale.detach().aminmax())
        raise EngineError(
            f"row_scale must be positive and finite; its values are {least:g} to {largest:g}: a"
            " score times 0 or less would unmask hidden keys"
        )
    if first is None:
        return
    own = torch.arange(call.offset, call.k_len)
    if (first < 0).any() or (first > own).any() or (first.diff(dim=-1) < 0).any():
        raise EngineError(
            "first_key must rise (or stay) from query to query, from 0 at least to the query's own"
            " position at most: the keys of a query are those from its first_key to its own"
        )
