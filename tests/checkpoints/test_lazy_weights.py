"""Weights that are made when they are asked for."""

from __future__ import annotations

import torch

from megatron.checkpoints.lazy_weights import LazyWeights, by_layer, changed, outlines, replaced


def test_each_weight_is_made_when_it_is_asked_for_and_not_before() -> None:
    made: list[str] = []

    def make(name: str) -> torch.Tensor:
        made.append(name)
        return torch.full((2, 3), float(len(name)))

    shape = torch.empty(2, 3, device="meta")
    weights = LazyWeights({"a": shape, "bb": shape}, make)
    halves = changed(weights, lambda name, whole: whole.to(torch.bfloat16)[:1])
    other = replaced(halves, {"bb": torch.zeros(5), "c": torch.ones(1)}, dropped=["a"])
    assert {name: (tuple(o.shape), o.dtype) for name, o in outlines(other).items()} == {
        "bb": ((5,), torch.float32),
        "c": ((1,), torch.float32),
    }
    assert "a" not in other
    assert made == []
    assert halves["bb"].tolist() == [[2.0, 2.0, 2.0]]
    assert made == ["bb"]
    assert other["bb"].tolist() == [0.0] * 5
    assert made == ["bb"]


def test_one_layers_file_is_kept_at_a_time() -> None:
    read: list[int] = []
    whole = {f"{index}.{name}": torch.full((2,), index) for index in (1, 2, 3) for name in "ab"}

    def file(index: int) -> dict[str, torch.Tensor]:
        read.append(index)
        return {name: each for name, each in whole.items() if name.startswith(f"{index}.")}

    weights = by_layer(whole, file)
    for name in ("1.a", "2.a", "2.b", "3.a", "2.a"):
        assert torch.equal(weights[name], whole[name])
    assert read == [2, 3, 2]  # 1 is the kernel's, which layers share
