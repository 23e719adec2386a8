"""The form of a suite file: what is wrong with one of one's own is named with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.errors import ReproduceError
from megatron.evaluation.perplexity import Extrapolation
from megatron.evaluation.positionwise import Positionwise
from megatron.paper.suite import load_suite
from megatron.paper.suite_file import (
    PERPLEXITY,
    POSITIONWISE,
    SUITE_DIRECTORY,
    available_suites,
    read_suite_file,
)
from tests.conftest import REPOSITORY


def test_shipped_suites() -> None:
    ours = {"paper", "laptop", "demo", "smoke", "study", "recall", "budget", "dape_mini"}
    others = {"dape", "cable", "bam"}
    assert ours | others <= set(available_suites())


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


SECTION = {"title": "S", "models": ["tiny"], "methods": ["alibi"], "data": ["d"]}
VARIANT = {"methods": ["alibi"], "config": {"attention_config": [[["global"], 1]]}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sections": {"main": {"title": "x"}}}, "sections.main.models"),
        ({"nonsense": 1}, "nonsense"),
        ({"data": {"../../d": {"title": "D"}}, "sections": {}}, "cannot be a name"),
        ({"models": {"../m": {"config": {}}}, "sections": {}}, "cannot be a name"),
        ({"models": {"a": {"config": {}, "extends": "b"}}}, "is not defined|does not exist"),
        ({"models": {"tiny": {"config": {}, "extends": "tiny"}}}, "extends itself"),
        ({"contrasts": {"../c": {"title": "C"}}}, "cannot be a name"),
        ({"sections": {"s": SECTION | {"variants": {"../v": VARIANT}}}}, "cannot be a name"),
        (
            {"sections": {"s": SECTION | {"variants": {"v": VARIANT | {"methods": ["alibbi"]}}}}},
            "variants' methods: 'alibbi' is not defined",
        ),
        ({"models": {"tiny": {"config": {}}}}, "seq_length is missing"),
        ({"models": {"tiny": {"config": {"seq_length": "NaN"}}}}, "seq_length is 'NaN'"),
        ({"models": {"tiny": {"config": TINY | {"launcher": "pdsh"}}}}, "launcher = 'pdsh'"),
        ({"models": {"tiny": {"config": TINY | {"launcher-args": "-R exec"}}}}, "launcher_args"),
        ({"method_config": {"alibi": {"hostfile": "/x"}}}, "hostfile.*--set hostfile="),
        ({"data": {"d": {"config": {"eval_include_path": "x"}}}}, "eval_include_path"),
        ({"data": {"d": {"prepare": ["-d", "/outside"]}}}, "'-d' is not for a suite"),
        ({"data": {"d": {"prepare": ["--input", "/etc/passwd"]}}}, "/etc/passwd"),
        ({"data": {"d": {"prepare": ["--input=../../x"]}}}, "--input=../../x"),
        ({"data": {"d": {"prepare": ["--data=/outside"]}}}, "--data=/outside"),
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
        "sections": {"s": SECTION},
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


def test_a_variant_may_change_lists(tmp_path: Path) -> None:
    """Also where a run belongs to two sections, whose evaluations are joined."""
    both = {**SECTION, "lengths": [8], "variants": {"v": VARIANT}}
    content = {
        "about": "x",
        "seeds": [1],
        "models": {"tiny": {"config": TINY}},
        "data": {"d": {"title": "D"}},
        "sections": {"one": both, "two": both},
    }
    path = tmp_path / "mine.yml"
    path.write_text(json.dumps(content))
    (run,) = load_suite(str(path)).runs
    assert [step.name for step in run.steps] == ["train", "extrapolation", "extrapolation-v"]


def test_a_question_may_not_have_a_sections_name(tmp_path: Path) -> None:
    text = (SUITE_DIRECTORY / "study.yml").read_text(encoding="utf-8")
    path = tmp_path / "mine.yml"
    path.write_text(text.replace("\n  kernel_decay:", "\n  decay:"))
    with pytest.raises(ReproduceError, match="contrasts: decay: a section has this name"):
        load_suite(str(path))


def test_the_tasks_of_the_format_are_those_of_the_package() -> None:
    assert (Extrapolation.name, Positionwise.name) == (PERPLEXITY, POSITIONWISE)
