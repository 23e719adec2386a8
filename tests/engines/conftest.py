"""Engines as the tests name them: the tiled one in both of its implementations."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial

import pytest
from torch import Tensor

from megatron.engines import attention

ENGINES = ("naive", "compiled", "python")


@pytest.fixture(params=ENGINES)
def engine(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Tensor]:
    """`attention` forced to one engine."""
    return force(request.param, monkeypatch)


@pytest.fixture(params=ENGINES[1:])
def tiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """`attention` forced to one implementation of the tiled engine."""
    return force(request.param, monkeypatch)


def force(name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    if name == "naive":
        return partial(attention, engine="naive")
    if name == "compiled" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler on this machine")
    monkeypatch.setenv("KERPLE_TILED_BACKEND", name)
    return partial(attention, engine="tiled")
