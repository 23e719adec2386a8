"""Where the tokens come from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..fields import Group, NonNegativeFloat, NonNegativeInt, PositiveInt, TextList, WeightList


class DataArgs(Group):
    """Datasets, blending and splits."""

    data_path: str | None = Field(
        None, description="Prefix of one .bin/.idx pair, divided by `split`."
    )
    train_data_paths: TextList | None = Field(
        None, description="Prefixes of training datasets to blend; instead of data_path."
    )
    valid_data_paths: TextList | None = Field(None, description="Prefixes of validation datasets.")
    test_data_paths: TextList | None = Field(None, description="Prefixes of test datasets.")
    train_data_weights: WeightList | None = Field(
        None, description="Share of each training dataset; null means equal shares."
    )
    valid_data_weights: WeightList | None = Field(
        None, description="Share of each validation dataset."
    )
    test_data_weights: WeightList | None = Field(None, description="Share of each test dataset.")
    weight_by_num_documents: bool = Field(
        False, description="Blend by documents^alpha instead of by given weights."
    )
    weighted_sampler_alpha: NonNegativeFloat = Field(
        1.0, description="The alpha of weight_by_num_documents; below 1 lifts small datasets."
    )
    data_impl: Literal["infer", "mmap"] = Field(
        "infer", description="Dataset format; .bin/.idx files are memory-mapped either way."
    )
    mmap_warmup: bool = Field(False, description="Read the files once before training.")
    split: str = Field(
        "969, 30, 1",
        description="Shares of train, valid and test documents in data_path, e.g. 949,50,1.",
    )
    num_workers: NonNegativeInt = Field(2, description="Data-loading processes per rank.")
    eod_mask_loss: bool = Field(False, description="Do not train on end-of-document tokens.")
    data_seed: NonNegativeInt | None = Field(
        None,
        description="Seed of the sample order; null means `seed`. Set it to compare training "
        "seeds on the same documents.",
    )
    data_cache_dir: str | None = Field(
        None, description="Directory of sample-index caches; null puts them beside the data."
    )

    def split_shares(self) -> tuple[float, float, float]:
        """The three numbers of `split`."""
        parts = [float(part) for part in self.split.replace("/", ",").split(",")]
        padded = [*parts, 0.0, 0.0][:3]
        return padded[0], padded[1], padded[2]


class TokenizerArgs(Group):
    """Tokenizer and vocabulary."""

    tokenizer_type: Literal[
        "GPT2BPETokenizer",
        "HFTokenizer",
        "HFGPT2Tokenizer",
        "SPMTokenizer",
        "CharLevelTokenizer",
        "TiktokenTokenizer",
    ] = Field("GPT2BPETokenizer", description="Kind of tokenizer.")
    vocab_file: str | None = Field(None, description="Vocabulary or tokenizer file.")
    merge_file: str | None = Field(None, description="BPE merges (GPT2BPETokenizer).")
    vocab_size: PositiveInt | None = Field(
        None, description="Use this vocabulary size instead of the tokenizer's."
    )
