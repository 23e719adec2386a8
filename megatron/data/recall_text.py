"""Synthetic text for recall: whether a model uses a long context, beyond its perplexity.

Three kinds of documents, with disjoint symbols, from easy to hard for a tiny model:

- A digit in noise, queried at the end: one layer can do it::

      |/=+@7%&/...!7

- Multi-query associative recall (MQAR, Arora et al., 2023): keys with their values, then noise in
  which keys come again and their values must follow. The pairs stay at the start, and as many as
  they are, when the document grows; only the distance does::

      Aq Bt Cz Dw ... ,:.;Bt:.,,Aq.;:..CzDw          (without the blanks)

- Passkey in noise: digits after `#` somewhere in noise, queried at the end::

      <>{[}#4071]{(<>...?4071

Documents for training query several times, so that a tiny model learns what to do within minutes
(half of those with keys and values, the hardest kind and therefore every other document, query once
or twice as in a test); those for testing query once, so that nothing can be copied from an answer
nearer by. Noise is drawn evenly from eight symbols: nothing but recall can be learned from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from string import ascii_lowercase, ascii_uppercase, digits

from megatron.atomic_files import write_json_lines

PAIRS = 4
KEYS, VALUES = ascii_uppercase[:8], ascii_lowercase[:8]
KEY_DIGITS = 4
MOST_ASKED = 6  # times that a digit or a passkey is queried, in documents for training
SELDOM, OFTEN = (1, 2), (6, 12)  # times that each key comes again
MQAR_NOISE, PASSKEY_NOISE, DIGIT_NOISE = ".,:;-_~^", "<>{}[]()", "|/=+*&%$"
TRAIN_LENGTH = 128
DOCUMENTS = 60_000
SEED = 20_230_101


@dataclass(frozen=True)
class RecallText:
    """A document, and the positions of the symbols that only recall can predict."""

    text: str
    places: tuple[int, ...]
    distances: tuple[int, ...]
    """How far back each of them was first seen."""


def mqar(length: int, random: Random, asked: int = 1) -> RecallText:
    """`length` symbols: four keys with values, then noise in which each key comes `asked` times."""
    keys, values = random.sample(KEYS, PAIRS), random.choices(VALUES, k=PAIRS)
    start = [symbol for pair in zip(keys, values, strict=True) for symbol in pair]
    body = random.choices(MQAR_NOISE, k=length - len(start))
    order = list(range(PAIRS)) * asked
    random.shuffle(order)
    places, distances = [], []
    for place, number in zip(_slots(len(body), 2, len(order), random), order, strict=True):
        body[place : place + 2] = [keys[number], values[number]]
        places.append(len(start) + place + 1)
        distances.append(places[-1] - (2 * number + 1))
    return RecallText("".join(start + body), tuple(places), tuple(distances))


def _slots(length: int, width: int, count: int, random: Random) -> list[int]:
    """Starts of `count` stretches of `width` that do not overlap, drawn evenly."""
    # Chosen in a text in which each takes one place only; those before it move it on.
    free = length - count * (width - 1)
    chosen = sorted(random.sample(range(free), count))
    return [slot + shift * (width - 1) for shift, slot in enumerate(chosen)]


def passkey_in_noise(length: int, random: Random, asked: int = 1) -> RecallText:
    """`length` symbols: four digits after `#` in noise, and again after each `?`."""
    return _key_in_noise(length, random, asked, KEY_DIGITS, PASSKEY_NOISE, "#?")


def digit_in_noise(length: int, random: Random, asked: int = 1) -> RecallText:
    """The same with one digit, after `@` and `!`."""
    return _key_in_noise(length, random, asked, 1, DIGIT_NOISE, "@!")


def _key_in_noise(
    length: int, random: Random, asked: int, count: int, symbols: str, marks: str
) -> RecallText:
    key = random.choices(digits, k=count)
    text = random.choices(symbols, k=length - (count + 1))
    first, *again = _slots(len(text), count + 1, asked, random)
    text[first : first + count + 1] = [marks[0], *key]
    places: list[int] = []
    for place in [*again, len(text)]:
        text[place : place + count + 1] = [marks[1], *key]
        places += range(place + 1, place + count + 1)
    distances = [place - first - 1 - number % count for number, place in enumerate(places)]
    return RecallText("".join(text), tuple(places), tuple(distances))


RECALL_KINDS: dict[str, Callable[..., RecallText]] = {
    "digit_in_noise": digit_in_noise,
    "mqar": mqar,
    "passkey_in_noise": passkey_in_noise,
}


def write_recall_corpus(directory: Path) -> list[Path]:
    """Documents that fill the training length exactly, together with the end of each."""
    directory.mkdir(parents=True, exist_ok=True)
    output = directory / "recall.jsonl"
    random = Random(SEED)
    texts = (_for_training(number, random).text for number in range(DOCUMENTS))
    write_json_lines(output, ({"text": text} for text in texts))
    return [output]


def _for_training(number: int, random: Random) -> RecallText:
    if number % 2:
        return mqar(TRAIN_LENGTH - 1, random, random.randint(*random.choice((SELDOM, OFTEN))))
    kind = passkey_in_noise if number % 4 else digit_in_noise
    return kind(TRAIN_LENGTH - 1, random, random.randint(1, MOST_ASKED))
