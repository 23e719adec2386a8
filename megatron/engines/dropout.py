"""Attention dropout by a hash of (seed, sequence, head, query, key): the same mask in every engine.

No engine stores a mask or draws numbers: forward and backward compute again whether a key is kept.
The hash is a 64-bit number for each query (`row_keys`), made here for every engine, and a 32-bit
mix of it with the key's position (`kept`; so are `kept_lanes` in cpp/tile.h and `kept` in
triton_forward). All arithmetic
is modulo 2^64 and 2^32. The finalizers are those of SplitMix64 and MurmurHash3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.engines.call import Call

_STEP_64, _FACTORS_64 = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
STEP_32, FACTORS_32 = 0x9E3779B9, (0x85EBCA6B, 0xC2B2AE35)


def kept_scale(dropout: float) -> float:
    """What multiplies the weights that are kept, so that their mean stays."""
    return 1.0 / (1.0 - dropout)


def threshold(dropout: float) -> int:
    """A key whose hash, a signed 32-bit number, is below this is dropped."""
    return min(round(dropout * 2**32), 2**32 - 1) - 2**31


def row_keys(call: Call, sequences: Tensor | None = None, heads: Tensor | None = None) -> Tensor:
    """The hash of (seed, sequence, head, position of the query), int64 [B, H, Lq], or of some."""
    assert call.seed is not None
    device = call.q.device
    if sequences is None:
        sequences = torch.arange(call.q.shape[0], device=device)
    if heads is None:
        heads = torch.arange(call.q.shape[1], device=device)
    hashed = _mixed(call.seed.reshape(()).long() + _signed(_STEP_64, 64))
    position = torch.arange(call.offset, call.k_len, device=device)
    for index in (sequences[:, None, None], heads[:, None], position):
        hashed = _mixed(hashed + index)
    return hashed


def kept(rows: Tensor, first: int, count: int, dropout: float) -> Tensor:
    """Which of `count` keys from `first` on the queries of `row_keys` keep, bool [..., count]."""
    key = torch.arange(first, first + count, device=rows.device, dtype=torch.int32)
    low, high = rows.to(torch.int32)[..., None], (rows >> 32).to(torch.int32)[..., None]
    first_factor, second_factor = (_signed(x, 32) for x in FACTORS_32)
    x = key * _signed(STEP_32, 32) + low
    x = (x ^ _shifted(x, 16, 32)) * first_factor + high
    x = (x ^ _shifted(x, 13, 32)) * second_factor
    return x >= threshold(dropout)


def _mixed(x: Tensor) -> Tensor:
    first_factor, second_factor = (_signed(x, 64) for x in _FACTORS_64)
    x = (x ^ _shifted(x, 30, 64)) * first_factor
    x = (x ^ _shifted(x, 27, 64)) * second_factor
    return x ^ _shifted(x, 31, 64)


def _shifted(x: Tensor, by: int, bits: int) -> Tensor:
    """To the right, with zeros from the left, which torch's signed numbers do not do."""
    return (x >> by) & ((1 << (bits - by)) - 1)


def _signed(constant: int, bits: int) -> int:
    return constant - (1 << bits) if constant >> (bits - 1) else constant
