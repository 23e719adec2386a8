"""Datasets from the data section of a config: one file with a split, or blends per split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron.data.blend import (
    BlendedDataset,
    normalised_weights,
    samples_per_dataset,
    weights_by_num_documents,
)
from megatron.data.cache import default_cache_dir
from megatron.data.errors import DataError
from megatron.data.gpt_dataset import (
    SPLIT_NAMES,
    GPTDataset,
    SampleDataset,
    build_split_dataset,
    build_train_valid_test_datasets,
)
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.manifest import check_tokenizer
from megatron.tokenizer import Tokenizer

__all__ = ["DataSettings", "build_datasets", "check_tokenizers", "sample_counts"]


class DataSettings(Protocol):
    """The config fields used here; ``train_data_paths`` and the like are read by name."""

    @property
    def data_path(self) -> Any: ...

    @property
    def split(self) -> str: ...


def sample_counts(
    train_iters: int, eval_interval: int | None, eval_iters: int, global_batch: int
) -> tuple[int, int, int]:
    """NeoX's numbers of training, validation and test samples."""
    evaluations = train_iters // eval_interval + 1 if eval_interval else 1
    return (
        train_iters * global_batch,
        evaluations * eval_iters * global_batch,
        eval_iters * global_batch,
    )


def check_tokenizers(data: DataSettings, tokenizer: Tokenizer) -> None:
    """Refuse any of the config's datasets that says it was made with another tokenizer."""
    paths = [path for name in SPLIT_NAMES for path in _paths(data, name)]
    for path in [data.data_path] if data.data_path else paths:
        check_tokenizer(path, tokenizer)


def build_datasets(
    data: DataSettings,
    *,
    seq_length: int,
    seq_length_val: int | None,
    num_samples: tuple[int, int, int],
    seed: int,
    vocab_size: int | None = None,
) -> tuple[SampleDataset | None, SampleDataset | None, SampleDataset | None]:
    """Train, valid and test datasets; None for a split that has no data."""
    _check_implementation(getattr(data, "data_impl", None))
    paths = [_paths(data, name) for name in SPLIT_NAMES]
    cache_dir = getattr(data, "data_cache_dir", None)
    warmup = bool(getattr(data, "mmap_warmup", False))
    if not any(paths):
        if not data.data_path:
            raise DataError("no data: set data_path, or train_data_paths and the like")
        return build_train_valid_test_datasets(
            data.data_path,
            data.split,
            num_samples,
            seq_length,
            seq_length_val,
            seed,
            cache_dir=cache_dir,
            mmap_warmup=warmup,
            vocab_size=vocab_size,
        )
    if data.data_path:
        raise DataError("data_path and train/valid/test_data_paths are both set; keep one of them")
    blends: list[SampleDataset | None] = []
    for i, name in enumerate(SPLIT_NAMES):
        if not paths[i] or num_samples[i] == 0:
            blends.append(None)
            continue
        tokens = [IndexedDataset(path, warmup=warmup) for path in paths[i]]
        weights = _weights(data, name, tokens)
        blends.append(
            _blend(
                tokens,
                weights,
                num_samples[i],
                seq_length if i == 0 else (seq_length_val or seq_length),
                seed,
                name=name,
                cache_dir=cache_dir,
                vocab_size=vocab_size,
            )
        )
    return blends[0], blends[1], blends[2]


def _check_implementation(value: str | None) -> None:
    if value not in (None, "infer", "mmap"):
        raise DataError(f'data_impl "{value}": only mmap (or infer) is read')


def _paths(data: DataSettings, name: str) -> list[str | Path]:
    value = getattr(data, f"{name}_data_paths", None)
    return [value] if isinstance(value, str | Path) else list(value or [])


def _weights(data: DataSettings, name: str, tokens: Sequence[IndexedDataset]) -> list[float]:
    if getattr(data, "weight_by_num_documents", False):
        alpha = getattr(data, "weighted_sampler_alpha", 1.0)
        return weights_by_num_documents([len(t) for t in tokens], alpha)
    weights = getattr(data, f"{name}_data_weights", None) or [1.0] * len(tokens)
    if len(weights) != len(tokens):
        raise DataError(
            f"{name}_data_weights has {len(weights)} numbers, {name}_data_paths {len(tokens)} paths"
        )
    return normalised_weights([float(weight) for weight in weights])


def _blend(
    tokens: Sequence[IndexedDataset],
    weights: Sequence[float],
    num_samples: int,
    length: int,
    seed: int,
    *,
    name: str,
    cache_dir: str | Path | None,
    vocab_size: int | None,
) -> SampleDataset:
    parts: list[GPTDataset] = []
    for i, (file, samples) in enumerate(
        zip(tokens, samples_per_dataset(weights, num_samples), strict=True)
    ):
        parts.append(
            build_split_dataset(
                file,
                0,
                len(file),
                length,
                samples,
                seed,
                name=f"{name}_{i}",
                cache_dir=cache_dir,
                vocab_size=vocab_size,
            )
        )
    directory = Path(cache_dir) if cache_dir is not None else default_cache_dir(tokens[0].prefix)
    return BlendedDataset(parts, weights, num_samples, cache_dir=directory.expanduser())
