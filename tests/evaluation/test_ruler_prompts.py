"""RULER's generators against their published definition."""

from __future__ import annotations

import re
from collections import Counter
from random import Random

import pytest

from megatron.evaluation.ruler_prompts import (
    NOISE,
    RULER_TASKS,
    distinct_words,
    longest_prompt,
    smallest_length,
)
from megatron.tokenizer import build_tokenizer

BYTES = build_tokenizer("CharLevelTokenizer")
NEEDLE = re.compile(r"One of the special magic numbers for ([a-z]+-[a-z]+) is: (\d{7})\.")


@pytest.mark.parametrize("name", RULER_TASKS)
@pytest.mark.parametrize("length", [2500, 5000, 9000])
def test_prompts_fill_the_length_with_room_for_the_answer(name: str, length: int) -> None:
    prompt = longest_prompt(RULER_TASKS[name], BYTES, length, "a", 0.5)
    used = len(BYTES.tokenize(prompt.text)) + prompt.new_tokens
    assert length - 300 < used <= length
    assert prompt == longest_prompt(RULER_TASKS[name], BYTES, length, "a", 0.5)
    assert prompt != longest_prompt(RULER_TASKS[name], BYTES, length, "b", 0.5)
    published = {"vt": 30, "cwe": 120}.get(name, 128)
    answer = sum(len(f" {each}") for each in prompt.answers)
    assert prompt.full == (length >= (7000 if name == "cwe" else 4096))  # in bytes
    assert prompt.new_tokens == (published if prompt.full else 2 * answer + 8)


@pytest.mark.parametrize("name", RULER_TASKS)
def test_the_smallest_length_is_enough_and_one_less_is_not(name: str) -> None:
    smallest = smallest_length(RULER_TASKS[name], BYTES)
    made = longest_prompt(RULER_TASKS[name], BYTES, smallest, "smallest", 0.5)
    assert made.shots == 0
    with pytest.raises(ValueError, match=rf"is {smallest} tokens long; use longer ruler_lengths"):
        longest_prompt(RULER_TASKS[name], BYTES, smallest - 1, "smallest", 0.5)


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
    assert sorted(v for key, v in needles if key == asked[0]) == sorted(prompt.answers)
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
    with_one = longest_prompt(RULER_TASKS["vt"], BYTES, 2 * example + 20, "a", 0.5)
    without = longest_prompt(RULER_TASKS["vt"], BYTES, 2 * example - 20, "a", 0.5)
    assert (with_one.shots, without.shots) == (1, 0)
    assert with_one.text.count("Question:") == 2 and without.text.count("Question:") == 1


def test_no_word_lies_inside_another() -> None:
    """Otherwise naming one would count for both."""
    single = [word for word in distinct_words() if "-" not in word]
    assert len(single) > 400 and len(set(distinct_words())) == len(distinct_words())
    assert not [(a, b) for a in single for b in single if a != b and a in b]
