"""The training order does not depend on restarts or on the number of ranks."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.loader import (
    ResumableBatchSampler,
    build_data_loader,
    drawn_positions,
    get_labels_and_mask,
)
from megatron.errors import DataError

GLOBAL_BATCH = 24
LAYOUTS = [(24, 1, 1), (1, 1, 24), (2, 3, 4), (6, 4, 1), (4, 2, 3), (3, 8, 1)]


class Numbers:
    """Sample i holds the number i."""

    def __init__(self, size: int = 1000) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, item: int) -> dict[str, np.ndarray]:
        if not 0 <= item < self.size:
            raise IndexError(item)
        return {"text": np.full(5, item, np.int64)}


def steps(
    layout: tuple[int, int, int],
    consumed: int,
    count: int,
    total: int = 1000,
    wrap: bool = False,
) -> list[list[int]]:
    """The samples of each of ``count`` steps, all ranks together, in NeoX's order."""
    micro, ranks, accumulation = layout
    iterators = [
        iter(ResumableBatchSampler(total, consumed, micro, r, ranks, accumulation, wrap=wrap))
        for r in range(ranks)
    ]
    found = []
    for _ in range(count):
        samples: list[int] = []
        for _ in range(accumulation):
            for iterator in iterators:
                samples += next(iterator)
        found.append(samples)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_sees_the_same_batches(layout: tuple[int, int, int]) -> None:
    expected = [list(range(s * GLOBAL_BATCH, (s + 1) * GLOBAL_BATCH)) for s in range(5)]
    assert steps(layout, 0, 5) == expected


@given(before=st.sampled_from(LAYOUTS), after=st.sampled_from(LAYOUTS), stop=st.integers(0, 10))
def test_a_run_resumes_with_other_ranks(
    before: tuple[int, int, int], after: tuple[int, int, int], stop: int
) -> None:
    resumed = steps(before, 0, stop) + steps(after, stop * GLOBAL_BATCH, 12 - stop)
    assert resumed == steps((24, 1, 1), 0, 12)


def test_wrapping_starts_again_and_still_resumes() -> None:
    wrapped = steps((4, 2, 3), 0, 5, total=50, wrap=True)
    assert wrapped[2] == [48, 49, *range(22)]
    assert steps((2, 3, 4), 2 * GLOBAL_BATCH, 3, total=50, wrap=True) == wrapped[2:]


def test_lengths_count_whole_batches() -> None:
    assert len(ResumableBatchSampler(50, 0, 4, 0, 2, 3)) == 6
    assert len(ResumableBatchSampler(50, 24, 4, 1, 2, 3)) == 3
    assert len(ResumableBatchSampler(50, 72, 4, 0, 2, 3)) == 0


@pytest.mark.parametrize("consumed", [10, -8])
def test_a_start_inside_a_batch_is_refused(consumed: int) -> None:
    with pytest.raises(DataError, match=f"consumed_samples {consumed}"):
        ResumableBatchSampler(100, consumed, 4, 0, 2, 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_serves_batches_in_order(workers: int) -> None:
    loader = build_data_loader(Numbers(), ResumableBatchSampler(1000, 40, 4, 1, 2, 5), workers)
    batches = [batch["text"] for batch in islice(loader, 3)]
    assert [batch[:, 0].tolist() for batch in batches] == [
        [44, 45, 46, 47],
        [52, 53, 54, 55],
        [60, 61, 62, 63],
    ]
    assert batches[0].dtype == torch.int64 and batches[0].shape == (4, 5)


@pytest.mark.parametrize("workers", [0, 2])
def test_running_out_is_an_error_only_when_it_happens(workers: int) -> None:
    loader = iter(build_data_loader(Numbers(20), ResumableBatchSampler(20, 0, 8), workers))
    next(loader)
    next(loader)  # the last whole batch, although the workers have looked further
    with pytest.raises(DataError, match="all 20 samples"):
        next(loader)


def test_labels_are_the_next_tokens_and_eod_may_be_masked() -> None:
    text = torch.tensor([[5, 0, 7, 8], [0, 0, 1, 2]])
    tokens, labels, mask = get_labels_and_mask(text, eod=0)
    assert tokens.tolist() == [[5, 0, 7], [0, 0, 1]]
    assert labels.tolist() == [[0, 7, 8], [0, 1, 2]]
    assert mask.tolist() == [[1, 1, 1], [1, 1, 1]]
    _, _, mask = get_labels_and_mask(text, eod=0, eod_mask_loss=True)
    assert mask.tolist() == [[1, 0, 1], [0, 0, 1]]
    assert mask.dtype == torch.float32


def test_drawn_positions_rise_and_reach_all_of_the_range() -> None:
    draws = torch.stack([drawn_positions(7, sample, 16, 64) for sample in range(200)])
    assert draws.shape == (200, 16) and (draws.diff(dim=1) > 0).all()
    assert draws.unique().tolist() == list(range(64))
    assert torch.equal(draws[3], drawn_positions(7, 3, 16, 64))
    assert not torch.equal(draws[3], drawn_positions(8, 3, 16, 64))
    assert drawn_positions(7, 0, 16, 16).tolist() == list(range(16))
