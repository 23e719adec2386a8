"""Tiled attention in plain PyTorch, for machines without a C++ compiler.

Blocks of queries against all keys before them. The bias of a block is a view of the reversed table
(see reference.py), whose rows run from the last query to the first: q, out and grad_out are flipped
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

from megatron.engines.call import Call, Gradients, Made, key_origin, sink_rows
from megatron.engines.pruning import DecayBounds, TileCount, head_windows
from megatron.engines.reference import flipped_view, reversed_table

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


def _blocks(call: Call, b: int, window: int, rows: int) -> list[_Block]:
    q_len, offset = call.q_len, call.k_len - call.q_len
    blocks = []
    for start in range(0, q_len, rows):
        stop = min(q_len, start + rows)
        first = max(0, offset + start - window + 1)
        if call.first_key is not None:
            first = max(first, int(call.first_key[b, start]))
        flipped = slice(q_len - stop, q_len - start)
        blocks.append(_Block(flipped, slice(first, offset + stop), q_len - stop + first))
    return blocks


def _groups(call: Call, bounds: DecayBounds | None, size: int) -> list[_Group]:
    heads = call.q.shape[1]
    if bounds is None or call.bias is None:
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

    def forward(self, call: Call, bounds: DecayBounds | None) -> tuple[Made, TileCount]:
        call = call.in_fp32()
        batch, heads = call.q.shape[:2]
        terms = _Terms(call, _FORWARD_ROWS)
        out = torch.empty_like(call.q)
        lse = call.q.new_empty(call.q.shape[:3])
        at_once = heads if terms.flash and heads == call.k.shape[1] else _HEADS
        visited = 0
        for group in _groups(call, bounds, at_once):
            for b in range(batch):
                part = _Heads(call, terms, b, group.heads)
                part_out, part_lse = torch.empty_like(part.q), part.q.new_empty(part.q.shape[:2])
                for block in _blocks(call, b, group.window, _FORWARD_ROWS):
                    rows = block.queries
                    part_out[:, rows], part_lse[:, rows] = part.forward(block)
                out[b, group.heads] = part_out.flip(1)
                lse[b, group.heads] = part_lse.flip(1)
                visited += len(group.heads) * _count_tiles(call, b, group.window)
        total = sum(heads * _count_tiles(call, b, call.reach) for b in range(batch))
        return Made(out, lse), TileCount(total, visited)

    def backward(
        self, call: Call, bounds: DecayBounds | None, made: Made, grad: Tensor, wanted: set[str]
    ) -> Gradients:
        call, lines = call.in_fp32(), (made.out.float(), grad.float(), made.lse)
        terms = _Terms(call, _ROWS)
        sums = _Sums(call, terms, wanted)
        for group in _groups(call, bounds, _HEADS):
            for b in range(call.q.shape[0]):
                part = _Heads(call, terms, b, group.heads)
                rows = [x[b, group.heads].flip(1) for x in lines]
                blocks = _blocks(call, b, group.window, _ROWS)
                walk = _Backward(part, blocks, *rows)
                for block in blocks:
                    walk.step(block, wanted)
                sums.add(walk, b, group.heads)
        return sums.gradients()


def _count_tiles(call: Call, b: int, window: int) -> int:
    return sum(-(-block.shape[1] // _TILE) for block in _blocks(call, b, window, _TILE))


class _Terms:
    """What is added to the scores, laid out for blocks of `rows` queries.

    The tables are reversed, with room for the future; what belongs to queries is flipped.
    """

    def __init__(self, call: Call, rows: int) -> None:
        batch, heads, q_len, _ = call.q.shape
        k_len = call.k_len
        bias = call.q.new_zeros(heads, k_len) if call.bias is None else call.bias
        self.bias = reversed_table(bias, k_len, rows, -math.inf)
        if call.window is not None:
            self.bias[:, : k_len - call.window] = -math.inf
        weight = call.weight
        self.weight = None if weight is None else reversed_table(weight, k_len, rows, 0.0)
        self.key_bias = self.origin = self.first_key = None
        if call.key_bias is not None:
            self.key_bias = call.key_bias.expand(batch, heads, k_len)
            self.origin = key_origin(call.key_bias, q_len).flip(-1).expand(batch, heads, q_len)
        if call.first_key is not None:
            self.first_key = call.first_key.flip(-1)
        sink = sink_rows(call)
        self.sink = None if sink is None else sink.flip(-1)
        self.flash = self.weight is None and self.key_bias is None and self.sink is None


class _Heads:
    """The tensors of a few heads of one sequence: flipped, scaled queries; keys, values, terms."""

    def __init__(self, call: Call, terms: _Terms, b: int, heads: Tensor) -> None:
        key_heads = heads // call.heads_per_key_head
        self.q = call.q[b, heads].flip(1).mul_(call.scale)
        self.k, self.v = call.k[b, key_heads], call.v[b, key_heads]
        self.bias = terms.bias[heads]
        self.weight = None if terms.weight is None else terms.weight[heads]
        self.key_bias = None if terms.key_bias is None else terms.key_bias[b, heads]
        self.origin = None if terms.origin is None else terms.origin[b, heads]
        self.sink = None if terms.sink is None else terms.sink[b, heads]
        self.first_key = None if terms.first_key is None else terms.first_key[b]
        self.flash = terms.flash

    def mask(self, block: _Block) -> Tensor:
        """What is added to a block's scores; a view of the table if that is all."""
        mask = flipped_view(self.bias, block.table_start, *block.shape)
        if self.key_bias is not None and self.origin is not None:
            origin = self.origin[:, block.queries, None]
            mask = mask + (self.key_bias[:, None, block.keys] - origin)
        if self.first_key is not None:
            first = self.first_key[block.queries, None]
            if int(first.max()) > block.keys.start:
                position = torch.arange(block.keys.start, block.keys.stop)
                mask = mask.masked_fill(position < first, -math.inf)
        return mask

    def scores(self, block: _Block) -> Tensor:
        """The products of queries and keys, before weight and mask."""
        return self.q[:, block.queries] @ self.k[:, block.keys].transpose(1, 2)

    def weights(self, block: _Block) -> Tensor | None:
        if self.weight is None:
            return None
        return flipped_view(self.weight, block.table_start, *block.shape)

    def forward(self, block: _Block) -> tuple[Tensor, Tensor]:
        if self.flash:
            q, k, v = self.q[:, block.queries], self.k[:, block.keys], self.v[:, block.keys]
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q[None], k[None], v[None], 0.0, False, attn_mask=self.mask(block)[None], scale=1.0
            )
            return out[0], lse[0]
        scores = self.scores(block)
        if (weights := self.weights(block)) is not None:
            scores.mul_(weights)
        lse = scores.add_(self.mask(block)).logsumexp(-1, keepdim=True)
        if self.sink is not None:
            lse = torch.logaddexp(lse, self.sink[:, block.queries, None])
        lse.masked_fill_(lse == -math.inf, 0.0)  # a row that sees nothing: all probabilities are 0
        return scores.sub_(lse).exp_() @ self.v[:, block.keys], lse[..., 0]


