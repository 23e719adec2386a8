"""Datasets from the data section of a config: one file with a split, or blends per split."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from megatron.data.gpt_dataset import (
    SPLIT_NAMES,
    GPTDataset,
    Sample,
    WholeDocuments,
    build_train_valid_test_datasets,
)
from megatron.data.index_cache import Arrays, cache_directory, cached_arrays
from megatron.data.indexed_dataset import IndexedDataset, check_tokenizer
from megatron.errors import DataError
from megatron.neox_arguments.run_keys import DataArgs
from megatron.tokenizer import Tokenizer


def sample_counts(
    train_iters: int, eval_interval: int, eval_iters: int, global_batch: int
) -> tuple[int, int, int]:
    """NeoX's numbers of training, validation and test samples."""
    evaluations = train_iters // eval_interval + 1
    return (
        train_iters * global_batch,
        evaluations * eval_iters * global_batch,
        eval_iters * global_batch,
    )


def check_tokenizers(data: DataArgs, tokenizer: Tokenizer) -> None:
    """Refuse a dataset whose manifest records another tokenizer."""
    paths = [path for name in SPLIT_NAMES for path in _paths(data, name)]
    for path in [data.data_path] if data.data_path else paths:
        check_tokenizer(path, tokenizer)


_LOOKED_AT = 100


def check_documents_end(dataset: AnyDataset, eod: int) -> None:
    """Refuse data whose documents do not end with the end-of-document token."""
    for part in dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]:
        tokens = part.tokens
        documents = [i for i in range(min(_LOOKED_AT, len(tokens))) if tokens.sizes[i] > 0]
        if documents and not any(tokens.get(i, tokens.sizes[i] - 1)[0] == eod for i in documents):
            raise DataError(
                f"{tokens.prefix}: none of its first {len(documents)} documents ends with the "
                f"end-of-document token {eod}, by which reset_attention_mask and "
                "reset_position_ids tell documents apart. Prepare the data with --append-eod."
            )


def build_datasets(
    data: DataArgs,
    *,
    seq_length: int,
    seq_length_val: int | None,
    num_samples: tuple[int, int, int] | None,
    seed: int,
    vocab_size: int | None = None,
) -> tuple[AnyDataset | None, AnyDataset | None, AnyDataset | None]:
    """Train, valid and test datasets; None for a split that has no data.

    Without `num_samples` each is one pass over its documents.
    """
    paths = [_paths(data, name) for name in SPLIT_NAMES]
    if not any(paths):
        if not data.data_path:
            raise DataError("no data: set data_path, or train_data_paths and the like")
        return build_train_valid_test_datasets(
            data.data_path,
            data.split,
            num_samples or (0, 0, 0),
            seq_length,
            seq_length_val,
            seed,
            cache_dir=data.data_cache_dir,
            mmap_warmup=data.mmap_warmup,
            vocab_size=vocab_size,
            kind=_kind(data),
        )
    if data.data_path:
        raise DataError("data_path and train/valid/test_data_paths are both set; keep one of them")
    lengths = (seq_length, seq_length_val or seq_length, seq_length_val or seq_length)
    counts = num_samples or (None, None, None)
    blends = [
        _blend(data, name, count, length, seed, vocab_size) if own and count != 0 else None
        for name, own, count, length in zip(SPLIT_NAMES, paths, counts, lengths, strict=True)
    ]
    return blends[0], blends[1], blends[2]


def _kind(data: DataArgs) -> Callable[..., GPTDataset]:
    if data.pack_impl == "packed":
        return GPTDataset
    return partial(WholeDocuments, pack_impl=data.pack_impl, allow_chopped=data.allow_chopped)


def _paths(data: DataArgs, name: str) -> list[str]:
    return list(getattr(data, f"{name}_data_paths") or ())


def _weights(data: DataArgs, name: str, tokens: Sequence[IndexedDataset]) -> list[float]:
    if data.weight_by_num_documents:
        return weights_by_num_documents([len(t) for t in tokens], data.weighted_sampler_alpha)
    return normalised_weights(getattr(data, f"{name}_data_weights") or [1.0] * len(tokens))


def _blend(
    data: DataArgs,
    name: str,
    num_samples: int | None,
    length: int,
    seed: int,
    vocab_size: int | None,
) -> AnyDataset:
    files = [IndexedDataset(path, warmup=data.mmap_warmup) for path in _paths(data, name)]
    labels = data.label_paths(name)
    weights = _weights(data, name, files)
    parts = [
        _kind(data)(
            file,
            0,
            len(file),
            length,
            samples,
            seed,
            name=f"{name}_{i}",
            cache_dir=data.data_cache_dir,
            vocab_size=vocab_size,
            labels=IndexedDataset(labels[i], warmup=data.mmap_warmup) if labels else None,
        )
        for i, (file, samples) in enumerate(
            zip(files, samples_per_dataset(weights, num_samples or 0), strict=True)
        )
    ]
    if num_samples is None:
        return parts[0]
    directory = cache_directory(data.data_cache_dir, files[0].prefix)
    return BlendedDataset(parts, weights, num_samples, directory)


# Several datasets as one, in fixed proportions and a fixed order, as NeoX blends them.


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


def blending_order(weights: Sequence[float], num_samples: int) -> Arrays:
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
    return {"order": order, "numbers": numbers}


class BlendedDataset:
    """Item i comes from the dataset that is then furthest behind its share."""

    def __init__(
        self,
        datasets: Sequence[GPTDataset],
        weights: Sequence[float],
        num_samples: int,
        cache_dir: Path,
    ) -> None:
        if not 1 <= len(datasets) <= 255:
            raise DataError(f"{len(datasets)} datasets; between 1 and 255 can be blended")
        self.datasets = list(datasets)
        shares = normalised_weights(weights)

        def check(arrays: Arrays) -> str | None:
            order, numbers = arrays["order"], arrays["numbers"]
            if num_samples and (order.max() >= len(self.datasets) or numbers.min() < 0):
                return "it names samples that are not there"
            return None

        # Computed sample by sample, about a microsecond each: cached.
        arrays = cached_arrays(
            {"format": 1, "weights": shares, "samples": num_samples},
            lambda: blending_order(shares, num_samples),
            directory=cache_dir,
            name="blend",
            lengths={"order": num_samples, "numbers": num_samples},
            check=check,
        )
        self.order, self.numbers = arrays["order"], arrays["numbers"]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, item: int) -> Sample:
        dataset = self.datasets[self.order[item]]
        # In short blends rounding can request a sample or two past the end: start again at 0.
        return dataset[int(self.numbers[item]) % len(dataset)]


AnyDataset = GPTDataset | BlendedDataset
