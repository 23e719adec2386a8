"""Decoding with a cache of keys and values, for batches of prompts of different lengths.

All rows start at position 0. The shortest prompt's length is run first; then every step feeds each
row its own next token, which is a prompt token as long as the row has any left and a sampled one
afterwards. Rows therefore never need padding, masks or shifted positions, and the result is exact
for every positional embedding::

    prompts     a b c          step   row 0   row 1
                d              0      a       d        (the shortest length: 1)
                               1      b       sample
                               2      c       sample
                               3      sample  sample
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megatron.generation.sampling import Sampling, row_generators
from megatron.model.cache import Cache
from megatron.model.embedding import Head, full_logits

__all__ = ["Completion", "Decoder", "GenerationError", "complete", "generate"]

Prompts = Sequence[Sequence[int]] | Tensor
ShouldStop = Callable[[list[int]], bool]


class GenerationError(ValueError):
    """A prompt or an option that cannot be used; the message says what to change."""


class Decoder(Protocol):
    """What decoding needs of a model."""

    @property
    def head(self) -> Head: ...
    @property
    def device(self) -> torch.device: ...
    def hidden_states(self, tokens_BL: Tensor, cache: Cache | None = None) -> Tensor: ...
    def new_cache(self) -> Cache: ...


@dataclass
class Completion:
    """What was generated for one prompt; the prompt and the stop token are not part of it."""

    tokens: list[int] = field(default_factory=list)
    stopped: bool = False
    logits: list[Tensor] = field(default_factory=list)


def generate(
    model: Decoder,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 0.0,
    stop_ids: Collection[int] = (),
    seed: int | None = None,
    use_cache: bool = True,
) -> list[list[int]]:
    """New tokens for each prompt (without the prompt, and without the stop token)."""
    completions = complete(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature, top_k, top_p),
        stop_ids=stop_ids,
        seed=seed,
        use_cache=use_cache,
    )
    return [completion.tokens for completion in completions]


@torch.inference_mode()
def complete(
    model: Decoder,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: Collection[int] = (),
    should_stop: ShouldStop | None = None,
    seed: int | None = None,
    streams: Sequence[int] | None = None,
    use_cache: bool = True,
    vocab_size: int | None = None,
    keep_logits: bool = False,
) -> list[Completion]:
    """Completions of a batch of prompts.

    `should_stop` sees a row's new tokens after each step. `vocab_size` keeps the ids that only pad
    the vocabulary from being chosen. Row i draws from the random stream `streams[i]` (default i).
    """
    rows = _checked_prompts(prompts, max_new_tokens)
    state = _Batch(rows, max_new_tokens, model.device)
    generators = row_generators(seed, streams or range(len(rows)), model.device)
    cache = model.new_cache() if use_cache else None
    while state.alive:
        logits_BV = _next_logits(model, state, cache)
        if vocab_size is not None:
            logits_BV = logits_BV[:, :vocab_size]
        finished = False
        for place, row in enumerate(list(state.alive)):
            if state.position < len(rows[row]):
                state.write(row, rows[row][state.position])
                continue
            logits = logits_BV[place]
            token = (sampling or Sampling()).choose(logits, generators[row])
            result = state.completions[row]
            if token in stop_ids:
                result.stopped = True
            else:
                result.tokens.append(token)
                state.write(row, token)
                if keep_logits:
                    result.logits.append(logits.float().cpu())
                result.stopped = should_stop is not None and should_stop(result.tokens)
            finished |= result.stopped or len(result.tokens) == max_new_tokens
        state.position += 1
        if finished:
            _drop_finished(state, cache)
    return state.completions


class _Batch:
    """The tokens of all rows so far, and which rows still run."""

    def __init__(self, rows: list[list[int]], max_new_tokens: int, device: torch.device) -> None:
        longest = max((len(row) for row in rows), default=0)
        self.max_new_tokens = max_new_tokens
        self.position = min((len(row) for row in rows), default=0)
        self.tokens = torch.zeros(
            len(rows), longest + max_new_tokens, dtype=torch.long, device=device
        )
        for number, row in enumerate(rows):
            start = torch.tensor(row[: self.position], dtype=torch.long)
            self.tokens[number, : self.position] = start.to(device)
        self.completions = [Completion() for _ in rows]
        self.alive = list(range(len(rows)))

    def write(self, row: int, token: int) -> None:
        self.tokens[row, self.position] = token

    def inputs(self, seen: int) -> Tensor:
        """The running rows' tokens that the model has not seen."""
        return self.tokens[self.alive, seen : self.position]


def _next_logits(model: Decoder, state: _Batch, cache: Cache | None) -> Tensor:
    """Logits of the newest position only: a whole prompt's would not fit at 16,384 tokens."""
    hidden = model.hidden_states(state.inputs(cache.length if cache is not None else 0), cache)
    return full_logits(model.head(hidden[:, -1:]), model.head.vocab_tp)[:, 0]


def _drop_finished(state: _Batch, cache: Cache | None) -> None:
    running = [
        place
        for place, row in enumerate(state.alive)
        if not state.completions[row].stopped
        and len(state.completions[row].tokens) < state.max_new_tokens
    ]
    state.alive = [state.alive[place] for place in running]
    if cache is not None and running:
        cache.select(torch.tensor(running, device=state.tokens.device))


def _checked_prompts(prompts: Prompts, max_new_tokens: int) -> list[list[int]]:
    if max_new_tokens < 1:
        raise GenerationError(f"max_new_tokens = {max_new_tokens}: must be at least 1")
    rows = [
        [int(token) for token in row]
        for row in (prompts.tolist() if isinstance(prompts, Tensor) else prompts)
    ]
    for number, row in enumerate(rows):
        if not row:
            raise GenerationError(
                f"prompt {number} is empty: a model needs at least one token to start from; "
                "use the tokenizer's end-of-document id"
            )
    return rows
