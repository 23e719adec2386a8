"""Tiled attention in plain PyTorch, for machines without a C++ compiler.

Blocks of queries against all keys before them. The bias of a block is a view of the reversed table
(see `distance`), whose rows run from the last query to the first: q, out and grad_out are flipped
once for that. Forward: torch's own CPU flash operator takes the view as its mask. Backward: five
matrix products a block, in buffers that are used again, a few heads at a time so that a block's
scores stay in cache.

Pruned heads see a window of their own; heads of similar windows go together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.engines.call import Call, Gradients
from megatron.engines.distance import flipped_view, reversed_table
from megatron.engines.pruning import DecayBounds, TileCount, head_windows

__all__ = ["TorchBackend"]

_FORWARD_ROWS = 256
_ROWS = 128
_HEADS = 4
_PRUNED_HEADS = 2
_TILE = 128  # unit in which visited scores are counted


@dataclass(frozen=True)
class _Group:
    """Heads that are computed together, and how many of the nearest keys they see."""

    heads: Tensor
    window: int


@dataclass(frozen=True)
class _Block:
    """Queries [start, stop) against keys [first, last): slices of the flipped queries and keys."""

    queries: slice
    keys: slice
    table_start: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start


def _blocks(q_len: int, k_len: int, window: int, rows: int) -> list[_Block]:
    blocks = []
    for start in range(0, q_len, rows):
        stop = min(q_len, start + rows)
        offset = k_len - q_len
        first = max(0, offset + start - window + 1)
        flipped = slice(q_len - stop, q_len - start)
        blocks.append(_Block(flipped, slice(first, offset + stop), q_len - stop + first))
    return blocks


def _groups(call: Call, bounds: DecayBounds | None, size: int) -> list[_Group]:
    heads = call.q.shape[1]
    if bounds is None:
        order, windows = list(range(heads)), [call.reach] * heads
    else:
        windows = [min(call.reach, window) for window in head_windows(call, bounds).tolist()]
        order = sorted(range(heads), key=windows.__getitem__)
        size = _PRUNED_HEADS
    return [
        _Group(torch.tensor(order[i : i + size]), max(windows[h] for h in order[i : i + size]))
        for i in range(0, heads, size)
    ]


class TorchBackend:
    """Tiled attention out of torch operations only."""

    def forward(self, call: Call, bounds: DecayBounds | None) -> tuple[Tensor, Tensor, TileCount]:
        q_len, k_len = call.q.shape[2], call.k.shape[2]
        bias, weight = _tables(call, _FORWARD_ROWS)
        out = torch.empty_like(call.q)
        lse = call.q.new_empty(call.q.shape[:3])
        heads_at_once = call.q.shape[1] if weight is None else _HEADS
        visited = total = 0
        for group in _groups(call, bounds, heads_at_once):
            part = _Heads(call, bias, weight, group.heads)
            group_out, group_lse = torch.empty_like(part.q), part.q.new_empty(part.q.shape[:3])
            for block in _blocks(q_len, k_len, group.window, _FORWARD_ROWS):
                group_out[:, :, block.queries], group_lse[:, :, block.queries] = part.forward(block)
            out[:, group.heads] = group_out.flip(2)
            lse[:, group.heads] = group_lse.flip(2)
            visited += len(group.heads) * _count_tiles(q_len, k_len, group.window)
        total = call.q.shape[1] * _count_tiles(q_len, k_len, call.reach)
        return out, lse, TileCount(total, visited)

    def backward(
        self,
        call: Call,
        bounds: DecayBounds | None,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        wanted: frozenset[str],
    ) -> Gradients:
        q_len, k_len = call.q.shape[2], call.k.shape[2]
        bias, weight = _tables(call, _ROWS)
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (call.q, call.k, call.v))
        grad_bias = torch.zeros_like(bias) if "bias" in wanted else None
        grad_weight = torch.zeros_like(bias) if "weight" in wanted else None
        for group in _groups(call, bounds, _HEADS):
            part = _Heads(call, bias, weight, group.heads)
            rows = [x[:, group.heads].flip(2) for x in (out, grad_out, lse)]
            blocks = _blocks(q_len, k_len, group.window, _ROWS)
            for b in range(call.q.shape[0]):
                walk = _Backward(part, b, blocks, *(x[b] for x in rows))
                walk.run(blocks, grad_bias is not None, grad_weight is not None)
                grad_q[b, group.heads] = walk.grad_q.flip(1).mul_(call.scale)
                grad_k[b, group.heads], grad_v[b, group.heads] = walk.grad_k, walk.grad_v
                if grad_bias is not None:
                    grad_bias[group.heads] += walk.grad_bias
                if grad_weight is not None:
                    grad_weight[group.heads] += walk.grad_weight
        return Gradients(
            grad_q, grad_k, grad_v, _by_distance(grad_bias, k_len), _by_distance(grad_weight, k_len)
        )


def _count_tiles(q_len: int, k_len: int, window: int) -> int:
    blocks = _blocks(q_len, k_len, window, _TILE)
    return sum(-(-block.shape[1] // _TILE) for block in blocks)


def _by_distance(grad: Tensor | None, k_len: int) -> Tensor | None:
    return None if grad is None else grad[:, :k_len].flip(-1)


def _tables(call: Call, rows: int) -> tuple[Tensor, Tensor | None]:
    """Both tables reversed, with room for `rows` queries; the bias hides what is not visible."""
    heads, k_len = call.q.shape[1], call.k.shape[2]
    bias = call.q.new_zeros(heads, k_len) if call.bias is None else call.bias
    reversed_bias = reversed_table(bias, k_len, rows, -math.inf)
    if call.window is not None:
        reversed_bias[:, : k_len - call.window] = -math.inf
    if call.weight is None:
        return reversed_bias, None
    return reversed_bias, reversed_table(call.weight, k_len, rows, 0.0)


class _Heads:
    """The tensors of a few heads: flipped, scaled queries; keys, values, tables."""

    def __init__(self, call: Call, bias: Tensor, weight: Tensor | None, heads: Tensor) -> None:
        self.q = call.q[:, heads].flip(2).mul_(call.scale)
        self.k, self.v = call.k[:, heads], call.v[:, heads]
        self.bias = bias[heads]
        self.weight = None if weight is None else weight[heads]

    def forward(self, block: _Block) -> tuple[Tensor, Tensor]:
        q, k, v = self.q[:, :, block.queries], self.k[:, :, block.keys], self.v[:, :, block.keys]
        mask = flipped_view(self.bias, block.table_start, *block.shape)
        if self.weight is None:
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, False, attn_mask=mask.expand(len(q), -1, -1, -1), scale=1.0
            )
        scores = q @ k.transpose(-2, -1)
        scores.mul_(flipped_view(self.weight, block.table_start, *block.shape)).add_(mask)
        lse = scores.logsumexp(-1, keepdim=True)
        return scores.sub_(lse).exp_() @ v, lse[..., 0]


class _Backward:
    """The backward of a few heads of one sequence; the buffers serve all blocks."""

    def __init__(
        self, part: _Heads, b: int, blocks: list[_Block], out: Tensor, grad: Tensor, lse: Tensor
    ) -> None:
        self.q, self.k, self.v = part.q[b], part.k[b], part.v[b]
        self.bias, self.weight = part.bias, part.weight
        self.grad_out = grad
        self.lse = lse[..., None]
        self.negative_delta = (out * grad).sum(-1, keepdim=True).neg_()
        self.grad_q = torch.empty_like(self.q)
        self.grad_k, self.grad_v = torch.zeros_like(self.k), torch.zeros_like(self.v)
        self.grad_bias = torch.zeros_like(self.bias)
        self.grad_weight = torch.zeros_like(self.bias)
        size = len(self.q) * max(rows * (rows + cols) for rows, cols in (x.shape for x in blocks))
        self._probs, self._grads = self.q.new_empty(size), self.q.new_empty(size)

    def run(self, blocks: list[_Block], bias_wanted: bool, weight_wanted: bool) -> None:
        for block in blocks:
            self._step(block, bias_wanted, weight_wanted)

    def _step(self, block: _Block, bias_wanted: bool, weight_wanted: bool) -> None:
        rows, cols = block.shape
        heads = len(self.q)
        q, grad_out = self.q[:, block.queries], self.grad_out[:, block.queries]
        k, v = self.k[:, block.keys], self.v[:, block.keys]
        probs = self._probs[: heads * rows * cols].view(heads, rows, cols)
        scores = self._fill_probs(probs, q, k, block)
        # Rows are `rows` zeros longer than the block: read one narrower, diagonals are columns.
        padded = self._grads[: heads * rows * (rows + cols)].view(heads, rows, rows + cols)
        padded[:, :, cols:] = 0.0
        grads = padded[:, :, :cols]
        grads.copy_(self.negative_delta[:, block.queries].expand_as(grads))
        grads.baddbmm_(grad_out, v.transpose(1, 2)).mul_(probs)
        self.grad_v[:, block.keys].baddbmm_(probs.transpose(1, 2), grad_out)
        if bias_wanted:
            self._add_diagonals(self.grad_bias, padded, block)
        if self.weight is not None and scores is not None:
            plain = grads * scores if weight_wanted else None
            grads.mul_(flipped_view(self.weight, block.table_start, rows, cols))
        self.grad_k[:, block.keys].baddbmm_(grads.transpose(1, 2), q)
        torch.bmm(grads, k, out=self.grad_q[:, block.queries])
        if self.weight is not None and weight_wanted and plain is not None:
            grads.copy_(plain)
            self._add_diagonals(self.grad_weight, padded, block)

    def _fill_probs(self, probs: Tensor, q: Tensor, k: Tensor, block: _Block) -> Tensor | None:
        """Probabilities in place; returns the unweighted scores if there is a weight."""
        bias = flipped_view(self.bias, block.table_start, *block.shape)
        lse = self.lse[:, block.queries]
        if self.weight is None:
            torch.sub(bias, lse, out=probs)
            probs.baddbmm_(q, k.transpose(1, 2)).exp_()
            return None
        scores = q @ k.transpose(1, 2)
        torch.mul(scores, flipped_view(self.weight, block.table_start, *block.shape), out=probs)
        probs.add_(bias).sub_(lse).exp_()
        return scores

    def _add_diagonals(self, table: Tensor, padded: Tensor, block: _Block) -> None:
        rows, cols = block.shape
        width = rows + cols - 1
        flat = padded.view(len(padded), -1)[:, : rows * width]
        total = flat.view(len(padded), rows, width).sum(1)
        table[:, block.table_start : block.table_start + width] += total
