"""Every layout trains the same model: dp, mp, pp, sp and ZeRO 0-3 against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoints import read_checkpoint
from megatron.neox_arguments.catalogue import METHODS
from tests.training.cases import (
    ON_TWO,
    labelled,
    layout,
    precision,
    run_cases,
    tiny_config,
    write_data,
)

STEPS = 4
ONE = {
    "zero1": layout(zero=1),
    "zero2": layout(zero=2),
    "zero3": layout(zero=3),
    "pp1": layout(pp=1),
}
SHARED = {
    "sp2": layout(sp=2),
    "sp2_zero1": layout(sp=2, zero=1),
    "sp2_zero2": layout(sp=2, zero=2),
    "sp2_zero3": layout(sp=2, zero=3),
    "sp2_pp1": layout(sp=2, pp=1),
}
"""Two processes that share each sequence."""
TWO = {**ON_TWO, "pp1_dp2": layout(pp=1), **SHARED}
FOUR = {
    "sp4": layout(sp=4),
    "sp4_zero3": layout(sp=4, zero=3),
    **{f"sp2_dp2_zero{zero}": layout(sp=2, zero=zero) for zero in range(4)},
    "sp2_mp2": layout(sp=2, mp=2),
    "sp2_mp2_zero1": layout(sp=2, mp=2, zero=1),
    "sp2_pp2": layout(sp=2, pp=2),
    "sp2_pp2_zero1": layout(sp=2, pp=2, zero=1),
}
POSITIONS: dict[str, dict[str, Any]] = {
    "kerple_log": {},
    "rpe": {"pos_emb": "rpe"},
    "alibi": {"pos_emb": "alibi"},
    "rotary": {"pos_emb": "rotary"},
    "learned": {"pos_emb": "learned"},
    "tied": {"no_weight_tying": False},
    "two_tables": {"pos_emb": "kerple_bias_wht", "num_kv_heads": 2},
    "per_layer": {"kerple_share": "per_layer"},
    "row_head": {"output_layer_parallelism": "row"},
    "score_terms": {"forget_gate": True, "attention_sinks": True, "scalable_softmax": True},
    "query_features": {"pos_emb": "kerple_inkling", "inkling_distances": 7},
    "pattern": {
        "num_layers": 3,
        "layer_pattern": [
            {"pos_emb": "kerple_log", "sliding_window_width": 5, "forget_gate": True},
            {"pos_emb": "rpe", "attention_sinks": True, "attention_temperature": {"floor": 4}},
        ],
    },
    "packed": {
        "pos_emb": "kerple_log",
        "forget_gate": True,
        "reset_attention_mask": True,
        "reset_position_ids": True,
        "tokenizer_type": "CharLevelTokenizer",  # whose documents end with 0
    },
    "drawn": {"pos_emb": "rotary", "randomized_positions": 50},
    "labels": {"eod_mask_loss": True, "tokenizer_type": "CharLevelTokenizer"},
}
FULL = ("kerple_log",)
SOME = ("mp2", "pp2", "sp2")
MORE = {
    "rpe": (*SOME, "dp2_zero3", "pp2_zero1"),
    "tied": SOME[:2],
    "per_layer": SOME[:2],
    "row_head": SOME[:2],
    "score_terms": (*SOME, "dp2_zero3", "sp2_zero3"),
    "query_features": (*SOME, "dp2_zero3"),
    "pattern": (*SOME, "dp2_zero3", "pp2_zero1"),
    "packed": (*SOME, "dp2_zero3", "pp2_zero1", "sp2_zero1", "sp2_pp1"),
    "labels": (*SOME, "dp2"),
}
PRECISIONS = ("fp32", "bf16")
# Relative. bf16 keeps 8 bits: sums in another order differ in the last of them.
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2}
# The kernel's gradient is a sum of many terms that nearly cancel. A gradient that misses a rank, a
# stage or a head is off by half or more.
KERNEL_TOLERANCE = {"fp32": 1e-4, "bf16": 0.25}


def _table() -> list[tuple[str, str, str, int]]:
    """(positions, precision, layout, processes) of every case beside the references."""
    rows = []
    for position in POSITIONS:
        for name in PRECISIONS if position in FULL else PRECISIONS[:1]:
            if position in FULL:
                rows += [(position, name, one, 1) for one in ONE]
            some = MORE.get(position, SOME)
            full = [two for two in TWO if two not in ("sp2_zero1", "sp2_zero3", "sp2_pp1")]
            rows += [(position, name, two, 2) for two in (full if position in FULL else some)]
    return rows


TABLE = _table()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("layouts")
    plain = write_data(directory)
    packed = write_data(directory / "packed", documents=400, length=7, end=0)
    own: dict[str, dict[str, Any]] = {
        "packed": {"data_path": packed},
        "labels": labelled(packed, "pack_until_overflow"),
    }
    cases: dict[int, dict[str, Any]] = {1: {}, 2: {}}
    references = {(position, name, "one", 1) for position, name, _, _ in TABLE}
    for position, name, arrangement, processes in [*sorted(references), *TABLE]:
        place = {"one": layout(), **ONE, **TWO}[arrangement]
        key = f"{position}-{name}-{arrangement}"
        changes = {**POSITIONS[position], **own.get(position, {})}
        cases[processes][key] = {
            "config": tiny_config(plain, **changes, **precision(name), **place),
            "steps": STEPS,
            "save": str(directory / key) if name == "fp32" else None,
            "validate": True,
        }
    found = run_cases(cases[1], directory, 1) | run_cases(cases[2], directory, 2)
    return {**found, "directory": directory}


@pytest.mark.parametrize(("position", "name", "arrangement", "processes"), TABLE)
def test_same_training_as_one_process(
    results: dict[str, Any], position: str, name: str, arrangement: str, processes: int
) -> None:
    reference = results[f"{position}-{name}-one"]
    result = results[f"{position}-{name}-{arrangement}"]
    close = {"rel": TOLERANCE[name], "abs": 0.0}
    assert result["losses"] == pytest.approx(reference["losses"], **close)
    assert result["valid_loss"] == pytest.approx(reference["valid_loss"], **close)
    assert result["grad_norms"] == pytest.approx(reference["grad_norms"], **close)
    assert result["losses"][-1] < result["losses"][0], "nothing was learned"


@pytest.mark.parametrize(
    ("position", "arrangement"), [(row[0], row[2]) for row in TABLE if row[1] == "bf16"]
)
def test_bf16_clips_by_the_norm_of_fp32(
    results: dict[str, Any], position: str, arrangement: str
) -> None:
    """A norm that misses a tensor-parallel slice or a stage is far off, and so is the clipping."""
    norm = results[f"{position}-bf16-{arrangement}"]["grad_norms"][0]
    assert norm == pytest.approx(results[f"{position}-fp32-one"]["grad_norms"][0], rel=1e-2)


@pytest.mark.parametrize(("position", "name", "arrangement", "processes"), TABLE)
def test_same_kernel_updates_and_equal_replicas(
    results: dict[str, Any], position: str, name: str, arrangement: str, processes: int
) -> None:
    reference = results[f"{position}-{name}-one"]
    result = results[f"{position}-{name}-{arrangement}"]
    assert result["replicas_agree"]
    if position in ("alibi", "rotary", "learned", "drawn"):
        assert result["kernels"] == {}
        return
    first_stage = result["kernels"].keys()  # with a kernel per layer, a stage has its own layers
    assert first_stage
    for parameter in first_stage:
        before = torch.tensor(reference["kernels_before"][parameter])
        expected = torch.tensor(reference["kernels"][parameter]) - before
        update = torch.tensor(result["kernels"][parameter]) - before
        assert expected.norm() > 0, "the kernel did not learn"
        assert (update - expected).norm() / expected.norm() < KERNEL_TOLERANCE[name]


@pytest.mark.parametrize(
    ("position", "arrangement"), [(row[0], row[2]) for row in TABLE if row[1] == "fp32"]
)
def test_same_checkpoint_after_gathering(
    results: dict[str, Any], position: str, arrangement: str
) -> None:
    root: Path = results["directory"]
    reference = read_checkpoint(root / f"{position}-fp32-one").weights
    weights = read_checkpoint(root / f"{position}-fp32-{arrangement}").weights
    assert weights.keys() == reference.keys()
    for name, expected in reference.items():
        torch.testing.assert_close(weights[name].float(), expected.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("arrangement", "expected"), [("dp2", 1), ("pp1_dp2", 1), ("mp2", 2), ("pp2", 2)]
)
def test_a_step_tells_its_scalars_in_one_reduction(
    results: dict[str, Any], arrangement: str, expected: int
) -> None:
    """One for the loss and all flags; before it the norm, where several ranks share the model."""
    steps = results[f"kerple_log-fp32-{arrangement}"]["scalar_collectives"]
    assert [len(found) for found in steps] == [expected] * STEPS


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_adds_its_own_norm_and_overflow_alone(results: dict[str, Any], zero: int) -> None:
    last = results[f"kerple_log-fp32-dp2_zero{zero}"]["scalar_collectives"][-1]
    assert last == ["all_reduce"] * 3


@pytest.mark.parametrize("arrangement", ["zero3", "dp2_zero3"])
@pytest.mark.parametrize("name", PRECISIONS)
def test_zero_3_draws_the_same_model_and_no_rank_holds_it_whole(
    results: dict[str, Any], name: str, arrangement: str
) -> None:
    """A matrix is cut up before the next is drawn; without ZeRO 3 all of them are whole."""
    reference = results[f"kerple_log-{name}-one"]
    result = results[f"kerple_log-{name}-{arrangement}"]
    assert result["weights_before"] == reference["weights_before"]
    assert result["whole_at_once"] <= 1
    assert reference["whole_at_once"] > 8


DOCUMENTS = {**POSITIONS["packed"], "eod_mask_loss": True}
ON_FOUR: dict[str, dict[str, Any]] = {
    "grouped": {"num_attention_heads": 16, "num_kv_heads": 8, "pos_emb": "kerple_bias_wht"},
    "score_terms": POSITIONS["score_terms"],
    "documents": DOCUMENTS,
    "rotary_documents": {**DOCUMENTS, "pos_emb": "rotary", "forget_gate": False},
    "learned_documents": {**DOCUMENTS, "pos_emb": "learned", "forget_gate": False},
    "head_norms": {"use_qk_layernorm": True, "checkpoint_activations": True},
}
NAMES = sorted(METHODS)
PIECES = [(tuple(NAMES[i::5]), 2) for i in range(5)] + [((name,), 4) for name in ON_FOUR]


@pytest.mark.slow
@pytest.mark.parametrize(("names", "processes"), PIECES)
def test_every_method_on_ranks_that_share_sequences(
    tmp_path: Path, names: tuple[str, ...], processes: int
) -> None:
    """Each positional embedding on two processes, and documents and grouped heads on four."""
    plain = write_data(tmp_path)
    packed = write_data(tmp_path / "packed", documents=400, length=7, end=0)

    def case(name: str, place: dict[str, Any]) -> dict[str, Any]:
        changes = ON_FOUR[name] if processes == 4 else {"pos_emb": name}
        data = packed if "documents" in name else plain
        return {"config": tiny_config(data, **changes, **place), "steps": 2, "validate": True}

    layouts = FOUR if processes == 4 else {"sp2": layout(sp=2)}
    expected = run_cases({name: case(name, layout()) for name in names}, tmp_path, 1)
    cases = {
        (name, place): case(name, layouts[place])
        for name in names
        for place in layouts
        if (name, "mp" in place) != ("head_norms", True)
    }
    asked = {"-".join(key): asked for key, asked in cases.items()}
    found = run_cases(asked, tmp_path, processes)
    for name, place in cases:
        reference, result = expected[name], found[f"{name}-{place}"]
        for key in ("losses", "valid_loss", "grad_norms"):
            close = pytest.approx(reference[key], rel=TOLERANCE["fp32"])
            assert result[key] == close, (name, place, key)
        assert result["replicas_agree"], (name, place)
