"""Suites are data: complete, valid, and for `paper` exactly the official recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.errors import ReproduceError
from megatron.neox_arguments import NeoXArgs
from megatron.paper.suite import load_suite
from megatron.paper.suite_file import available_suites, read_suite_file
from tests.conftest import REPOSITORY

SEEDS = [1235, 1236, 1237, 1238, 1239]


def test_shipped_suites() -> None:
    assert {"paper", "laptop", "demo", "smoke", "study", "recall"} <= set(available_suites())


@pytest.mark.parametrize("name", ["paper", "laptop", "demo", "smoke", "study", "recall"])
def test_every_config_is_accepted_by_the_loader(name: str) -> None:
    """One run per model and method: data and seed do not change what is valid."""
    runs = {(run.model, run.method): run for run in load_suite(name).runs}
    for run in runs.values():
        args = NeoXArgs.from_dict(dict(run.config))
        assert args.to_dict()["pos_emb"] == run.method


@pytest.mark.parametrize(("model", "shipped"), [("small", "small_bf16.yml"), ("large", "XL.yml")])
def test_paper_recipe_is_the_official_one(model: str, shipped: str) -> None:
    """The suite's models against the config files that users train by hand."""
    run = next(r for r in load_suite("paper").runs if (r.model, r.method) == (model, "kerple_log"))
    ours = NeoXArgs.from_dict(dict(run.config)).to_dict()
    official = NeoXArgs.from_files([REPOSITORY / "configs" / shipped]).to_dict()
    of_the_run = {"seed", "save", "load", "data_path", "num_gpus", "vocab_file", "merge_file"}
    keys = {*ours, *official} - of_the_run
    different = {
        key: (ours.get(key), official.get(key))
        for key in keys
        if not key.startswith("eval_") and ours.get(key) != official.get(key)
    }
    assert not different


def test_paper_expands_to_every_experiment() -> None:
    suite = load_suite("paper")
    counts = {
        section.name: sum(section.name in run.sections for run in suite.runs)
        for section in suite.sections
    }
    assert counts == {
        "main": 6 * 3 * 5,
        "speed": 6 * 5,
        "complicated": 2 * 3 * 5,
        "gaussian": 4 * 3 * 5,
        "long": 3 * 3 * 5,
        "large": 3 * 3 * 5,
        "wikitext103": 2 * 2,
    }
    assert sorted({run.seed for run in suite.runs}) == SEEDS
    # Speed is measured in the runs of the main table, not in runs of its own.
    assert len(suite.runs) == sum(counts.values()) - counts["speed"]


def test_laptop_covers_what_the_issue_asks_for() -> None:
    suite = load_suite("laptop")
    assert len({run.seed for run in suite.runs}) >= 3
    assert len({run.data for run in suite.runs}) >= 2
    main = next(section for section in suite.sections if section.name == "main")
    assert len(main.methods) == 6
    for run in suite.runs:
        assert run.train_length >= 128
        assert max(run.config["eval_lengths"]) == 32 * run.train_length


def test_only_selects_sections_methods_data_and_runs() -> None:
    def names(*only: str) -> list[str]:
        return [run.name for run in load_suite("paper", only).runs]

    assert len(names("long")) == 45
    assert len(names("main", "alibi", "rpe")) == 30
    assert len(names("main", "github", "alibi")) == 5
    assert names("small.github.alibi.123[67]") == [
        "small.github.alibi.1236",
        "small.github.alibi.1237",
    ]
    assert [run.name for run in load_suite("paper/long").runs] == names("long")


def test_what_only_leaves_out_is_not_checked() -> None:
    """The 1.3B runs are fp16 by a block of their own, none of the small ones' business."""
    fp32 = {"precision": "fp32"}
    assert load_suite("paper", ["small.*"], sets=fp32).runs
    with pytest.raises(ReproduceError, match=r"large.*fp16.enabled"):
        load_suite("paper", sets=fp32)


def test_only_narrows_the_tables_too() -> None:
    (section,) = load_suite("paper", ["main", "github", "kerple_log", "rpe"]).sections
    assert section.table is not None
    assert section.table.methods == ("kerple_log", "rpe")
    assert [data.name for data in section.table.data] == ["github"]


