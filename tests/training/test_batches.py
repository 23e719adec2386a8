"""How a batch comes to the device."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.checkpoints.resuming import Resumed
from megatron.errors import ConfigError, DataError
from megatron.model import ModelSpec
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.run_keys import DataArgs
from megatron.training import batches
from tests.training.cases import tiny_config, write_data
from tests.training.runs import losses, run, run_config


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


def test_drawn_positions_belong_to_samples_and_validation_has_none() -> None:
    """On one rank, on two, and after a restart, sample 5 of the training has the same positions."""
    args = NeoXArgs.from_dict(
        tiny_config("none", pos_emb="rotary", randomized_positions=64, train_batch_size=4)
    )
    text = {"text": torch.arange(2 * 17).view(2, 17)}

    def positions(consumed: int, rank: int, ranks: int, number: int) -> list[torch.Tensor]:
        sampler = batches.ResumableBatchSampler(
            99, consumed, 2, dp_rank=rank, dp_size=ranks, grad_accum=2 // ranks
        )
        places = batches._places(ModelSpec.from_args(args, 64), sampler)
        stream = batches._micro_batches([text] * number, torch.device("cpu"), 0, args.data, places)
        return [torch.arange(16) - row for inputs, _ in stream for row in inputs[1]]

    alone = positions(0, 0, 1, 4)
    first, second = positions(0, 0, 2, 2), positions(0, 1, 2, 2)
    assert torch.equal(torch.stack(alone[:2] + alone[4:6]), torch.stack(first))
    assert torch.equal(torch.stack(alone[2:4] + alone[6:8]), torch.stack(second))
    assert torch.equal(torch.stack(alone[4:]), torch.stack(positions(4, 0, 1, 2)))
    assert len({tuple(row.tolist()) for row in alone}) == 8
    plain = batches._micro_batches([text], torch.device("cpu"), 0, args.data)
    assert next(plain)[0][1].eq(0).all()


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
    alone: Any = SimpleNamespace(data_rank=0, data_size=1)
    monkeypatch.setattr(batches, "_datasets", lambda *_: ([0] * 8, None, None))
    start, plan = Resumed(0, 0), args.batch_plan(1)
    batches.build_streams(args, ModelSpec.from_args(args, 9), plan, alone, eod=0, start=start)
    assert asked["pin_memory"] is cuda


def by_epochs(tmp_path: Path, **changes: Any) -> NeoXArgs:
    """48 documents of 50 tokens to train on: 149 samples, of which GPT-NeoX counts 148."""
    config = tiny_config(write_data(tmp_path), train_epochs=2, **changes)
    return NeoXArgs.from_dict({**config, "train_iters": changes.get("train_iters")})


def samples_of(args: NeoXArgs, rank: int, ranks: int, consumed: int = 0) -> Any:
    """The training micro-batches of one data-parallel rank."""
    plan, parallel = args.batch_plan(ranks), SimpleNamespace(data_rank=rank, data_size=ranks)
    start = Resumed(0, consumed)
    spec = ModelSpec.from_args(args, 64)
    stream, _, _ = batches.build_streams(args, spec, plan, parallel, eod=0, start=start)  # type: ignore[arg-type]
    return ([tuple(row.tolist()) for row in tokens] for tokens, _ in stream)  # type: ignore[union-attr]


def test_epochs_are_gpt_neoxs_steps_and_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 micro-batches of 6 an epoch, then again from the first."""
    monkeypatch.setattr(batches.dist, "get_rank", lambda: 1)
    sizes = {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 3}
    args = batches.with_steps_of_epochs(by_epochs(tmp_path, **sizes), 2)
    assert args.optimization.train_iters == 24 * 2 // 5 == 9
    assert args.optimization.decay_iters == 9
    seen = [list(islice(samples_of(args, rank, 2), 48)) for rank in (0, 1)]
    assert all(rank[:24] == rank[24:] for rank in seen)
    once = [sample for rank in seen for batch in rank[:24] for sample in batch]
    assert len(once) == len(set(once)) == 24 * 6
    later = samples_of(args, 1, 2, consumed=8 * 30)
    assert next(later) == seen[1][40 % 24]


def test_one_dataset_in_a_list_is_the_same_as_data_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches.dist, "get_rank", lambda: 1)
    args = by_epochs(tmp_path, split="1,0,0")
    listed = args.replace(data_path=None, train_data_paths=[args.data.data_path])
    args, listed = (batches.with_steps_of_epochs(each, 1) for each in (args, listed))
    assert args.optimization.train_iters == listed.optimization.train_iters == 186 * 2 // 4
    assert list(islice(samples_of(args, 0, 1), 9)) == list(islice(samples_of(listed, 0, 1), 9))


def test_epochs_that_cannot_be_counted_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train_epochs = 2 is 74 steps .* train_iters is 8"):
        batches.with_steps_of_epochs(by_epochs(tmp_path, train_iters=8), 1)
    both = by_epochs(tmp_path, train_iters=74)
    assert batches.with_steps_of_epochs(both, 1) == both  # a saved config holds both
    with pytest.raises(DataError, match="less than one step of 400 samples"):
        batches.with_steps_of_epochs(by_epochs(tmp_path, train_batch_size=400), 1)
    with pytest.raises(DataError, match="less than one step of 200 samples"):
        large = {"train_batch_size": 200, "train_micro_batch_size_per_gpu": 200}
        batches.with_steps_of_epochs(by_epochs(tmp_path, **large), 1)
    with pytest.raises(ConfigError, match="one dataset per split"):
        by_epochs(tmp_path).replace(data_path=None, train_data_paths=["a", "b"])


def test_a_run_by_epochs_resumes_to_the_bit(tmp_path: Path) -> None:
    """Two passes of three steps; the second run stops in the second pass."""
    data = write_data(tmp_path)
    sizes = {"train_batch_size": 48, "train_micro_batch_size_per_gpu": 12, "num_workers": 1}
    found = []
    for name in ("whole", "stopped"):
        config = run_config(data, tmp_path / name, train_epochs=2, **sizes)
        del config["train_iters"]
        if name == "stopped":
            run({**config, "exit_interval": 4}, tmp_path / "c", 2)
        output = run(config, tmp_path / "c", 2)
        found.append(losses(tmp_path / name))
    assert "resuming after step 4" in output
    assert list(found[0]) == [1, 2, 3, 4, 5, 6]
    assert found[0] == found[1]
    saved = tmp_path / "whole" / "global_step6" / "configs" / "resolved.yml"
    again = NeoXArgs.from_files([saved])
    assert (again.train_epochs, again.train_iters) == (2, 6)
