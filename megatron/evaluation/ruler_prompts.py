"""RULER's generated tasks (Hsieh et al., 2024), for any length and any tokenizer, offline.

What defines a task is published: the sentences that carry needles, assignments and questions, how
many keys, values, hops and repetitions there are, and that prompt and answer together fill the
length. Kept as published: `niah_single_1`, `niah_multikey_2`, `vt`, `cwe`. `niah_multikey_1` and
`niah_multivalue` hide their needles in essays there; here in the sentences of `niah_single_1`.

Three things make short lengths possible. The text grows by single units, not in steps of five or
more. Below 4,096 tokens, tokens are reserved for the answer only (twice its length and eight), not
the published 30 to 128. The worked example before `vt` and `cwe` is left out if it would take more
than half of the length. If the published form does not fit into 4,096 tokens or more (bytes as
tokens), the short form is used, too; each result records which form it was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Literal

from megatron.errors import EvaluationError
from megatron.neox_arguments.yaml_files import parse_yaml, read_text

if TYPE_CHECKING:
    from megatron.tokenizer import Tokenizer

_FILE = Path(__file__).with_name("ruler.yml")
_DATA = parse_yaml(read_text(_FILE), _FILE.name)
TEXTS: dict[str, str] = _DATA["texts"]
FULL_SIZE = 4096
"""From here on everything is as published."""
# What the published tests of retrieval, RULER's and the passkey's, fill a text with.
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@dataclass(frozen=True)
class RulerPrompt:
    """A question, what its answer must contain, and where in the context each part of it lies."""

    text: str
    answers: tuple[str, ...]
    depths: tuple[float, ...] = ()
    """Of each answer, 0 at the start and 1 at the end; empty if an answer has no place."""
    new_tokens: int = 0
    shots: int = 0
    full: bool = False
    """Whether repetitions, example and tokens for the answer are the published ones."""


class RulerTask(ABC):
    """One kind of question about a context of a given size."""

    new_tokens: int
    smallest: int

    @abstractmethod
    def question(self, size: int, random: Random, depth: float, full: bool) -> RulerPrompt:
        """A prompt with `size` units of context; `depth` places the (first) needle.

        `full` is whether the length is one of the published ones.
        """

    def example(self, random: Random, full: bool) -> str:
        """A question with its answer, to put in front; empty if the task has none."""
        return ""


@dataclass(frozen=True)
class Niah(RulerTask):
    """Needles in a haystack: `keys` of them with `values` each; all values of one are asked for."""

    keys: int = 1
    values: int = 1
    haystack: Literal["repeat", "needle"] = "repeat"
    new_tokens: int = 128
    smallest: int = 0

    def question(self, size: int, random: Random, depth: float, full: bool) -> RulerPrompt:
        wanted, *others = random.sample(key_words(), self.keys)
        answers = [_number(random) for _ in range(self.values)]
        lines = [self._filler_sentence(random, wanted) for _ in range(size)]
        needles = [_needle(wanted, answer) for answer in answers]
        needles += [_needle(key, _number(random)) for key in others for _ in answers]
        first = min(size, int(depth * (size + 1)))
        places = [first, *(random.randint(0, size) for _ in needles[1:])]
        order = sorted(range(len(needles)), key=lambda i: (places[i], i))
        for shift, i in enumerate(order):
            lines.insert(places[i] + shift, needles[i])
        depths = [place / max(size, 1) for place in places[: len(answers)]]
        text = TEXTS["one_number" if self.values == 1 else "some_numbers"]
        text = text.format(context="\n".join(lines), key=wanted)
        return RulerPrompt(text, tuple(answers), tuple(depths))

    def _filler_sentence(self, random: Random, wanted: str) -> str:
        if self.haystack == "repeat":
            return NOISE
        while (key := random.choice(key_words())) == wanted:
            pass
        return _needle(key, _number(random))


def _number(random: Random) -> str:
    return str(random.randint(10**6, 10**7 - 1))


def _needle(key: str, value: str) -> str:
    return f"One of the special magic numbers for {key} is: {value}."


@dataclass(frozen=True)
class VariableTracking(RulerTask):
    """A number is given to a variable, that to another, and so on; all of them are asked for."""

    hops: int = 4
    new_tokens: int = 30
    smallest: int = 2

    def question(self, size: int, random: Random, depth: float, full: bool) -> RulerPrompt:
        names: list[str] = []
        while len(names) <= self.hops:
            name = "".join(random.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5))
            if name not in names:
                names.append(name)
        value = str(random.randint(10_000, 99_998))
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {new} = VAR {old}" for old, new in pairwise(names)]
        lines = [NOISE] * size
        if len(lines) <= len(chain):  # too few to put something between them: use sentences
            lines = [f"{sentence.strip()}." for sentence in NOISE.split(".") if sentence] * size
        total = len(lines)
        places = sorted(random.sample(range(total), len(chain)))
        for shift, (place, assignment) in enumerate(zip(places, chain, strict=True)):
            lines.insert(place + shift, assignment)
        text = TEXTS["variables"].format(context="\n".join(lines), value=value, count=len(names))
        return RulerPrompt(text, tuple(names), tuple(place / total for place in places))

    def example(self, random: Random, full: bool) -> str:
        made = self.question(5, random, 0.0, full)
        return f"{made.text} {' '.join(made.answers)}\n\n"


@dataclass(frozen=True)
class CommonWords(RulerTask):
    """A numbered list in which ten words occur more often than the others; they are asked for."""

    common: int = 10
    new_tokens: int = 120
    smallest: int = 11

    def question(self, size: int, random: Random, depth: float, full: bool) -> RulerPrompt:
        return self._list(size, (30, 3) if full else (6, 1), random)

    def example(self, random: Random, full: bool) -> str:
        made = self._list(40, (10, 3), random) if full else self._list(20, (3, 1), random)
        listed = " ".join(f"{i}. {word}" for i, word in enumerate(made.answers, 1))
        return f"{made.text} {listed}\n"

    def _list(self, size: int, repeats: tuple[int, int], random: Random) -> RulerPrompt:
        known = distinct_words()
        single = len(known) - len(key_words())
        chosen = random.sample(known[: max(size, single)], size)
        often, seldom = chosen[: self.common], chosen[self.common :]
        entries = often * repeats[0] + seldom * repeats[1]
        random.shuffle(entries)
        context = " ".join(f"{i}. {word}" for i, word in enumerate(entries, 1))
        return RulerPrompt(TEXTS["words"].format(context=context, count=self.common), tuple(often))


RULER_TASKS: dict[str, RulerTask] = {
    "niah_single_1": Niah(),
    "niah_multikey_1": Niah(keys=4),
    "niah_multikey_2": Niah(haystack="needle"),
    "niah_multivalue": Niah(values=4),
    "vt": VariableTracking(),
    "cwe": CommonWords(),
}


# Filling a length.


def _maker(
    task: RulerTask, tokenizer: Tokenizer, length: int, seed: str, depth: float, full: bool
) -> Callable[[int], tuple[RulerPrompt, int]]:
    """Makes a prompt of a size, and says how many tokens it takes together with its answer.

    `seed` names the sample: the same question is asked at every size that is tried.
    """

    def tokens(text: str) -> int:
        return len(tokenizer.tokenize(text)) if text else 0

    shot = task.example(Random(f"{seed}/example"), full)
    if 2 * tokens(shot) > length:
        shot = ""

    def make(size: int) -> tuple[RulerPrompt, int]:
        made = task.question(size, Random(seed), depth, full)
        answer = sum(tokens(f" {each}") for each in made.answers)
        for_answer = task.new_tokens if full else 2 * answer + 8
        text = shot + made.text
        prompt = replace(made, text=text, new_tokens=for_answer, shots=int(bool(shot)), full=full)
        return prompt, tokens(text) + for_answer

    return make


def longest_prompt(
    task: RulerTask, tokenizer: Tokenizer, length: int, seed: str, depth: float
) -> RulerPrompt:
    """The largest prompt that, with the tokens reserved for its answer, fits into `length`."""
    for full in (True, False) if length >= FULL_SIZE else (False,):
        make = _maker(task, tokenizer, length, seed, depth, full)
        best, needed = make(task.smallest)
        if needed <= length:
            break
    else:
        raise EvaluationError(
            f"the smallest prompt with its answer is {needed} tokens long; use longer ruler_lengths"
        )
    low, high = task.smallest, task.smallest + 1
    while (made := make(high))[1] <= length:
        best, low, high = made[0], high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        made = make(middle)
        if made[1] <= length:
            best, low = made[0], middle
        else:
            high = middle
    return best


def smallest_length(task: RulerTask, tokenizer: Tokenizer) -> int:
    """The shortest length at which the task can be asked, without an example in front."""
    return _maker(task, tokenizer, 1, "smallest", 0.5, full=False)(task.smallest)[1]


# Plain English words for keys and lists.

ADJECTIVES, NOUNS, VERBS = (tuple(_DATA[kind].split()) for kind in ("adjectives", "nouns", "verbs"))


@lru_cache(maxsize=1)
def key_words() -> list[str]:
    """Keys of needles: an adjective and a noun."""
    return [f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS]


@lru_cache(maxsize=1)
def distinct_words() -> list[str]:
    """Words for lists: single ones, none inside another (a match would count twice), then pairs."""
    single = sorted({*ADJECTIVES, *NOUNS, *VERBS})
    apart = [
        word for word in single if not any(word != other and word in other for other in single)
    ]
    return [*apart, *key_words()]
