"""How a batch comes to the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.checkpoints.resuming import Resumed
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.run_keys import DataArgs
from megatron.training import batches
from tests.training.cases import tiny_config


class Text:
    """A batch in pinned memory, which a slice of it would not be."""

    def __init__(self) -> None:
        self.asked: list[tuple[torch.device, bool]] = []

    def to(self, device: torch.device, *, non_blocking: bool = False) -> torch.Tensor:
        self.asked.append((device, non_blocking))
        return torch.arange(10, device=device).view(2, 5)


def test_the_whole_text_goes_to_the_device_without_waiting_and_is_cut_there() -> None:
    device, text = torch.device("meta"), Text()
    stream = batches._micro_batches([{"text": text}], device, 0, DataArgs())  # type: ignore[dict-item]
    tokens, (labels, mask) = next(stream)
    assert isinstance(tokens, torch.Tensor)
    assert text.asked == [(device, True)]
    assert {part.device.type for part in (tokens, labels, mask)} == {"meta"}
    assert tokens.shape == labels.shape == mask.shape == (2, 4)


@pytest.mark.parametrize(
    ("keys", "mask"),
    [
        ({"eod_mask_loss": True}, [1, 0, 1, 1]),
        ({"reset_attention_mask": True}, [1, 0, 1, 1]),
        ({"reset_position_ids": True}, [1, 1, 1, 1]),
    ],
)
def test_what_each_key_about_documents_means(keys: dict[str, bool], mask: list[int]) -> None:
    text = {"text": torch.tensor([[5, 0, 7, 8, 9]])}
    data = DataArgs(**keys)
    inputs, (_, found) = next(batches._micro_batches([text], torch.device("cpu"), 0, data))
    assert found.tolist() == [mask]
    if not data.tells_documents_apart:
        assert isinstance(inputs, torch.Tensor)
        return
    tokens, starts = inputs
    assert tokens.tolist() == [[5, 0, 7, 8]] and starts.tolist() == [[0, 0, 2, 2]]


@pytest.mark.parametrize("cuda", [False, True])
def test_the_loader_pins_memory_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, cuda: bool
) -> None:
    asked: dict[str, Any] = {}

    def build(dataset: Any, sampler: Any, **options: Any) -> list[Any]:
        asked.update(options)
        return []

    args = NeoXArgs.from_dict(tiny_config("none"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(batches, "build_data_loader", build)
    alone: Any = SimpleNamespace(dp_rank=0, dp_size=1)
    monkeypatch.setattr(batches, "_datasets", lambda *_: ([0] * 8, None, None))
    start, plan = Resumed(0, 0), args.batch_plan(1)
    batches.build_streams(args, plan, alone, eod=0, vocab_size=9, start=start)
    assert asked["pin_memory"] is cuda
