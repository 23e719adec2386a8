"""Evaluation during and after training, and text generation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..fields import (
    Flag,
    Fraction,
    Group,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveIntList,
    TextList,
)


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
        "receptive_field, or names of lm-eval tasks.",
    )
    eval_results_prefix: str = Field(
        "", description="Start of result file names; empty means <load>/results/step<N>."
    )
    char_level_ppl: bool = Field(False, description="Report perplexity per character too.")
    eval_lengths: PositiveIntList | None = Field(
        None, description="Sequence lengths to evaluate; null means 1x to 32x seq_length."
    )
    eval_protocol: Literal["fixed_sequences", "fixed_tokens"] = Field(
        "fixed_sequences",
        description="Same number of sequences at every length (the official code) or the same "
        "tokens (as the paper describes).",
    )
    eval_num_sequences: PositiveInt = Field(
        320, description="Sequences per length (fixed_sequences) or at the longest (fixed_tokens)."
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
    eval_limit: PositiveFloat | None = Field(
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


class GenerationArgs(Group):
    """Sampling text."""

    text_gen_type: Literal["unconditional", "input-file", "interactive"] | None = Field(
        None, description="unconditional, input-file or interactive."
    )
    temperature: NonNegativeFloat = Field(0.0, description="0 takes the most likely token.")
    top_p: Fraction = Field(0.0, description="Nucleus sampling; 0 is off.")
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
