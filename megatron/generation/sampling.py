"""From logits to the next token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Sampling", "restrict", "row_generators"]


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
