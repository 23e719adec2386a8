"""Decoding with a cache of keys and values, for batches of prompts of different lengths.

Prompts are read as blocks. Those of similar length are read together, padded at the right end,
where a causal model cannot see; long ones in chunks, so that memory is bounded. Then the rows'
caches are put side by side, their newest tokens at one place (`megatron.model.cache`), and every
step feeds each row its last token::

    prompts     a b c          read    a b c    d . .      (or apart, if lengths differ much)
                d              cache   a b c
                                       . . d
                               step    sample
                                       sample

A row's positions are its own and its first key is known, so the result is exact for every
positional embedding. Where the rows of a cache must be equally long (an ONNX file, rotations that
depend on the length), prompts of one length run together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron.errors import GenerationError

if TYPE_CHECKING:
    from megatron.generation.onnx_model import OnnxModel
    from megatron.model import GPTModel

Prompts = Sequence[Sequence[int]] | Tensor


@dataclass
class Completion:
    """What was generated for one prompt; the prompt and the stop token are not part of it."""

    tokens: list[int] = field(default_factory=list)
    stopped: bool = False
    logits: list[Tensor] = field(default_factory=list)


def generate(
    model: GPTModel,
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
    model: GPTModel | OnnxModel,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: Collection[int] = (),
    should_stop: Callable[[list[int]], bool] | None = None,
    seed: int | None = None,
    streams: Sequence[int] | None = None,
    use_cache: bool = True,
    vocab_size: int | None = None,
    keep_logits: bool = False,
) -> list[Completion]:
    """Completions of a batch of prompts.

    `should_stop` sees a row's new tokens after each step. `vocab_size` keeps the ids that only pad
    the vocabulary from being chosen. Row i draws from the random stream `streams[i]` (default i),
    so that a sample does not depend on its neighbours.
    """
    rows = _checked_prompts(prompts, max_new_tokens)
    results = [Completion() for _ in rows]
    generators = [random_stream(seed, i, model.device) for i in streams or range(len(rows))]

    def next_token(number: int, logits_V: Tensor) -> int | None:
        result, known = results[number], logits_V[:vocab_size]
        token = (sampling or Sampling()).choose(known, generators[number])
        if token in stop_ids:
            result.stopped = True
            return None
        result.tokens.append(token)
        if keep_logits:
            result.logits.append(known.float().cpu())
        result.stopped = should_stop is not None and should_stop(result.tokens)
        return token if not result.stopped and len(result.tokens) < max_new_tokens else None

    decode(model, rows, next_token, use_cache)
    return results


def decode(
    model: Any,
    texts: Sequence[Sequence[int]],
    next_token: Callable[[int, Tensor], int | None],
    use_cache: bool = True,
) -> None:
    """Go on with all texts, token by token.

    `next_token` chooses by a text's number and its logits; with None the text ends.
    """
    together = [list(range(len(texts)))]
    for numbers in together if model.rows_may_differ else _of_one_length(texts):
        rows = [list(texts[number]) for number in numbers]
        if use_cache and rows:
            logits, cache = read_prompts(model, rows)
        while numbers:
            if not use_cache:
                tokens, last = _padded(rows, model.device)
                logits = model.next_logits(tokens, None, last)
            chosen = {
                place: token
                for place, (number, own) in enumerate(zip(numbers, logits, strict=True))
                if (token := next_token(number, own)) is not None
            }
            if use_cache and 0 < len(chosen) < len(numbers):
                cache.select(torch.tensor(list(chosen), device=model.device))
            numbers, rows = [numbers[place] for place in chosen], [rows[place] for place in chosen]
            for row, token in zip(rows, chosen.values(), strict=True):
                row.append(token)
            if use_cache and numbers:
                newest = torch.tensor([row[-1:] for row in rows], device=model.device)
                logits = model.next_logits(newest, cache)


def _of_one_length(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """The numbers of the rows, those of equal length together."""
    found: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        found.setdefault(len(row), []).append(number)
    return list(found.values())


# Prompts.

PROMPT_TOKENS = 4_096  # of all rows together, that the model reads in one pass
SHORTEST_CHUNK = 256
LITTLE_PADDING = 16


def read_prompts(model: Any, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Any]:
    """The logits after each prompt, [rows, vocabulary], and a cache that holds them all."""
    parts: list[tuple[Any, list[int]]] = []
    logits: list[Tensor] = []
    for numbers in _of_similar_length(rows):
        found, cache = _read_block(model, [rows[number] for number in numbers])
        parts.append((cache, numbers))
        logits.append(found)
    order = [number for _, numbers in parts for number in numbers]
    in_order = torch.cat(logits)[torch.tensor(order).argsort().to(model.device)]
    lengths = [len(row) for row in rows]
    if len(set(lengths)) == 1:
        return in_order, parts[0][0]
    cache = model.new_cache()
    cache.join(parts, lengths, model.device)
    return in_order, cache


def _of_similar_length(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """The numbers of the rows, in groups whose longest is hardly longer than their shortest."""
    groups: list[list[int]] = []
    longest = 0
    for number in sorted(range(len(rows)), key=lambda number: -len(rows[number])):
        if groups and longest - len(rows[number]) <= max(longest // 8, LITTLE_PADDING):
            groups[-1].append(number)
        else:
            groups.append([number])
            longest = len(rows[number])
    return groups


def _read_block(model: Any, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Any]:
    """The logits after each of some rows of similar length, and their cache, padding included."""
    tokens, last = _padded(rows, model.device)
    length = tokens.shape[1]
    cache = model.new_cache(length - min(map(len, rows)))
    step = length if model.by_length else max(PROMPT_TOKENS // len(rows), SHORTEST_CHUNK)
    logits: Tensor | None = None
    for start in range(0, length, step):
        chunk = tokens[:, start : start + step]
        here = (last - start).clamp(0, chunk.shape[1] - 1)
        found = model.next_logits(chunk, cache, here)
        ends_here = (last >= start)[:, None]
        logits = found if logits is None else torch.where(ends_here, found, logits)
    assert logits is not None
    return logits, cache


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows [rows, longest], and the place of each one's last token."""
    tokens = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    last = torch.tensor([len(row) - 1 for row in rows], device=device)
    return tokens.to(device), last


def random_stream(seed: int | None, stream: int, device: torch.device) -> torch.Generator | None:
    """The random numbers of one row; None takes torch's own."""
    if seed is None:
        return None
    return torch.Generator(device=device).manual_seed((seed << 20) + stream)


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
            raise GenerationError(f"temperature = {self.temperature}: must not be negative")
        if self.top_k < 0:
            raise GenerationError(f"top_k = {self.top_k}: must not be negative; 0 is off")
        if not 0 <= self.top_p <= 1:
            raise GenerationError(f"top_p = {self.top_p}: must be between 0 (off) and 1")

    def choose(self, logits: Tensor, generator: torch.Generator | None) -> int:
        """The next token for one row of logits, [vocabulary]."""
        if self.temperature == 0:
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
