"""Where the tokens come from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron.neox_arguments.values import (
    Flag,
    Fraction,
    Group,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    PositiveIntList,
    TextList,
    WeightList,
)


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
    eod_mask_loss: bool = Field(
        False,
        description="No loss at end-of-document tokens: the next document cannot be foreseen.",
    )
    reset_attention_mask: bool = Field(
        False,
        description="Documents packed into one sequence do not see each other, and what would "
        "predict the next one's first token has no loss (as with eod_mask_loss). A document ends "
        "with its end-of-document token.",
    )
    reset_position_ids: bool = Field(
        False,
        description="Absolute and rotary positions begin anew with every document of a sequence.",
    )
    data_seed: NonNegativeInt | None = Field(
        None,
        description="Seed of the sample order; null means `seed`. Set it to compare training "
        "seeds on the same documents.",
    )
    data_cache_dir: str | None = Field(
        None, description="Directory of sample-index caches; null puts them beside the data."
    )

    @property
    def tells_documents_apart(self) -> bool:
        """Whether the model is told where the documents of a sequence begin."""
        return self.reset_attention_mask or self.reset_position_ids


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


# Evaluation during and after training, and text generation.


class EvaluationArgs(Group):
    """Validation while training; perplexity by length, passkey and lm-eval tasks after it."""

    do_train: Flag | None = Field(None, description="Train; null means train_iters > 0.")
    do_valid: Flag | None = Field(None, description="Use the validation data; null: if any.")
    do_test: Flag | None = Field(None, description="Use the test data; null: if any.")
    eval_interval: PositiveInt = Field(1000, description="Validate every this many steps.")
    eval_iters: NonNegativeInt = Field(100, description="Batches per validation.")
    eval_tasks: TextList | None = Field(
        None,
        description="What evaluate.py runs: extrapolation, positionwise, sliding, passkey, "
        "receptive_field, ruler, longppl, recall, or names of lm-eval tasks.",
    )
    eval_results_prefix: str = Field(
        "", description="Start of result file names; empty means <load>/results/step<N>."
    )
    char_level_ppl: bool = Field(
        False, description="Report perplexity per character and per word too."
    )
    eval_lengths: PositiveIntList | None = Field(
        None, description="Sequence lengths to evaluate; null means 1x to 32x seq_length."
    )
    eval_protocol: Literal["fixed_sequences", "fixed_tokens"] = Field(
        "fixed_sequences",
        description="Same number of sequences at every length (the official code) or the same "
        "tokens (as the paper describes).",
    )
    eval_num_sequences: PositiveInt = Field(
        16,
        description="Sequences per length (fixed_sequences) or at the longest (fixed_tokens); "
        "the paper's tables use 320.",
    )
    eval_window: PositiveInt | None = Field(
        None, description="Limit attention to this window while evaluating; null: no window."
    )
    eval_context_length: PositiveInt | None = Field(
        None, description="Context of lm-eval tasks; null means seq_length."
    )
    eval_stride: PositiveInt | None = Field(
        None,
        description="Sliding-window perplexity: new tokens per window; null: half of each length.",
    )
    eval_batch_tokens: PositiveInt | None = Field(
        None, description="Tokens evaluated at a time; null means 16,384."
    )
    eval_limit: Annotated[float, Field(gt=0)] | None = Field(
        None, description="lm-eval: documents per task (or the share, below 1); null: all."
    )
    eval_include_path: str | None = Field(
        None, description="lm-eval: directory of task definitions of your own."
    )
    num_fewshot: NonNegativeInt | None = Field(
        None, description="lm-eval: examples in the prompt; null: the task's own number."
    )
    positionwise_buckets: Literal["log", "linear"] | None = Field(
        None, description="Spacing of the buckets of position-wise loss; null means log."
    )
    positionwise_bucket_count: PositiveInt | None = Field(
        None, description="Number of those buckets; null chooses."
    )
    passkey_lengths: PositiveIntList | None = Field(
        None, description="Prompt lengths of passkey retrieval; null means eval_lengths."
    )
    passkey_depths: PositiveInt = Field(10, description="Depths the key is hidden at.")
    passkey_samples: PositiveInt = Field(10, description="Prompts per length and depth.")
    passkey_digits: PositiveInt = Field(5, description="Digits of the key.")
    ruler_tasks: TextList | None = Field(
        None,
        description="RULER's tasks: niah_single_1, niah_multikey_1, niah_multikey_2, "
        "niah_multivalue, vt, cwe; null means all.",
    )
    ruler_lengths: PositiveIntList | None = Field(
        None, description="Prompt lengths of ruler, answers included; null means eval_lengths."
    )
    ruler_samples: PositiveInt = Field(20, description="Prompts per task and length of ruler.")
    longppl_short_context: PositiveInt | None = Field(
        None, description="Tokens of longppl's short context; null means seq_length."
    )
    longppl_evaluator: str | None = Field(
        None,
        description="Run or checkpoint that decides which tokens need a long context; null means "
        "the model itself.",
    )
    recall_samples: PositiveInt = Field(64, description="Sequences per task and length of recall.")


class GenerationArgs(Group):
    """Sampling text."""

    text_gen_type: Literal["unconditional", "input-file", "interactive"] | None = Field(
        None, description="unconditional, input-file or interactive."
    )
    temperature: NonNegativeFloat = Field(
        0.8, description="0 takes the most likely token (GPT-NeoX's default)."
    )
    top_p: Fraction = Field(0.95, description="Nucleus sampling; 0 is off (GPT-NeoX's default).")
    top_k: NonNegativeInt = Field(0, description="Sample from the k best tokens; 0 is off.")
    maximum_tokens: PositiveInt = Field(64, description="Tokens to generate.")
    prompt_end: str = Field("\n", description="What ends a prompt in interactive mode.")
    sample_input_file: str | None = Field(None, description="Prompts, one a line.")
    sample_output_file: str = Field("samples.txt", description="Where samples go.")
    stop_strings: TextList | None = Field(
        None, description="Texts that end a sample when they appear; they are cut off."
    )
    num_samples: PositiveInt = Field(1, description="Samples per prompt.")
    recompute: bool = Field(False, description="Do not use the key-value cache.")
    return_logits: bool = Field(False, description="Write logits of generated tokens too.")
