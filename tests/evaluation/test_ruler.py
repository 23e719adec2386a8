"""RULER's generators against their published definition, and its scores on hand-made cases."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron.evaluation.ruler import by_depth, string_match_all
from megatron.evaluation.ruler_prompts import (
    RulerPrompt,
)
from megatron.generation.text import TextGenerator
from megatron.tokenizer import build_tokenizer
from tests.evaluation.helpers import result_of, write_run

BYTES = build_tokenizer("CharLevelTokenizer")
NEEDLE = re.compile(r"One of the special magic numbers for ([a-z]+-[a-z]+) is: (\d{7})\.")


def test_the_score_is_the_share_of_strings_found() -> None:
    # Worked out by hand from the definition: (1/2 + 1 + 0) / 3.
    texts = ["the Apple fell", "12 and 34", ""]
    references = [["apple", "pear"], ["12", "34"], ["x"]]
    assert string_match_all(texts, references) == 50.0
    assert string_match_all(["x"], [["a", "b", "x"]]) == 33.33


def test_scores_by_depth_count_each_string_where_it_lay() -> None:
    prompts = [
        RulerPrompt("", ("1", "2"), (0.05, 0.95)),
        RulerPrompt("", ("1", "2"), (0.1, 1.0)),
        RulerPrompt("", ("3",), (0.5,)),
    ]
    found = by_depth(["1", "1 2", "4"], prompts)
    assert [(part["score"], part["strings"]) for part in found] == [
        (100.0, 2),
        (None, 0),
        (0.0, 1),
        (None, 0),
        (50.0, 2),
    ]
    assert by_depth(["a"], [RulerPrompt("", ("a",))]) == []


def reader(share: float) -> Any:
    """Reads the last `share` of the lines of a prompt and answers from them."""

    def samples(self: Any, prompts: list[str], quiet: bool = False) -> list[dict[str, str]]:
        records = []
        for prompt in prompts:
            *lines, question = prompt.split("\n")[1:]
            key = question.split(" mentioned in the provided text")[0].rsplit(" ", 1)[1]
            seen = NEEDLE.findall("\n".join(lines[int((1 - share) * len(lines)) :]))
            records.append({"text": " ".join(value for name, value in seen if name == key)})
        return records

    return samples


def test_the_task_from_a_checkpoint_with_readers_in_place_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args, _ = write_run(
        tmp_path,
        ruler_tasks=["niah_single_1", "niah_multivalue"],
        ruler_lengths=[128, 5000],
        ruler_samples=20,
    )
    monkeypatch.setattr(TextGenerator, "samples", reader(1.0))
    content = result_of(args, "ruler")
    assert [
        (cell["task"], cell["length"], cell["score"]) for cell in content["results"]["grid"]
    ] == [
        ("niah_single_1", 5000, 100.0),
        ("niah_multivalue", 5000, 100.0),
    ]
    assert {error["length"] for error in content["errors"]} == {128}
    said = capsys.readouterr().out
    assert "smallest lengths: niah_single_1" in said and "not measured: niah_single_1 128" in said
    monkeypatch.setattr(TextGenerator, "samples", reader(0.4))
    cell = result_of(args.replace(seed=99), "ruler")["results"]["grid"][0]
    assert [part["score"] for part in cell["by_depth"]] == [0.0, 0.0, 0.0, 100.0, 100.0]
    assert cell["score"] == 40.0


def test_the_task_with_a_model_and_a_mistaken_name(tmp_path: Path) -> None:
    args, _ = write_run(
        tmp_path, ruler_tasks=["niah_single_1"], ruler_lengths=[500], ruler_samples=2
    )
    (cell,) = result_of(args, "ruler")["results"]["grid"]
    assert cell["score"] == 0.0 and cell["samples"] == 2
    from megatron.evaluation.evaluator import run_evaluation

    assert run_evaluation(args.replace(eval_tasks=["ruler"], ruler_tasks=["niah"])) == 1
