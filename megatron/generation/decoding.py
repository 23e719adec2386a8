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

from megatron.errors import GenerationError
from megatron.model.attention import Cache
from megatron.model.embedding import Head, full_logits

Prompts = Sequence[Sequence[int]] | Tensor
ShouldStop = Callable[[list[int]], bool]


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


# From logits to the next token.


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; temperature 0 takes the most likely one."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature = {self.temperature}: must not be negative")
        if self.top_k < 0:
            raise ValueError(f"top_k = {self.top_k}: must not be negative; 0 is off")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}: must be between 0 (off) and 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def choose(self, logits: Tensor, generator: torch.Generator | None) -> int:
        """The next token for one row of logits, [vocabulary]."""
        if self.greedy:
            return int(logits.argmax())
        scaled = restrict(logits.float() / self.temperature, self.top_k, self.top_p)
        return int(torch.multinomial(scaled.softmax(-1), 1, generator=generator))


def restrict(logits: Tensor, top_k: int = 0, top_p: float = 0.0) -> Tensor:
    """Logits with everything outside the `top_k` best or the nucleus of mass `top_p` at -inf.

    The nucleus is the smallest set of most likely tokens whose probabilities reach `top_p`; it
    always holds at least the best token.
    """
    if 0 < top_k < logits.shape[-1]:
        smallest_kept = logits.topk(top_k).values[..., -1:]
        logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
    if 0 < top_p < 1:
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        mass_before = probabilities.cumsum(-1) - probabilities
        outside = torch.zeros_like(logits, dtype=torch.bool).scatter(
            -1, order, mass_before >= top_p
        )
        logits = logits.masked_fill(outside, -torch.inf)
    return logits


def row_generators(
    seed: int | None, streams: Sequence[int], device: torch.device
) -> list[torch.Generator | None]:
    """A stream of random numbers per row, so that a sample does not depend on its neighbours."""
    if seed is None:
        return [None] * len(streams)
    generators: list[torch.Generator | None] = []
    for stream in streams:
        generator = torch.Generator(device=device)
        generator.manual_seed((seed << 20) + stream)
        generators.append(generator)
    return generators
