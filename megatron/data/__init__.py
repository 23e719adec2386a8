"""From token files to batches, in GPT-NeoX's formats and order."""

from __future__ import annotations

from megatron.data.gpt_dataset import GPTDataset, build_train_valid_test_datasets
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.writer import IndexedDatasetWriter, merge_datasets

__all__ = [
    "GPTDataset",
    "IndexedDataset",
    "IndexedDatasetWriter",
    "build_train_valid_test_datasets",
    "merge_datasets",
]
