"""Several datasets as one, in fixed proportions and a fixed order, as NeoX blends them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron.data.cache import Arrays, cached_arrays
from megatron.data.errors import DataError
from megatron.data.gpt_dataset import Sample, SampleDataset

__all__ = [
    "BlendedDataset",
    "blending_order",
    "normalised_weights",
    "samples_per_dataset",
    "weights_by_num_documents",
]


def normalised_weights(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    if not math.isfinite(total) or total <= 0 or min(weights) < 0:
        raise DataError(f"data weights {list(weights)} must not be negative and not all be 0")
    return [weight / total for weight in weights]


def samples_per_dataset(weights: Sequence[float], num_samples: int) -> list[int]:
    """Samples to prepare from each: half a percent spare, because the order is not exactly even."""
    return [math.ceil(num_samples * weight * 1.005) for weight in normalised_weights(weights)]


def weights_by_num_documents(num_documents: Sequence[int], alpha: float = 1.0) -> list[float]:
    """NeoX's weights from document counts: p^alpha, damped by (1 - p), normalised.

    A smaller ``alpha`` gives small datasets a larger share.
    """
    if len(num_documents) == 1:
        return [1.0]
    shares = normalised_weights([float(count) for count in num_documents])
    raised = normalised_weights([share**alpha for share in shares])
    return normalised_weights(
        [(1 - share) * power for share, power in zip(shares, raised, strict=True)]
    )


def blending_order(
    weights: Sequence[float], num_samples: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """For each item its dataset and its number there: always the dataset furthest behind."""
    order = np.empty(num_samples, np.uint8)
    taken = [0] * len(weights)
    datasets = range(len(weights))
    for item in range(num_samples):
        position = max(item, 1)
        best, most = 0, weights[0] * position - taken[0]
        for d in datasets:
            behind = weights[d] * position - taken[d]
            if behind > most:
                best, most = d, behind
        order[item] = best
        taken[best] += 1
    numbers = np.empty(num_samples, np.int64)
    for d in datasets:
        where = order == d
        numbers[where] = np.arange(int(where.sum()))
    return order, numbers


class BlendedDataset:
    """Item i comes from the dataset that is then furthest behind its share."""

    def __init__(
        self,
        datasets: Sequence[SampleDataset],
        weights: Sequence[float],
        num_samples: int,
        *,
        cache_dir: Path | None = None,
    ) -> None:
        if len(datasets) != len(weights):
            raise DataError(f"{len(datasets)} datasets but {len(weights)} weights")
        if not 1 <= len(datasets) <= 255:
            raise DataError(f"{len(datasets)} datasets; between 1 and 255 can be blended")
        self.datasets = list(datasets)
        self.weights = normalised_weights(weights)
        arrays = self._order(num_samples, cache_dir)
        self.order, self.numbers = arrays["order"], arrays["numbers"]

    def _order(self, num_samples: int, cache_dir: Path | None) -> Arrays:
        """Found one sample after another, about a microsecond each: worth keeping."""

        def build() -> Arrays:
            order, numbers = blending_order(self.weights, num_samples)
            return {"order": order, "numbers": numbers}

        if cache_dir is None:
            return build()
        key = {"format": 1, "weights": self.weights, "samples": num_samples}
        return cached_arrays(key, build, directory=cache_dir, name="blend")

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, item: int) -> Sample:
        dataset = self.datasets[self.order[item]]
        # In short blends rounding can ask for a sample or two past the end; begin again there.
        return dataset[int(self.numbers[item]) % len(dataset)]
