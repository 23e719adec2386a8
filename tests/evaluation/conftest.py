"""What several files of tests here share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron.evaluation import lm_eval_cli


@pytest.fixture
def only_local_tasks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Spares lm-eval the reading of its own 14,000 task files."""
    monkeypatch.setattr(lm_eval_cli, "INCLUDE_DEFAULTS", False)
    lm_eval_cli._task_manager.cache_clear()
    yield
    lm_eval_cli._task_manager.cache_clear()
