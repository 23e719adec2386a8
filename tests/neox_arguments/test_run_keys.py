"""Keys that name something elsewhere accept, or list, the names that are known there."""

from __future__ import annotations

from typing import get_args

import pytest

from megatron.evaluation.ruler_prompts import RULER_TASKS
from megatron.evaluation.task_registry import own_tasks
from megatron.neox_arguments.run_keys import EvaluationArgs, LauncherArgs, TokenizerArgs
from megatron.tokenizer import TOKENIZERS


def test_every_kind_of_tokenizer_may_be_chosen() -> None:
    kinds = TokenizerArgs.model_fields["tokenizer_type"].annotation
    assert set(get_args(kinds)) == set(TOKENIZERS)


@pytest.mark.parametrize(
    ("key", "names"), [("eval_tasks", own_tasks()), ("ruler_tasks", RULER_TASKS)]
)
def test_the_meaning_of_a_key_lists_every_task(key: str, names: dict[str, object]) -> None:
    meaning = EvaluationArgs.model_fields[key].description or ""
    listed = meaning.partition(": ")[2].replace(";", ",").rstrip(".").split(", ")
    assert [name for name in names if name not in listed] == []


def test_a_port_is_chosen_when_it_is_another_than_the_default() -> None:
    assert LauncherArgs().chosen_port is None
    assert LauncherArgs(master_port=29500).chosen_port is None
    assert LauncherArgs(master_port=4321).chosen_port == 4321
