"""Settings shared by all tests: small thread counts, so that two processes fit on two cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.machine import disable_undescribed_amx

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
disable_undescribed_amx()

REPOSITORY = Path(__file__).resolve().parent.parent
FIXTURES = Path(__file__).resolve().parent / "fixtures"


JOB_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_AT_START = {name: os.environ.get(name) for name in JOB_VARIABLES}


@pytest.fixture(autouse=True)
def _job_variables_stay_here() -> Iterator[None]:
    """Tests that join a job export its rank and port; programs started later must not join it."""
    yield
    for name, value in _AT_START.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