class _Backward:
    """The backward of a few heads of one sequence; the buffers serve all blocks."""

    def __init__(
        self, part: _Heads, blocks: list[_Block], out: Tensor, grad_out: Tensor, lse: Tensor
    ) -> None:
        self.part, self.grad_out = part, grad_out
        self.lse = lse[..., None]
        self.negative_delta = (out * grad_out).sum(-1, keepdim=True).neg_()
        self.q = torch.empty_like(part.q)
        self.k, self.v = torch.zeros_like(part.k), torch.zeros_like(part.v)
        self.bias, self.weight = torch.zeros_like(part.bias), torch.zeros_like(part.bias)
        self.key_bias = part.k.new_zeros(part.k.shape[:2])
        size = len(part.q) * max(rows * (rows + cols) for rows, cols in (x.shape for x in blocks))
        self._probs, self._grads = part.q.new_empty(size), part.q.new_empty(size)

    def sink(self) -> Tensor | None:
        """The sink has no value: its gradient is its probability times -delta."""
        if self.part.sink is None:
            return None
        return (self.part.sink - self.lse[..., 0]).exp() * self.negative_delta[..., 0]

    def step(self, block: _Block, wanted: set[str]) -> None:
        rows, cols = block.shape
        heads = len(self.q)
        q, grad_out = self.part.q[:, block.queries], self.grad_out[:, block.queries]
        k, v = self.part.k[:, block.keys], self.part.v[:, block.keys]
        probs = self._probs[: heads * rows * cols].view(heads, rows, cols)
        scores = self._fill_probs(probs, block)
        # Rows are `rows` zeros longer than the block: read one narrower, diagonals are columns.
        padded = self._grads[: heads * rows * (rows + cols)].view(heads, rows, rows + cols)
        padded[:, :, cols:] = 0.0
        grads = padded[:, :, :cols]
        grads.copy_(self.negative_delta[:, block.queries].expand_as(grads))
        grads.baddbmm_(grad_out, v.transpose(1, 2)).mul_(probs)
        self.v[:, block.keys].baddbmm_(probs.transpose(1, 2), grad_out)
        if "bias" in wanted:
            self._add_diagonals(self.bias, padded, block)
        if "key_bias" in wanted:
            self.key_bias[:, block.keys] += grads.sum(1)
        by_weight = None
        if scores is not None and (weights := self.part.weights(block)) is not None:
            by_weight = grads * scores if "weight" in wanted else None
            grads.mul_(weights)
        self.k[:, block.keys].baddbmm_(grads.transpose(1, 2), q)
        torch.bmm(grads, k, out=self.q[:, block.queries])
        if by_weight is not None:
            grads.copy_(by_weight)
            self._add_diagonals(self.weight, padded, block)

    def _fill_probs(self, probs: Tensor, block: _Block) -> Tensor | None:
        """Probabilities in place; returns the unweighted scores if there is a weight."""
        mask, lse = self.part.mask(block), self.lse[:, block.queries]
        if (weights := self.part.weights(block)) is None:
            torch.sub(mask, lse, out=probs)
            k = self.part.k[:, block.keys]
            probs.baddbmm_(self.part.q[:, block.queries], k.transpose(1, 2)).exp_()
            return None
        scores = self.part.scores(block)
        torch.mul(scores, weights, out=probs)
        probs.add_(mask).sub_(lse).exp_()
        return scores

    def _add_diagonals(self, table: Tensor, padded: Tensor, block: _Block) -> None:
        rows, cols = block.shape
        width = rows + cols - 1
        flat = padded.view(len(padded), -1)[:, : rows * width]
        total = flat.view(len(padded), rows, width).sum(1)
        table[:, block.table_start : block.table_start + width] += total


