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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad
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
    if not rows:
        return []
    results = [Completion() for _ in rows]
    generators = [_generator(seed, i, model.device) for i in streams or range(len(rows))]
    known = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    tokens = pad(known, (0, max_new_tokens)).to(model.device)
    cache: Any = model.new_cache() if use_cache else None
    position = min(map(len, rows))
    alive = list(range(len(rows)))
    while alive:
        seen = cache.length if cache is not None else 0
        logits_BV = model.next_logits(tokens[alive, seen:position], cache)[:, :vocab_size]
        running = []
        for place, row in enumerate(alive):
            result = results[row]
            if position >= len(rows[row]):  # past its prompt
                token = (sampling or Sampling()).choose(logits_BV[place], generators[row])
                if token in stop_ids:
                    result.stopped = True
                    continue
                tokens[row, position] = token
                result.tokens.append(token)
                if keep_logits:
                    result.logits.append(logits_BV[place].float().cpu())
                result.stopped = should_stop is not None and should_stop(result.tokens)
            if not result.stopped and len(result.tokens) < max_new_tokens:
                running.append(place)
        position += 1
        if cache is not None and 0 < len(running) < len(alive):
            cache.select(torch.tensor(running, device=model.device))
        alive = [alive[place] for place in running]
    return results


def _generator(seed: int | None, stream: int, device: torch.device) -> torch.Generator | None:
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
