"""Made-up text in which a model must find again what it read: for "extrapolates" to mean "can use".

Two kinds of documents, in symbols that never mix:

- Multi-query associative recall (MQAR, Arora et al., 2023): keys with their values, then noise in
  which every key comes again and its value must follow. The pairs stay at the start, and as many as
  they are, when the document grows; only the distance does::

      Aq Bt Cz ... ,:.;Bt:.,,Aq.;:..Cz          (without the blanks)

- Passkey in noise: digits after `#` somewhere in noise, asked for at the end::

      <>{[}#4071]{(<>...?4071

Noise is drawn evenly from eight symbols, so nothing but recall can be learned from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from string import ascii_lowercase, ascii_uppercase, digits

from megatron.atomic_files import atomic_writer

__all__ = ["RECALL_KINDS", "RecallText", "mqar", "passkey_in_noise", "write_recall_corpus"]

PAIRS = 8
ASKED = 2  # times that each key comes again
KEY_DIGITS = 4
MQAR_NOISE, PASSKEY_NOISE = ".,:;-_~^", "<>{}[]()"
TRAIN_LENGTH = 128
DOCUMENTS = 40_000
SEED = 20_230_101


@dataclass(frozen=True)
class RecallText:
    """A document, and the places of the symbols that recall alone can tell."""

    text: str
    places: tuple[int, ...]
    distances: tuple[int, ...]
    """How far back each of them was first seen."""


def mqar(length: int, random: Random) -> RecallText:
    """`length` symbols: eight keys with values, then noise in which each key comes twice more."""
    keys, values = (
        random.sample(ascii_uppercase, PAIRS),
        random.choices(ascii_lowercase, k=PAIRS),
    )
    start = [symbol for pair in zip(keys, values, strict=True) for symbol in pair]
    body = random.choices(MQAR_NOISE, k=length - len(start))
    asked = list(range(PAIRS)) * ASKED
    random.shuffle(asked)
    # Queries take two places each: choose places in a body from which one per query is removed.
    slots = sorted(random.sample(range(len(body) - len(asked)), len(asked)))
    places, distances = [], []
    for shift, (slot, number) in enumerate(zip(slots, asked, strict=True)):
        place = slot + shift
        body[place : place + 2] = [keys[number], values[number]]
        places.append(len(start) + place + 1)
        distances.append(places[-1] - (2 * number + 1))
    return RecallText("".join(start + body), tuple(places), tuple(distances))


def passkey_in_noise(length: int, random: Random) -> RecallText:
    """`length` symbols: noise with four digits after `#`, which follow again after `?`."""
    key = random.choices(digits, k=KEY_DIGITS)
    room = length - (KEY_DIGITS + 1)
    noise = random.choices(PASSKEY_NOISE, k=room)
    place = random.randrange(room - KEY_DIGITS)
    noise[place : place + KEY_DIGITS + 1] = ["#", *key]
    first = room + 1
    return RecallText(
        "".join([*noise, "?", *key]),
        tuple(range(first, length)),
        (first - (place + 1),) * KEY_DIGITS,
    )


RECALL_KINDS: dict[str, Callable[[int, Random], RecallText]] = {
    "mqar": mqar,
    "passkey_in_noise": passkey_in_noise,
}


def write_recall_corpus(directory: Path) -> list[Path]:
    """Documents that fill the training length exactly, together with the end of each."""
    directory.mkdir(parents=True, exist_ok=True)
    output = directory / "recall.jsonl"
    random = Random(SEED)
    kinds = list(RECALL_KINDS.values())
    with atomic_writer(output) as handle:
        for number in range(DOCUMENTS):
            made = kinds[number % len(kinds)](TRAIN_LENGTH - 1, random)
            handle.write((json.dumps({"text": made.text}) + "\n").encode())
    return [output]
