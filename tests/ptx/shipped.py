"""The calls that are executed: a few by `make test`, every operand by `make test-ptx`."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from tests.ptx.comparison import BF16, FP16, FP32, AnyCase, AttentionCase, SoftmaxCase

# `make test`: forward and backward at two head dims, the fused softmax, pruning, torch.compile
# with dropout, features with a row scale
QUICK: tuple[AnyCase, ...] = (
    AttentionCase(70, 90, 64, heads=1),
    AttentionCase(70, 90, 128, heads=1),
    SoftmaxCase(20, 53),
    AttentionCase(270, 270, 64, heads=1, table="decay", pruning=True),
    AttentionCase(70, 90, 64, heads=1, compiled=True, dropout=0.1),
    AttentionCase(70, 90, 64, heads=1, features=(16, 40), row_scale="head"),
)

_ALL: dict[str, Any] = {"key_bias": "small", "documents": 37, "sink": "row"}
_PAD: dict[str, Any] = {"key_bias": "pad", "documents": 37, "sink": "head"}
_GROUPED: dict[str, Any] = {"heads": 2, "key_heads": 1}


def _operands() -> list[AnyCase]:
    """Every operand and every combination of tables, at the head dims with tiles of their own."""
    cases: list[AnyCase] = []
    for dim in (64, 128):
        for bias, weight in ((False, False), (True, False), (False, True), (True, True)):
            tables = {"bias": bias, "weight": weight}
            cases.append(AttentionCase(130, 180, dim, **_GROUPED, **tables))
            cases.append(AttentionCase(130, 150, dim, **_GROUPED, **tables, **_ALL))
        cases.append(AttentionCase(130, 150, dim, heads=1, bias=False, **_PAD))
        cases.append(AttentionCase(130, 180, dim, heads=1, window=50))
        cases.append(AttentionCase(130, 180, dim, heads=1, bias=False, window=50))
        cases.append(AttentionCase(200, 200, dim, heads=1, table="steep"))
        cases.append(AttentionCase(260, 300, dim, heads=1, table="decay", pruning=True))
    cases += [
        AttentionCase(150, 193, 64, batch=2, key_bias="gate", documents=37),
        AttentionCase(130, 150, 64, heads=1, table="inf"),
        AttentionCase(130, 150, 64, heads=1, table="log", documents=128),
        AttentionCase(130, 150, 64, heads=1, weight=True, window=90),
        AttentionCase(200, 300, 64, heads=1, weight=True, table="decay", pruning=True),
        AttentionCase(200, 300, 64, heads=1, key_bias="small", table="decay", pruning=True),
        AttentionCase(150, 150, 64, layout="fused"),
        AttentionCase(100, 100, 64, batch=2, layout="heads"),
        AttentionCase(100, 130, 64, **_GROUPED, weight=True, **_ALL, compiled=True),
        AttentionCase(270, 270, 40, heads=1, table="decay", pruning=True, compiled=True),
        AttentionCase(100, 100, 64, heads=1, frozen=("bias",)),
        AttentionCase(100, 100, 64, heads=1, frozen=("k", "v", "bias")),
        AttentionCase(100, 100, 64, heads=1, frozen=("q", "k", "v")),
    ]
    return cases


def _sizes() -> list[AnyCase]:
    """The other head dims and precisions; the smallest and the longest rows."""
    cases: list[AnyCase] = [
        AttentionCase(130, 150, dim, heads=1) for dim in (16, 32, 40, 80, 192, 256)
    ]
    cases += [AttentionCase(130, 150, dim, heads=1, weight=True, **_ALL) for dim in (48, 96, 256)]
    for dtype, dims in ((FP16, (64, 128)), (FP32, (32, 64, 128, 256))):
        for dim in dims:
            cases.append(AttentionCase(130, 150, dim, heads=1, dtype=dtype))
            other = {"weight": True, **_ALL}
            cases.append(AttentionCase(70, 93, dim, **_GROUPED, dtype=dtype, **other))
    cases += [AttentionCase(q, k, 64, heads=1) for q, k in ((1, 1), (1, 300), (5, 5), (64, 700))]
    cases += [
        AttentionCase(130, 150, 64, heads=1, table="steep", dtype=FP32),
        AttentionCase(1, 1, 64, **_ALL),
        AttentionCase(1, 77, 64, bias=False),
        AttentionCase(130, 130, 64, heads=1, window=1),
        AttentionCase(200, 260, 80, heads=1, table="decay", pruning=True, dtype=FP16),
        AttentionCase(260, 260, 40, heads=1, table="decay", pruning=True, dtype=FP32),
    ]
    return cases


def _features() -> list[AnyCase]:
    """Query features and row scales, with and without the other operands."""
    cases: list[AnyCase] = []
    for dim in (64, 128):
        for bias in (False, True):
            tables = {"bias": bias, "features": (16, 70)}
            cases.append(AttentionCase(130, 180, dim, **_GROUPED, **tables))
            others = {**_ALL, "row_scale": "head", "batch": 2}
            cases.append(AttentionCase(130, 150, dim, **_GROUPED, **tables, **others))
            scaled = {"bias": bias, "weight": not bias, "row_scale": "row"}
            cases.append(AttentionCase(130, 150, dim, **_GROUPED, **scaled, **_ALL))
            weighted = {"weight": True, "features": (16, 70), "bias": bias}
            cases.append(AttentionCase(130, 180, dim, **_GROUPED, **weighted))
        others = {**_ALL, "row_scale": "head", "batch": 2, "dropout": 0.1}
        cases.append(AttentionCase(100, 150, dim, **_GROUPED, **weighted, **others))
    for dtype, weight in ((BF16, False), (BF16, True), (FP32, True)):
        wide = {"dtype": dtype, "weight": weight, "features": (16, 40)}
        cases.append(AttentionCase(70, 93, 256, heads=1, **wide))
    cases += [
        AttentionCase(260, 300, 64, heads=1, bias=False, features=(16, 150), shared_features=True),
        AttentionCase(150, 150, 64, batch=2, bias=False, features=(3, 1)),
        AttentionCase(130, 180, 64, heads=1, features=(64, 200), window=50),
        AttentionCase(130, 150, 64, heads=1, features=(5, 40), row_scale="row", **_PAD),
        AttentionCase(260, 300, 64, heads=1, table="decay", pruning=True, features=(16, 40)),
        AttentionCase(260, 300, 64, heads=1, table="decay", pruning=True, row_scale="row"),
        AttentionCase(100, 130, 64, heads=1, features=(16, 40), row_scale="row", compiled=True),
        AttentionCase(130, 150, 32, heads=1, features=(16, 40)),
        AttentionCase(130, 150, 64, heads=1, dtype=FP16, features=(16, 40), row_scale="head"),
        AttentionCase(70, 93, 64, heads=1, dtype=FP32, features=(16, 40), row_scale="head"),
        AttentionCase(70, 93, 128, heads=1, dtype=FP32, features=(16, 40)),
        AttentionCase(70, 93, 64, heads=1, dtype=FP32, features=(16, 40), weight=True),
        AttentionCase(300, 400, 64, heads=1, features=(16, 60), weight=True, window=350),
        AttentionCase(1, 77, 64, features=(16, 40)),
    ]
    return cases


def _dropout() -> list[AnyCase]:
    """Attention dropout in every kernel, alone and with the other operands."""
    cases: list[AnyCase] = []
    for dim in (64, 128):
        cases.append(AttentionCase(130, 180, dim, **_GROUPED, dropout=0.1))
        others = {**_ALL, "row_scale": "row", "batch": 2}
        cases.append(AttentionCase(100, 130, dim, **_GROUPED, weight=True, dropout=0.3, **others))
    cases += [
        AttentionCase(130, 150, 64, heads=1, bias=False, dropout=0.5),
        AttentionCase(130, 150, 64, heads=1, table="steep", window=90, dropout=0.1),
        AttentionCase(130, 150, 64, heads=1, features=(16, 40), dropout=0.1),
        AttentionCase(130, 150, 40, heads=1, dropout=0.1, compiled=True),
        AttentionCase(130, 150, 256, heads=1, dropout=0.1),
        AttentionCase(260, 300, 64, heads=1, table="decay", pruning=True, dropout=0.1),
        AttentionCase(70, 93, 64, heads=1, dtype=FP16, dropout=0.1),
        AttentionCase(70, 93, 64, heads=1, dtype=FP32, dropout=0.1),
        AttentionCase(1, 77, 64, dropout=0.1),
    ]
    return cases


def _softmax() -> list[AnyCase]:
    return [
        SoftmaxCase(20, 53),
        SoftmaxCase(33, 64, batch=2, dtype=FP16, weight=True, window=20),
        SoftmaxCase(18, 100, dtype=FP32, bias=False, weight=True),
        SoftmaxCase(17, 2100, heads=1),
        SoftmaxCase(1, 1),
        SoftmaxCase(40, 40, bias=False),
        SoftmaxCase(3, 2100, heads=1, dtype=FP32, weight=True, window=300),
    ]


def random_cases(seed: int, count: int) -> list[AnyCase]:
    """Any lengths, for kernels that the other cases compile anyway."""
    draw = random.Random(seed)
    cases: list[AnyCase] = []
    for number in range(count):
        keys = draw.choice((draw.randint(2, 40), draw.randint(41, 200), draw.randint(130, 300)))
        batch, heads, key_heads = draw.choice(((1, 2, 1), (2, 2, 2), (1, 1, 1)))
        operands = draw.choice(({}, _ALL, {"bias": False}, {"weight": True}))
        cases.append(
            AttentionCase(
                draw.randint(1, keys) if number % 2 else keys,
                keys,
                draw.choice((64, 64, 128)),
                window=draw.choice((None, draw.randint(1, keys))),
                **{"batch": batch, "heads": heads, "key_heads": key_heads, **operands},
                dtype=draw.choice((BF16, BF16, FP16)),
                seed=number + 1,
            )
        )
    return cases


def every_case(arch: int, seed: int = 0, sizes: int = 16) -> list[AnyCase]:
    cases = [
        *_operands(),
        *_sizes(),
        *_features(),
        *_dropout(),
        *_softmax(),
        *random_cases(seed, sizes),
    ]
    return [replace(case, arch=arch) for case in cases]