@pytest.mark.parametrize(
    ("name", "only", "message"),
    [
        ("papr", [], "no suite 'papr'"),
        ("paper", ["githb"], "no such section, method, data set or run"),
        ("paper", ["long", "rotary"], "matches all"),
    ],
)
def test_wrong_names_are_explained(name: str, only: list[str], message: str) -> None:
    with pytest.raises(ReproduceError, match=message):
        load_suite(name, only)


TINY = {
    "num_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "seq_length": 8,
    "max_position_embeddings": 8,
    "train_iters": 1,
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sections": {"main": {"title": "x"}}}, "sections.main.models"),
        ({"nonsense": 1}, "nonsense"),
        ({"data": {"../../d": {"title": "D"}}, "sections": {}}, "cannot be a name"),
        ({"models": {"../m": {"config": {}}}, "sections": {}}, "cannot be a name"),
        ({"models": {"a": {"config": {}, "extends": "b"}}}, "is not defined|does not exist"),
        ({"models": {"tiny": {"config": {}, "extends": "tiny"}}}, "extends itself"),
        ({"models": {"tiny": {"config": {}}}}, "seq_length is missing"),
        ({"models": {"tiny": {"config": {"seq_length": "NaN"}}}}, "seq_length is 'NaN'"),
        ({"method_config": {"alibi": {"num_layerz": 2}}}, "run tiny.d.alibi.1: .*num_layerz"),
    ],
)
def test_a_broken_suite_file_names_the_place(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    content = {
        "about": "x",
        "seeds": [1],
        "models": {"tiny": {"config": TINY}},
        "data": {"d": {"title": "D"}},
        "sections": {"s": {"title": "S", "models": ["tiny"], "methods": ["alibi"], "data": ["d"]}},
    }
    path = tmp_path / "mine.yml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    assert len(load_suite(str(path)).runs) == 1
    path.write_text(yaml.safe_dump({**content, **change}), encoding="utf-8")
    with pytest.raises(ReproduceError, match=message):
        load_suite(str(path))


def test_a_suite_of_ones_own(tmp_path: Path) -> None:
    source = REPOSITORY / "megatron" / "paper" / "suites" / "smoke.yml"
    path = tmp_path / "mine.yml"
    path.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    suite = load_suite(str(path), runs_root=tmp_path)
    assert suite.name == "mine"
    assert suite.runs[0].config["save"] == f"{tmp_path}/mine/{suite.runs[0].name}"


def test_hashes_follow_what_each_step_depends_on() -> None:
    def run(**sets: object):  # type: ignore[no-untyped-def]
        return load_suite("smoke", ["kerple_log"], sets=sets).runs[0]

    base = run()
    step = base.evaluations[0]
    assert run(train_iters=21).train_hash != base.train_hash
    assert run(save="elsewhere").train_hash == base.train_hash
    more = run(eval_num_sequences=3)
    assert more.train_hash == base.train_hash
    assert more.step_hash(step) != base.step_hash(step)
    assert len({base.step_hash(item) for item in base.evaluations}) == len(base.evaluations)


@pytest.mark.parametrize("place", ["model", "data", "section", "method", "extends"])
def test_names_that_lead_out_of_the_runs_folder_are_refused(tmp_path: Path, place: str) -> None:
    bad = "../../elsewhere"
    names = {
        kind: bad if kind == place else kind for kind in ("model", "data", "section", "method")
    }
    model: dict[str, Any] = {"config": {}}
    if place == "extends":
        model["extends"] = names["model"]
    content = {
        "about": "x",
        "seeds": [1],
        "models": {names["model"]: model},
        "data": {names["data"]: {"title": "d"}},
        "sections": {
            names["section"]: {
                "title": "s",
                "models": [names["model"]],
                "methods": [names["method"]],
                "data": [names["data"]],
            }
        },
    }
    path = tmp_path / "suite.yml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ReproduceError, match=r"becomes the name of a folder|extends itself"):
        read_suite_file(str(path))
