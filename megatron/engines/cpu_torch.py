"""Tiled attention in plain PyTorch, for machines without a C++ compiler.

Blocks of queries against all keys before them. The bias of a block is a view of the reversed table
(see reference.py), whose rows run from the last query to the first: q, out and grad_out are flipped
once for that. Forward: torch's own CPU flash operator takes the view as its mask. Backward: five
matrix products a block, in reused buffers, a few heads at a time so that a block's scores stay in
cache.

A pruned head has its own window; heads of similar windows are computed together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.engines.call import Call, key_origin, sink_rows
from megatron.engines.dropout import kept, kept_scale, row_keys
from megatron.engines.pruning import DecayBounds, TileCount, head_windows
from megatron.engines.reference import flipped_view, reversed_table

_FORWARD_ROWS = 256
_ROWS = 128
_HEADS = 4
_PRUNED_HEADS = 2


class _Block(NamedTuple):
    """A slice of the flipped queries, the keys that it sees, and where their tables begin."""

    queries: slice
    keys: slice
    table_start: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start


def _blocks(call: Call, b: int, window: int, rows: int) -> list[_Block]:
    q_len, offset = call.q_len, call.offset
    blocks = []
    for start in range(0, q_len, rows):
        stop = min(q_len, start + rows)
        first = max(0, offset + start - window + 1)
        if call.first_key is not None:
            first = max(first, int(call.first_key[b, start]))
        flipped = slice(q_len - stop, q_len - start)
        blocks.append(_Block(flipped, slice(first, offset + stop), q_len - stop + first))
    return blocks


def _groups(call: Call, bounds: DecayBounds | None, size: int) -> list[tuple[Tensor, int]]:
    """Heads that are computed together, and how many of the nearest keys they see."""
    heads = call.q.shape[1]
    if bounds is None or call.bias is None:
        order, windows = list(range(heads)), [call.reach] * heads
    else:
        windows = [min(call.reach, window) for window in head_windows(call, bounds).tolist()]
        order = sorted(range(heads), key=windows.__getitem__)
        size = _PRUNED_HEADS
    together = (order[i : i + size] for i in range(0, heads, size))
    return [(torch.tensor(group), max(windows[h] for h in group)) for group in together]


def _is_plain(call: Call) -> bool:
    """Whether torch's flash operator can run it: the only extra term is an additive mask."""
    others = (call.weight, call.key_bias, call.sink, call.query_features, call.row_scale)
    return call.dropout == 0.0 and all(x is None for x in others)


class TorchBackend:
    """Tiled attention in torch operations; computes in fp32."""

    def forward(self, call: Call, bounds: DecayBounds | None) -> tuple[Tensor, Tensor, TileCount]:
        dtype, call = call.q.dtype, call.in_fp32()
        plain = _is_plain(call)
        at_once = call.q.shape[1] if plain and call.heads_per_key_head == 1 else _HEADS
        out, lse = torch.empty_like(call.q), call.q.new_empty(call.q.shape[:3])
        total = visited = 0
        for heads, window in _groups(call, bounds, at_once):
            for b in range(call.q.shape[0]):
                part = _Heads(call, b, heads, _FORWARD_ROWS)
                part_out, part_lse = torch.empty_like(part.q), part.q.new_empty(part.q.shape[:2])
                blocks = _blocks(call, b, window, _FORWARD_ROWS)
                for block in blocks:
                    rows = block.queries
                    part_out[:, rows], part_lse[:, rows] = part.forward(block)
                out[b, heads], lse[b, heads] = part_out.flip(1), part_lse.flip(1)
                unpruned = _blocks(call, b, call.reach, _FORWARD_ROWS)
                visited += len(heads) * sum(block.shape[1] for block in blocks)
                total += len(heads) * sum(block.shape[1] for block in unpruned)
        return out.to(dtype), lse, TileCount(total, visited)

    def backward(
        self, call: Call, bounds: DecayBounds | None, made: Sequence[Tensor], wanted: set[str]
    ) -> dict[str, Tensor]:
        """The gradients by operand; `made` are the output, its logsumexp and its gradient."""
        call, lines = call.in_fp32(), [x.float() for x in made]
        batch, heads = call.q.shape[:2]
        shapes: dict[str, tuple[int, ...]] = {
            "bias": (heads, call.k_len),
            "weight": (heads, call.k_len),
            "key_bias": (batch, heads, call.k_len),
            "sink": (batch, heads, call.q_len),
            "row_scale": (batch, heads, call.q_len),
        }
        if call.query_features is not None and call.distance_features is not None:
            seen = min(call.k_len, call.distance_features.shape[-1])
            shapes["query_features"] = tuple(call.query_features.shape)
            shapes["distance_features"] = (heads, call.query_features.shape[-1], seen)
        sums = {name: call.q.new_zeros(x) for name, x in shapes.items() if name in wanted}
        sums |= {name: torch.zeros_like(getattr(call, name)) for name in "qkv"}
        for group, window in _groups(call, bounds, _HEADS):
            for b in range(batch):
                blocks = _blocks(call, b, window, _ROWS)
                part = _Heads(call, b, group, _ROWS)
                walk = _Backward(part, blocks, *(x[b, group].flip(1) for x in lines))
                for block in blocks:
                    walk.step(block, wanted)
                walk.add_to(sums, call, b, group)
        return sums


