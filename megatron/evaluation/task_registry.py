"""Find a task by name: one of this package, a class of the user's own, or one of lm-eval's."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec

from megatron import evaluation
from megatron.errors import EvaluationError
from megatron.evaluation.lm_eval_cli import LMEvalTask, lm_eval_task_names
from megatron.evaluation.tasks import TASKS, EvaluationTask
from megatron.terminal import install_command

_SLOW_IMPORTS = {"evaluator", "lm_eval_adapter"}
"""They import DeepSpeed or lm-eval, which takes seconds, and define no task."""


def own_tasks() -> dict[str, EvaluationTask]:
    """Every registered task; a module in this package registers its tasks when it is imported."""
    _import_package()
    return TASKS


@cache
def _import_package() -> None:
    for module in pkgutil.iter_modules(evaluation.__path__, f"{evaluation.__name__}."):
        if module.name.rpartition(".")[2] not in _SLOW_IMPORTS:
            importlib.import_module(module.name)


def find_task(name: str, include_path: str | None = None) -> EvaluationTask:
    """The task behind one of `eval_tasks`; `include_path` is lm-eval's folder of the user's own."""
    if name in own_tasks():
        return TASKS[name]
    if ":" in name:
        return imported_task(name)
    if include_path is None and (similar := difflib.get_close_matches(name, TASKS, 1, 0.8)):
        raise EvaluationError(f"unknown task; nearest: {similar[0]}")  # before a slow import
    known = lm_eval_task_names(name, include_path)
    if name in known:
        return LMEvalTask(name)
    close = nearest(name, [*TASKS, *known])
    hint = f"nearest: {', '.join(close)}" if close else f"built in: {', '.join(TASKS)}"
    if find_spec("lm_eval") is None:
        hint += f". If it is one of lm-eval's: {install_command('eval')}"
    raise EvaluationError(f"unknown task; {hint}")


def task_listing() -> str:
    """The tasks of this package, one a line."""
    lines = [
        f"{name:<18}{(task.__doc__ or '').splitlines()[0]}" for name, task in own_tasks().items()
    ]
    more = "`lm_eval ls tasks`" if find_spec("lm_eval") else install_command("eval")
    return "\n".join([*lines, f"module:Class      a task of your own; lm-eval's names: {more}"])


@cache
def imported_task(reference: str) -> EvaluationTask:
    """A task of the user's own: `package.module:Class`, a class derived from EvaluationTask."""
    module_name, _, class_name = reference.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise EvaluationError(
            f"cannot be imported ({error}); check that the module is in this folder or on "
            "PYTHONPATH and defines the class"
        ) from error
    if not (isinstance(found, type) and issubclass(found, EvaluationTask)):
        raise EvaluationError("is not an evaluation task; derive the class from EvaluationTask")
    if not vars(found).get("name"):  # its own: results of a derived task are not its parent's
        found.name = class_name
    try:
        return found()
    except TypeError as error:  # a method is missing: abc says which
        raise EvaluationError(str(error)) from error


def nearest(name: str, candidates: Iterable[str]) -> list[str]:
    """Up to three similar names."""
    return difflib.get_close_matches(name, list(candidates), n=3, cutoff=0.5)