class _Sums:
    """The gradients of the whole call, out of those of its heads and sequences."""

    def __init__(self, call: Call, terms: _Terms, wanted: set[str]) -> None:
        self._call = call
        self.q = torch.empty_like(call.q)
        self.k, self.v = torch.zeros_like(call.k), torch.zeros_like(call.v)
        self.bias = torch.zeros_like(terms.bias) if "bias" in wanted else None
        self.weight = torch.zeros_like(terms.bias) if "weight" in wanted else None
        shape = call.q.shape[:2]
        self.key_bias = call.q.new_empty(*shape, call.k_len) if "key_bias" in wanted else None
        self.sink = call.q.new_empty(*shape, call.q_len) if "sink" in wanted else None

    def add(self, walk: _Backward, b: int, heads: Tensor) -> None:
        key_heads = heads // self._call.heads_per_key_head
        self.q[b, heads] = walk.q.flip(1).mul_(self._call.scale)
        self.k[b].index_add_(0, key_heads, walk.k)
        self.v[b].index_add_(0, key_heads, walk.v)
        if self.bias is not None:
            self.bias[heads] += walk.bias
        if self.weight is not None:
            self.weight[heads] += walk.weight
        if self.key_bias is not None:
            self.key_bias[b, heads] = walk.key_bias
        if self.sink is not None and (sink := walk.sink()) is not None:
            self.sink[b, heads] = sink.flip(-1)

    def gradients(self) -> Gradients:
        bias, weight = (
            None if table is None else table[:, : self._call.k_len].flip(-1)
            for table in (self.bias, self.weight)
        )
        return Gradients(self.q, self.k, self.v, bias, weight, self.key_bias, sink=self.sink)