class _Heads:
    """A few heads of one sequence: flipped, scaled queries; keys, values; terms of the scores.

    Tables are reversed and padded for future keys; tensors over queries are flipped.
    """

    def __init__(self, call: Call, b: int, heads: Tensor, rows: int) -> None:
        key_heads, k_len = heads // call.heads_per_key_head, call.k_len
        self.q = call.q[b, heads].flip(1).mul_(call.scale)
        self.k, self.v = call.k[b, key_heads], call.v[b, key_heads]
        bias = self.q.new_zeros(len(heads), k_len) if call.bias is None else call.bias[heads]
        self.bias = reversed_table(bias, k_len, rows, -math.inf)
        if call.window is not None:
            self.bias[:, : k_len - call.window] = -math.inf
        self.weight = self.key_bias = self.origin = self.first_key = self.sink = None
        self.features = self.distance_features = self.row_scale = self.row_keys = None
        self.dropout = call.dropout
        self.is_plain = _is_plain(call)
        if call.weight is not None:
            self.weight = reversed_table(call.weight[heads], k_len, rows, 0.0)
        if call.key_bias is not None:
            self.key_bias = call.key_bias.expand(*call.q.shape[:2], k_len)[b, heads]
            self.origin = key_origin(self.key_bias, call.q_len).flip(-1)
        if call.first_key is not None:
            self.first_key = call.first_key[b].flip(-1)
        if (sink := sink_rows(call)) is not None:
            self.sink = sink[b, heads].flip(-1)
        if call.query_features is not None and call.distance_features is not None:
            self.features = call.query_features[b, heads].flip(1)
            table = call.distance_features[..., :k_len]
            table = torch.nn.functional.pad(table, (0, k_len - table.shape[-1])).flip(-1)
            table = torch.nn.functional.pad(table, (0, rows))  # future keys
            self.distance_features = table.expand(call.q.shape[1], -1, -1)[heads]
        if call.row_scale is not None:
            self.row_scale = call.row_scale.expand(call.q.shape[:3])[b, heads].flip(-1)[..., None]
        if call.dropout > 0.0:
            self.row_keys = row_keys(call, torch.tensor([b]), heads)[0].flip(-1)

    def mask(self, block: _Block) -> Tensor:
        """What is added to a block's scores; a view of the table if that is all."""
        mask = flipped_view(self.bias, block.table_start, *block.shape)
        if self.features is not None:
            mask = mask + self.skewed(self.features[:, block.queries] @ self.near_keys(block))
        if self.key_bias is not None and self.origin is not None:
            origin = self.origin[:, block.queries, None]
            mask = mask + (self.key_bias[:, None, block.keys] - origin)
        if self.first_key is not None:
            first = self.first_key[block.queries, None]
            if int(first.max()) > block.keys.start:
                position = torch.arange(block.keys.start, block.keys.stop)
                mask = mask.masked_fill(position < first, -math.inf)
        return mask

    def near_keys(self, block: _Block) -> Tensor:
        """The distance features of a block's diagonals, [heads, features, rows + keys - 1]."""
        assert self.distance_features is not None
        width = sum(block.shape) - 1
        return self.distance_features[:, :, block.table_start : block.table_start + width]

    @staticmethod
    def skewed(by_diagonal: Tensor) -> Tensor:
        """[heads, rows, rows + keys - 1] by diagonals as [heads, rows, keys]; not a copy."""
        heads, rows, width = by_diagonal.shape
        shape, strides = (heads, rows, width - rows + 1), (rows * width, width + 1, 1)
        return by_diagonal.contiguous().as_strided(shape, strides)

    def scaled(self, scores: Tensor, block: _Block) -> Tensor:
        """Multiply by row_scale, in place."""
        return scores if self.row_scale is None else scores.mul_(self.row_scale[:, block.queries])

    def kept(self, block: _Block) -> Tensor | None:
        """What dropout multiplies a block's probabilities with: 0, or its scale."""
        if self.row_keys is None:
            return None
        rows = self.row_keys[:, block.queries]
        mask = kept(rows, block.keys.start, block.shape[1], self.dropout)
        return mask.to(self.q.dtype).mul_(kept_scale(self.dropout))

    def weights(self, block: _Block) -> Tensor | None:
        if self.weight is None:
            return None
        return flipped_view(self.weight, block.table_start, *block.shape)

    def forward(self, block: _Block) -> tuple[Tensor, Tensor]:
        if self.is_plain:
            q, k, v = self.q[:, block.queries], self.k[:, block.keys], self.v[:, block.keys]
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q[None], k[None], v[None], 0.0, False, attn_mask=self.mask(block)[None], scale=1.0
            )
            return out[0], lse[0]
        scores = self.q[:, block.queries] @ self.k[:, block.keys].transpose(1, 2)
        if (weights := self.weights(block)) is not None:
            scores.mul_(weights)
        lse = self.scaled(scores.add_(self.mask(block)), block).logsumexp(-1, keepdim=True)
        if self.sink is not None:
            lse = torch.logaddexp(lse, self.sink[:, block.queries, None])
        lse.masked_fill_(lse == -math.inf, 0.0)  # a row that sees nothing: all probabilities are 0
        probs = scores.sub_(lse).exp_()
        if (kept := self.kept(block)) is not None:
            probs.mul_(kept)
        return probs @ self.v[:, block.keys], lse[..., 0]


