"""A tile that is faster is proposed, if it can run and gives the same numbers."""

from __future__ import annotations

import pytest
import torch

from megatron.engines.triton_tiles import ROW_MULTIPLE, Tiles, tiles_of
from tools.gpu_checks import tiles


def test_a_tile_is_proposed_if_it_is_faster_by_more_than_noise() -> None:
    place, rivals = (
        tiles.Place("dq", False, 64),
        {"a": Tiles(128, 64, 8, 2), "b": Tiles(64, 32, 4, 2)},
    )
    faster = tiles.judge(place, {"a": 0.9, "b": 0.95}, rivals, {}, half=True)
    line = '_TILES["dq"][True, False][64] = Tiles(queries=128, keys=64, warps=8, stages=2'
    assert faster.values["proposal"].startswith(line) and line in str(faster)
    hopper = tiles.judge(place, {"a": 0.9}, rivals, {}, half=True, hopper=True)
    assert hopper.values["proposal"].startswith('_HOPPER["dq", True, False, 64] = Tiles(')
    for ratios in ({"a": 0.98, "b": 1.2}, {}):
        finding = tiles.judge(place, ratios, rivals, {"a": "out of resource"}, half=True)
        assert finding.values["proposal"] is None and "the table stays" in finding.detail


def test_tiles_with_other_numbers_do_not_fit() -> None:
    one = [torch.ones(2), torch.ones(3)]
    assert tiles._problem(lambda: one, one) is None
    assert "other numbers" in str(tiles._problem(lambda: [one[0], one[1] * 1.01], one))
    assert "other numbers" in str(tiles._problem(lambda: [one[0] * float("nan"), one[1]], one))

    def too_large() -> list[torch.Tensor]:
        raise RuntimeError("out of resource: shared memory\nmore")

    assert tiles._problem(too_large, one) == "out of resource: shared memory"


@pytest.mark.parametrize(("place", "rivals"), tiles.SHORT_LIST.items(), ids=str)
def test_the_short_list_holds_rivals_that_can_run(
    place: tiles.Place, rivals: tuple[Tiles, ...]
) -> None:
    now = tiles_of(place.kernel, place.dim, torch.bfloat16, place.weighted)
    assert now not in rivals and len(set(rivals)) == len(rivals)
    assert all(ROW_MULTIPLE % rival.queries == 0 for rival in rivals)
