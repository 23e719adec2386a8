"""Suites are data: complete, valid, and for `paper` exactly the official recipe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.commands.compare import suite_content
from megatron.errors import ReproduceError
from megatron.neox_arguments import NeoXArgs, allow_kernel
from megatron.neox_arguments.yaml_files import dump_yaml
from megatron.paper.suite import load_suite
from tests.conftest import REPOSITORY

SEEDS = [1235, 1236, 1237, 1238, 1239]


@pytest.mark.parametrize(
    "name", ["paper", "laptop", "demo", "smoke", "study", "recall", "budget", "rope_to_kerple"]
)
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


def test_only_shows_no_section_without_runs() -> None:
    """Of two sections that are asked for, the one without such data has nothing to show."""
    suite = load_suite("study", ["main", "english", "english_docs"])
    assert [section.name for section in suite.sections] == ["english"]


def test_a_section_with_the_name_of_its_data_set_is_the_section() -> None:
    suite = load_suite("paper", ["main", "wikitext103", "kerple_log"])
    assert [section.name for section in suite.sections] == ["main", "wikitext103"]
    assert {run.data for run in suite.runs} == {"openwebtext2", "github", "arxiv", "wikitext103"}


def test_a_table_does_not_mix_models_of_one_training_length() -> None:
    with pytest.raises(ReproduceError, match="two of wiki_512, wiki_2048 have the same"):
        load_suite("paper", ["wikitext103"], sets={"seq_length": 32})


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


def test_set_shrinks_a_suite_with_its_lengths_and_tables() -> None:
    sets = {"seq_length": 32, "eval_lengths": [32, 64], "train_iters": 10}
    suite = load_suite("paper", ["main", "github"], sets=sets)
    assert {tuple(run.config["eval_lengths"]) for run in suite.runs} == {(32, 64)}
    assert not [step for run in suite.runs for step in run.evaluations if step.length]
    table = suite.sections[0].table
    assert table is not None
    assert [(point.train_length, point.length) for point in table.points] == [(32, 32), (32, 64)]


def test_a_model_that_continues_another_begins_with_the_run_of_its_seed() -> None:
    suite = load_suite("rope_to_kerple")
    run = suite.run_named("fit10.stdlib.kerple_log.1236")
    assert run.base is not None
    assert run.base.directory == suite.run_named("base.stdlib.rotary.1236").directory
    assert run.base.train_hash == suite.run_named("base.stdlib.rotary.1236").train_hash
    assert run.config["load_positions"] == "fresh"
    assert run.config["load"] == run.directory.as_posix()  # what is evaluated
    others = load_suite("rope_to_kerple", sets={"hidden_size": 128})
    same = {**others.run_named(run.name).config, "hidden_size": run.config["hidden_size"]}
    assert replace(others.run_named(run.name), config=same).train_hash != run.train_hash
    assert next(r for r in suite.runs if r.base is None).base is None


def test_a_suite_tells_how_it_is_named_again(tmp_path: Path) -> None:
    """With its file and the classes that the user allowed: what `status` advises can be pasted."""
    name = "examples.custom_kernel:RationalKernel"
    allow_kernel(name)
    own = tmp_path / "own.yml"
    own.write_text(dump_yaml(suite_content([name, "alibi"], "stdlib", [1])))
    flags = load_suite(str(own), runs_root="my runs").flags
    assert flags == f"--suite {own} --runs 'my runs' --allow-kernel {name}"
    assert load_suite("demo").flags == "--suite demo --runs runs"
