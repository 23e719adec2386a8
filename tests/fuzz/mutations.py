"""Ways to spoil a file, all drawn from one generator."""

from __future__ import annotations

import random
from collections.abc import Callable

Mutation = Callable[[bytes, random.Random], bytes]

INTERESTING = (
    b"\x00", b"\xff", b"\xff\xff\xff\xff", b"\x00\x00\x00\x80", b"\xff" * 8,
    b"\x00" * 7 + b"\x80", b"\x01" + b"\x00" * 7, b"\xfe\xff", b"\n", b"\r", b"\x1b",
)  # fmt: skip
WORDS = (
    b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"-Infinity", b"99999999999999999999",
    b"[]", b"{}", b'""', b"[[[[[[[[", b'{"a": ' * 40, b"../../x", b"/etc/passwd", b"a:b:c",
    b"!!python/object/apply:os.getcwd []", b"&a [*a, *a]", b"<<: *x", b"\xc3\x28", b"\xed\xa0\x80",
    "\u202e".encode(), b"\x00", b"-oProxyCommand=x", b"nan", b"0x10", b"1_000", b"2020-01-01",
    b'"\\ud800"', b"1" + b"0" * 400, b"'", b'"', b": ", b"- ", b"#", b"%", b"\t",
)  # fmt: skip


def flip_bits(data: bytes, generator: random.Random) -> bytes:
    result = bytearray(data)
    for _ in range(generator.choice((1, 1, 1, 4, 32))):
        if result:
            result[generator.randrange(len(result))] ^= 1 << generator.randrange(8)
    return bytes(result)


def overwrite(data: bytes, generator: random.Random) -> bytes:
    value = generator.choice(INTERESTING)
    place = _near_an_end(len(data), generator)
    return data[:place] + value + data[place + len(value) :]


def truncate(data: bytes, generator: random.Random) -> bytes:
    return data[: generator.randrange(len(data) + 1)]


def extend(data: bytes, generator: random.Random) -> bytes:
    return data + generator.randbytes(generator.choice((1, 8, 1000)))


def delete(data: bytes, generator: random.Random) -> bytes:
    start = generator.randrange(len(data) + 1)
    return data[:start] + data[start + generator.choice((1, 4, 64, 1000)) :]


def repeat(data: bytes, generator: random.Random) -> bytes:
    start = generator.randrange(len(data) + 1)
    part = data[start : start + generator.choice((1, 8, 100, 1000))]
    return data[:start] + part * generator.choice((2, 2, 50)) + data[start:]


def swap(data: bytes, generator: random.Random) -> bytes:
    size = generator.choice((1, 4, 8, 64))
    a, b = (generator.randrange(max(len(data) - size, 1)) for _ in range(2))
    result = bytearray(data)
    result[a : a + size], result[b : b + size] = data[b : b + size], data[a : a + size]
    return bytes(result)


def insert_word(data: bytes, generator: random.Random) -> bytes:
    place = generator.randrange(len(data) + 1)
    return data[:place] + generator.choice(WORDS) + data[place:]


def replace_value(data: bytes, generator: random.Random) -> bytes:
    """In text: another value after a colon, an equals sign or a comma."""
    places = [n + 1 for n, byte in enumerate(data) if byte in b":=,["]
    if not places:
        return insert_word(data, generator)
    start = generator.choice(places)
    end = start
    while end < len(data) and data[end] not in b",\n]}":
        end += 1
    return data[:start] + b" " + generator.choice(WORDS) + data[end:]


def replace_all(data: bytes, generator: random.Random) -> bytes:
    return generator.choice((b"", generator.randbytes(100), generator.choice(WORDS)))


BINARY: tuple[Mutation, ...] = (
    flip_bits, flip_bits, overwrite, overwrite, truncate, extend, delete, repeat, swap, insert_word,
)  # fmt: skip
TEXT: tuple[Mutation, ...] = (*BINARY, replace_value, replace_value, replace_value, insert_word)


def mutated(data: bytes, generator: random.Random, *, text: bool) -> bytes:
    """One to three mutations; once in a while nothing of the file is left."""
    if generator.random() < 0.02:
        return replace_all(data, generator)
    for _ in range(generator.choice((1, 1, 2, 3))):
        data = generator.choice(TEXT if text else BINARY)(data, generator)
    return data


def _near_an_end(length: int, generator: random.Random) -> int:
    """Headers and tables of contents lie at the ends: look there more often."""
    if length == 0:
        return 0
    if generator.random() < 0.5:
        return generator.randrange(min(length, 64))
    return generator.randrange(length)