class _Backward:
    """The backward of a few heads of one sequence; the buffers serve all blocks."""

    def __init__(
        self, part: _Heads, blocks: list[_Block], out: Tensor, lse: Tensor, grad_out: Tensor
    ) -> None:
        self.part, self.grad_out = part, grad_out
        self.lse = lse[..., None]
        self.negative_delta = (out * grad_out).sum(-1, keepdim=True).neg_()
        self.q = torch.empty_like(part.q)
        self.k, self.v = torch.zeros_like(part.k), torch.zeros_like(part.v)
        self.bias, self.weight = torch.zeros_like(part.bias), torch.zeros_like(part.bias)
        self.key_bias = part.k.new_zeros(part.k.shape[:2])
        self.row_scale = part.q.new_zeros(part.q.shape[:2])
        self.features = self.distance_features = None
        if part.features is not None and part.distance_features is not None:
            self.features = torch.empty_like(part.features)
            self.distance_features = torch.zeros_like(part.distance_features)
        size = len(part.q) * max(rows * (rows + cols) for rows, cols in (x.shape for x in blocks))
        self._probs, self._grads = part.q.new_empty(size), part.q.new_empty(size)

    def step(self, block: _Block, wanted: set[str]) -> None:
        rows, cols = block.shape
        heads = len(self.q)
        q, grad_out = self.part.q[:, block.queries], self.grad_out[:, block.queries]
        k, v = self.part.k[:, block.keys], self.part.v[:, block.keys]
        probs = self._probs[: heads * rows * cols].view(heads, rows, cols)
        scores, unscaled = self._fill_probs(probs, block)
        # Rows are `rows` zeros longer than the block: read one narrower, diagonals are columns.
        padded = self._grads[: heads * rows * (rows + cols)].view(heads, rows, rows + cols)
        padded[:, :, cols:] = 0.0
        grads = padded[:, :, :cols]
        kept, negative_delta = self.part.kept(block), self.negative_delta[:, block.queries]
        if kept is None:
            grads.copy_(negative_delta.expand_as(grads))
            grads.baddbmm_(grad_out, v.transpose(1, 2)).mul_(probs)
        else:
            torch.mul(grad_out @ v.transpose(1, 2), kept, out=grads)
            grads.add_(negative_delta).mul_(probs)
            probs.mul_(kept)
        self.v[:, block.keys].baddbmm_(probs.transpose(1, 2), grad_out)
        if unscaled is not None:  # a hidden key's -inf has no share
            shares = torch.where(grads == 0, 0.0, grads * unscaled)
            self.row_scale[:, block.queries] = shares.sum(-1)
        self.part.scaled(grads, block)
        self._add_features(padded, block)
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

    def _fill_probs(self, probs: Tensor, block: _Block) -> tuple[Tensor | None, Tensor | None]:
        """Probabilities in place; returns the scores before weight and before row_scale."""
        mask, lse = self.part.mask(block), self.lse[:, block.queries]
        q, k = self.part.q[:, block.queries], self.part.k[:, block.keys].transpose(1, 2)
        weights, scaled = self.part.weights(block), self.part.row_scale is not None
        if weights is None and not scaled:
            torch.sub(mask, lse, out=probs)
            probs.baddbmm_(q, k).exp_()
            return None, None
        scores = q @ k
        torch.add(scores if weights is None else scores * weights, mask, out=probs)
        unscaled = probs.clone() if scaled else None
        self.part.scaled(probs, block).sub_(lse).exp_()
        return None if weights is None else scores, unscaled

    def _add_features(self, padded: Tensor, block: _Block) -> None:
        if self.features is None or self.part.features is None:
            return
        assert self.distance_features is not None
        rows, cols = block.shape
        width = rows + cols - 1
        by_diagonal = padded.view(len(padded), -1)[:, : rows * width].view(-1, rows, width)
        table = self.part.near_keys(block)
        torch.bmm(by_diagonal, table.mT, out=self.features[:, block.queries])
        near = slice(block.table_start, block.table_start + width)
        self.distance_features[..., near] += self.part.features[:, block.queries].mT @ by_diagonal

    def _add_diagonals(self, table: Tensor, padded: Tensor, block: _Block) -> None:
        rows, cols = block.shape
        width = rows + cols - 1
        flat = padded.view(len(padded), -1)[:, : rows * width]
        total = flat.view(len(padded), rows, width).sum(1)
        table[:, block.table_start : block.table_start + width] += total

    def add_to(self, sums: dict[str, Tensor], call: Call, b: int, heads: Tensor) -> None:
        key_heads = heads // call.heads_per_key_head
        sums["q"][b, heads] = self.q.flip(1).mul_(call.scale)
        sums["k"][b].index_add_(0, key_heads, self.k)
        sums["v"][b].index_add_(0, key_heads, self.v)
        for name, table in (("bias", self.bias), ("weight", self.weight)):
            if name in sums:
                sums[name][heads] += table[:, : call.k_len].flip(-1)
        if "key_bias" in sums:
            sums["key_bias"][b, heads] = self.key_bias
        if self.features is not None and "query_features" in sums:
            sums["query_features"][b, heads] = self.features.flip(1)
        if self.distance_features is not None and "distance_features" in sums:
            seen = sums["distance_features"].shape[-1]
            table = self.distance_features[..., : call.k_len].flip(-1)
            sums["distance_features"][heads] += table[..., :seen]
        if self.part.sink is not None and "sink" in sums:
            # a sink has no value vector: its gradient is its probability times -delta
            share = (self.part.sink - self.lse[..., 0]).exp()
            sums["sink"][b, heads] = (share * self.negative_delta[..., 0]).flip(-1)
        if "row_scale" in sums:
            sums["row_scale"][b, heads] = self._row_scale_gradient().flip(-1)

    def _row_scale_gradient(self) -> Tensor:
        """Adds the key origin, which the blocks' scores leave out."""
        part = self.part
        if part.sink is None or part.origin is None:
            return self.row_scale
        sink_share = (part.sink - self.lse[..., 0]).exp()
        return self.row_scale - part.origin * sink_share * self.negative_delta[..., 0]
