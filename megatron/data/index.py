"""The order in which GPT-NeoX serves samples, computed with numpy alone.

The documents of a split are repeated once per epoch and shuffled together; the result is one long
stream of tokens. Sample ``s`` is the ``length + 1`` tokens from position ``s * length``, so that
neighbouring samples share one token and documents are crossed freely::

    stream    |--doc 7--|----doc 2----|--doc 5--|--doc 7--| ...
    samples   [0......][1......][2......][3......]

Finally the samples themselves are shuffled. Both shuffles come from one ``RandomState(seed)``,
whose sequence numpy guarantees never to change; that makes the order equal to the official one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.errors import DataError

__all__ = ["SampleIndex", "build_sample_index", "number_of_epochs", "parse_split", "split_bounds"]

UINT32_SAMPLES = 2**32 - 2
INT32_DOCUMENTS = 2**31 - 1


@dataclass(frozen=True)
class SampleIndex:
    """Where each sample of a split lies.

    Sample ``s`` starts at position ``s * length`` of the stream, in the document
    ``documents[searchsorted(ends, position, "right")]``; nothing per sample need be stored but the
    order in which samples are served.
    """

    documents: npt.NDArray[np.int32]  # the stream's documents, in order
    ends: npt.NDArray[np.int64]  # position in the stream just past each of them
    order: npt.NDArray[Any]  # sample number served as item i


def parse_split(split: str) -> tuple[float, float, float]:
    """Normalised weights of train, valid and test from ``"949,50,1"`` or ``"949/50/1"``."""
    separator = "/" if "/" in split and "," not in split else ","
    try:
        weights = [float(part) for part in split.split(separator) if part.strip()]
    except ValueError:
        raise DataError(f'split "{split}": not numbers; write it like "949,50,1"') from None
    weights = [*weights, 0.0, 0.0, 0.0][:3]
    total = sum(weights)
    if not np.isfinite(total) or total <= 0 or min(weights) < 0:
        raise DataError(f'split "{split}": weights must not be negative and must not all be 0')
    return weights[0] / total, weights[1] / total, weights[2] / total


def split_bounds(split: str, num_documents: int) -> list[int]:
    """Document numbers at which train, valid and test begin and end (four of them).

    The rounding error is subtracted from every boundary, as in NeoX.
    """
    bounds = [0]
    for weight in parse_split(split):
        bounds.append(bounds[-1] + round(weight * float(num_documents)))
    error = bounds[-1] - num_documents
    return [0] + [min(max(bound - error, 0), num_documents) for bound in bounds[1:]]


def number_of_epochs(tokens_per_epoch: int, length: int, num_samples: int) -> int:
    """The fewest epochs that hold ``num_samples`` samples (at least one)."""
    return max(1, -(-(num_samples * length + 1) // tokens_per_epoch))


def build_sample_index(
    sizes: npt.NDArray[np.int32], first: int, last: int, length: int, epochs: int, seed: int
) -> SampleIndex:
    """Index of ``epochs`` passes over documents ``first`` to ``last`` (exclusive)."""
    tokens = int(sizes[first:last].sum(dtype=np.int64))
    if tokens == 0:
        raise DataError(f"documents {first} to {last - 1} hold no tokens")
    if last > INT32_DOCUMENTS:
        raise DataError(f"{last} documents; at most 2^31-1 can be indexed")
    generator = np.random.RandomState(seed)
    documents = np.tile(np.arange(first, last, dtype=np.int32), epochs)
    generator.shuffle(documents)
    ends = np.cumsum(sizes[documents], dtype=np.int64)
    total_samples = (epochs * tokens - 1) // length
    order = np.arange(total_samples, dtype=_order_dtype(total_samples))
    generator.shuffle(order)
    return SampleIndex(documents, ends, order)


def _order_dtype(total_samples: int) -> npt.DTypeLike:
    return np.uint32 if total_samples < UINT32_SAMPLES else np.int64
