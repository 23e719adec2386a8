"""Perplexity by length, on sequences that do not overlap."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from megatron.data.corpus_numbers import count_words
from megatron.evaluation.losses import mean_and_error, perplexity, sequence_losses, windowed
from megatron.evaluation.results_schema import number, text_table
from megatron.evaluation.sequences import (
    SequenceSet,
    SplitTokens,
    fixed_sequences,
    fixed_tokens,
    open_split,
)
from megatron.evaluation.tasks import Context, EvaluationOptions, EvaluationTask, Split, task

__all__ = [
    "Extrapolation",
    "data_parameters",
    "measure_lengths",
    "sequences_of",
    "window_suffix",
]


def data_parameters(options: EvaluationOptions) -> dict[str, Any]:
    """The data that perplexities are measured on, files included."""
    files = []
    for split in options.splits:
        for prefix, share in options.data.sources(split):
            files.append([split, prefix, share, _file_state(prefix)])
    return {
        "files": files,
        "protocol": options.protocol,
        "num_sequences": options.num_sequences,
        "data_seed": options.data_seed,
        "window": options.window,
    }


def _file_state(prefix: str) -> list[int]:
    """Size and time of a token file: the same name may hold other tokens tomorrow."""
    states = []
    for suffix in (".bin", ".idx"):
        path = Path(prefix + suffix)
        if path.exists():
            states += [path.stat().st_size, path.stat().st_mtime_ns]
    return states


def sequences_of(options: EvaluationOptions, files: list[SplitTokens], length: int) -> SequenceSet:
    """The sequences of one length under the chosen protocol."""
    if options.protocol == "fixed_tokens":
        return fixed_tokens(files, length, options.lengths, options.num_sequences)
    return fixed_sequences(
        files,
        length,
        options.num_sequences,
        seed=options.data_seed,
        cache_dir=options.data.cache_dir,
    )


def window_suffix(options: EvaluationOptions) -> str:
    """Keeps a windowed result apart from the plain one."""
    return f"_window{options.window}" if options.window else ""


def measure_lengths(
    context: Context, measure: Callable[[Split, int], dict[str, Any]]
) -> dict[str, Any]:
    """The entries of every split and length that can be measured; the others are in `errors`."""
    options = context.options
    results: dict[str, Any] = {}
    with windowed(context.model, options.window, context.model.spec.attention_window):
        for split in options.splits:
            entries = [
                context.cells.attempt(
                    f"{split}/{length}", partial(measure, split, length), split=split, length=length
                )
                for length in options.lengths
            ]
            results[split] = [entry for entry in entries if entry is not None]
    return results


@task("extrapolation")
class Extrapolation(EvaluationTask):
    """Loss and perplexity at each length, on valid and test."""

    needs_data = True

    def file_name(self, options: EvaluationOptions) -> str:
        return f"{self.name}{window_suffix(options)}"

    def result_name(self, options: EvaluationOptions) -> str:
        # Readers of `extrapolation` results must not take windowed numbers for the model's own.
        return f"{self.name}_windowed" if options.window else self.name

    def parameters(self, options: EvaluationOptions) -> dict[str, Any]:
        return {
            **data_parameters(options),
            "lengths": options.lengths,
            "char_level_ppl": options.char_level_ppl,
        }

    def work(self, options: EvaluationOptions) -> list[tuple[int, int]]:
        return options.planned()

    def run(self, context: Context) -> dict[str, Any]:
        files = lru_cache(partial(open_split, context.options.data))
        return measure_lengths(context, partial(_measure, context, files))

    def table(self, results: dict[str, Any]) -> str:
        rows = [
            [
                split,
                str(entry["length"]),
                number(entry["loss"]),
                number(entry["ppl"]),
                number(entry["stderr"]),
                str(entry["sequences"]),
                str(entry["tokens"]),
            ]
            for split, entries in results.items()
            for entry in entries
        ]
        return text_table(["split", "length", "loss", "ppl", "stderr", "sequences", "tokens"], rows)


def _measure(context: Context, files: Any, split: Split, length: int) -> dict[str, Any]:
    options = context.options
    sequences = sequences_of(options, files(split), length)
    if options.protocol == "fixed_sequences" and len(sequences) < options.num_sequences:
        context.say(
            f"{split} at {length}: the split holds {len(sequences)} sequences of this length, "
            f"not {options.num_sequences} (eval_num_sequences); all of them are used"
        )
    losses = sequence_losses(
        context.model,
        sequences,
        ranks=context.ranks,
        batch_tokens=options.batch_tokens,
        label=f"extrapolation {split} {length}",
    )
    entry: dict[str, Any] = {"length": length, **mean_and_error(losses)}
    if options.char_level_ppl:
        entry |= _per_character(context, sequences, entry)
    return entry


def _per_character(
    context: Context, sequences: SequenceSet, entry: dict[str, Any]
) -> dict[str, Any]:
    """The same loss shared out over characters and words, which makes tokenizers comparable."""
    tokenizer = context.tokenizer()
    texts = [tokenizer.detokenize(sequences[i][1:].tolist()) for i in range(len(sequences))]
    characters, words = sum(map(len, texts)), sum(map(count_words, texts))
    total = entry["loss"] * entry["tokens"]
    return {
        "characters": characters,
        "char_ppl": perplexity(total / characters),
        "words": words,
        "word_ppl": perplexity(total / words) if words else None,
    }
