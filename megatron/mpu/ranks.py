"""Work shared by processes: each takes every n-th item, everybody gets all results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist

from megatron.errors import EvaluationError

__all__ = ["Ranks"]

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """This process among those that evaluate together."""

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> Ranks:
        """All processes of the default group; one process where there is none."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def broadcast(self, value: Result | None) -> Result:
        """The main process's value."""
        if self.size == 1:
            return cast(Result, value)
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return cast(Result, box[0])

    def map(
        self, function: Callable[[Sequence[Item]], Sequence[Result]], items: Sequence[Item]
    ) -> list[Result]:
        """`function` on this rank's share; all results in the order of `items`.

        A ValueError on any rank is raised on all of them, so that nobody waits for a process that
        has given up.
        """
        if self.size == 1:
            return list(function(items))
        share: tuple[list[Result] | None, str | None]
        try:
            share = (list(function(items[self.rank :: self.size])), None)
        except ValueError as error:
            share = (None, str(error))
        shares: list[Any] = [None] * self.size
        dist.all_gather_object(shares, share)
        for _, message in shares:
            if message is not None:
                raise EvaluationError(message)
        merged: list[Any] = [None] * len(items)
        for rank, (results, _) in enumerate(shares):
            merged[rank :: self.size] = results
        return merged
