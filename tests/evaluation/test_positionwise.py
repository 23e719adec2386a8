"""positionwise against losses computed from full logits."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.evaluation.positionwise import bucket_edges
from tests.evaluation.helpers import evaluated, official_texts, plain_losses, write_run


def test_positionwise_buckets_average_the_position_losses(tmp_path: Path) -> None:
    args, model = write_run(tmp_path, eval_lengths=[32])
    entry = evaluated(args, "positionwise")["results"]["valid"]
    texts = official_texts(args, 32, 5)["valid"]
    by_position = torch.stack([plain_losses(model, text) for text in texts]).mean(0)
    assert (entry["length"], entry["window"], entry["sequences"]) == (32, None, 5)
    edges = [(bucket["start"], bucket["end"]) for bucket in entry["buckets"]]
    assert edges == [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32)]
    assert entry["by_position"] == pytest.approx(by_position.tolist(), abs=1e-4)
    for bucket in entry["buckets"]:
        expected = float(by_position[bucket["start"] : bucket["end"]].mean())
        assert bucket["loss"] == pytest.approx(expected, rel=1e-5)
        assert bucket["tokens"] == 5 * (bucket["end"] - bucket["start"])


def test_positionwise_with_a_window_is_the_windowed_model(tmp_path: Path) -> None:
    args, model = write_run(tmp_path, eval_lengths=[32])
    plain = evaluated(args, "positionwise")
    windowed = evaluated(args.replace(eval_window=4), "positionwise_window4")
    texts = official_texts(args, 32, 5)["valid"]
    model.set_window(4)
    by_position = torch.stack([plain_losses(model, text) for text in texts]).mean(0)
    entry = windowed["results"]["valid"]
    assert entry["window"] == 4
    for bucket in entry["buckets"]:
        expected = float(by_position[bucket["start"] : bucket["end"]].mean())
        assert bucket["loss"] == pytest.approx(expected, rel=1e-5)
    first, last = entry["buckets"][0], entry["buckets"][-1]
    unlimited = plain["results"]["valid"]["buckets"]
    assert first["loss"] == pytest.approx(unlimited[0]["loss"], rel=1e-6)
    assert last["loss"] != pytest.approx(unlimited[-1]["loss"], rel=1e-4)


@pytest.mark.parametrize("length", [1, 2, 7, 64, 100])
@pytest.mark.parametrize(("kind", "count"), [("log", None), ("log", 5), ("linear", 4)])
def test_buckets_cover_every_position_once(length: int, kind: Any, count: int | None) -> None:
    edges = bucket_edges(length, kind, count)
    assert edges[0] == 0
    assert edges[-1] == length
    assert all(start < end for start, end in pairwise(edges))
