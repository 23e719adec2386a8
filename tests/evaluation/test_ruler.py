"""RULER's generators against their published definition, and its scores on hand-made cases."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from megatron.evaluation import ruler
from megatron.evaluation.ruler import by_depth, string_match_all
from megatron.evaluation.ruler_prompts import (
    NOISE,
    RULER_TASKS,
    RulerPrompt,
    distinct_words,
    fitted,
    smallest_length,
)
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


@pytest.mark.parametrize("name", RULER_TASKS)
@pytest.mark.parametrize("length", [2500, 5000, 9000])
def test_prompts_fill_the_length_with_room_for_the_answer(name: str, length: int) -> None:
    prompt = fitted(RULER_TASKS[name], BYTES, length, "a", 0.5)
    used = len(BYTES.tokenize(prompt.text)) + prompt.new_tokens
    assert length - 300 < used <= length
    assert prompt == fitted(RULER_TASKS[name], BYTES, length, "a", 0.5)
    assert prompt != fitted(RULER_TASKS[name], BYTES, length, "b", 0.5)
    published = {"vt": 30, "cwe": 120}.get(name, 128)
    answer = sum(len(f" {each}") for each in prompt.answers)
    assert prompt.full == (length >= (7000 if name == "cwe" else 4096))  # in bytes
    assert prompt.new_tokens == (published if prompt.full else 2 * answer + 8)


@pytest.mark.parametrize("name", RULER_TASKS)
def test_the_smallest_length_is_enough_and_one_less_is_not(name: str) -> None:
    smallest = smallest_length(RULER_TASKS[name], BYTES)
    made = fitted(RULER_TASKS[name], BYTES, smallest, "smallest", 0.5)
    assert made.shots == 0
    with pytest.raises(ValueError, match=rf"is {smallest} tokens long; use longer ruler_lengths"):
        fitted(RULER_TASKS[name], BYTES, smallest - 1, "smallest", 0.5)


@pytest.mark.parametrize(
    ("name", "keys", "values"),
    [("niah_single_1", 1, 1), ("niah_multikey_1", 4, 1), ("niah_multivalue", 1, 4)],
)
@pytest.mark.parametrize("depth", [0.0, 0.3, 0.99])
def test_needles_in_repeated_sentences(name: str, keys: int, values: int, depth: float) -> None:
    prompt = RULER_TASKS[name].question(40, Random("s"), depth, True)
    needles = NEEDLE.findall(prompt.text)
    assert Counter(Counter(key for key, _ in needles).values()) == {values: keys}
    asked = re.findall(
        r"special magic numbers? for ([a-z-]+) mentioned in the provided text (?:is|are)$",
        prompt.text,
    )
    assert [value for key, value in needles if key == asked[0]].sort() == [*prompt.answers].sort()
    lines = prompt.text.split("\n")[1:-1]
    assert sum(line == NOISE for line in lines) == 40
    place = next(i for i, line in enumerate(lines) if prompt.answers[0] in line)
    others = sum(bool(NEEDLE.match(line)) for line in lines[:place])
    assert place - others == int(depth * 41)
    assert prompt.depths[0] == pytest.approx((place - others) / 40)


def test_needles_among_needles() -> None:
    prompt = RULER_TASKS["niah_multikey_2"].question(30, Random("s"), 0.5, True)
    needles = NEEDLE.findall(prompt.text)
    assert len(needles) == 31
    asked = prompt.text.split(" mentioned in the provided text is")[0].rsplit(" ", 1)[1]
    assert [value for key, value in needles if key == asked] == list(prompt.answers)


@pytest.mark.parametrize("size", [2, 30])
def test_a_chain_of_assignments(size: int) -> None:
    prompt = RULER_TASKS["vt"].question(size, Random("s"), 0.5, True)
    assignments = re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", prompt.text)
    value = assignments[0][1]
    assert [name for name, _ in assignments] == list(prompt.answers) and len(assignments) == 5
    assert [source for _, source in assignments[1:]] == list(prompt.answers[:-1])
    assert value.isdigit() and prompt.text.count(value) == 3
    assert prompt.text.endswith(f"5 variables are assigned the value {value}, they are:")
    assert list(prompt.depths) == sorted(prompt.depths) and len(set(prompt.depths)) == 5
    noise = prompt.text.count("There and back again.")
    assert noise == size


@pytest.mark.parametrize(("full", "often", "seldom"), [(True, 30, 3), (False, 6, 1)])
def test_common_words(full: bool, often: int, seldom: int) -> None:
    prompt = RULER_TASKS["cwe"].question(50, Random("s"), 0.5, full)
    entries = re.findall(r"(\d+)\. ([a-z-]+)", prompt.text)
    assert [int(number) for number, _ in entries] == list(range(1, 10 * often + 40 * seldom + 1))
    counts = Counter(word for _, word in entries)
    assert {word for word, count in counts.items() if count == often} == set(prompt.answers)
    assert sorted(counts.values()) == [seldom] * 40 + [often] * 10
    shot = RULER_TASKS["cwe"].example(Random("e"), full)
    assert shot.count("What are the 10 most common words") == 1 and shot.endswith("\n")


def test_an_example_is_put_in_front_when_it_takes_at_most_half() -> None:
    example = len(BYTES.tokenize(RULER_TASKS["vt"].example(Random("a/example"), True)))
    with_one = fitted(RULER_TASKS["vt"], BYTES, 2 * example + 20, "a", 0.5)
    without = fitted(RULER_TASKS["vt"], BYTES, 2 * example - 20, "a", 0.5)
    assert (with_one.shots, without.shots) == (1, 0)
    assert with_one.text.count("Question:") == 2 and without.text.count("Question:") == 1


def test_no_word_lies_inside_another() -> None:
    """Otherwise naming one would count for both."""
    single = [word for word in distinct_words() if "-" not in word]
    assert len(single) > 400 and len(set(distinct_words())) == len(distinct_words())
    assert not [(a, b) for a in single for b in single if a != b and a in b]


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
    monkeypatch.setattr(ruler.TextGenerator, "samples", reader(1.0))
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
    monkeypatch.setattr(ruler.TextGenerator, "samples", reader(0.4))
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
