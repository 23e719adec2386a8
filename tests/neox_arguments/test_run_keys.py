"""Keys that name something elsewhere accept, or list, the names that are known there."""

from __future__ import annotations

from typing import get_args

from megatron.evaluation.ruler_prompts import RULER_TASKS
from megatron.evaluation.task_registry import own_tasks
from megatron.neox_arguments.run_keys import EvaluationArgs, LauncherArgs, TokenizerArgs
from megatron.tokenizer import TOKENIZERS
from tests.conftest import REPOSITORY


def test_every_kind_of_tokenizer_may_be_chosen() -> None:
    kinds = TokenizerArgs.model_fields["tokenizer_type"].annotation
    assert set(get_args(kinds)) == set(TOKENIZERS)


def test_every_task_is_named_where_the_key_says_so() -> None:
    meaning = EvaluationArgs.model_fields["ruler_tasks"].description or ""
    listed = meaning.partition(": ")[2].replace(";", ",").rstrip(".").split(", ")
    assert [name for name in RULER_TASKS if name not in listed] == []
    page = (REPOSITORY / "docs" / "evaluation.md").read_text(encoding="utf-8")
    shipped = [n for n, own in own_tasks().items() if type(own).__module__.startswith("megatron.")]
    assert [name for name in shipped if f"`{name}`" not in page] == []


def test_a_port_is_chosen_when_it_is_another_than_the_default() -> None:
    assert LauncherArgs().chosen_port is None
    assert LauncherArgs(master_port=29500).chosen_port is None
    assert LauncherArgs(master_port=4321).chosen_port == 4321
