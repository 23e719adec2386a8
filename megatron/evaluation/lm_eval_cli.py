"""lm-eval (0.4.13): its tasks inside evaluate.py, and its command with our model.

All arguments of the command are lm-eval's own::

    kerple lm_eval run --model kerple_neox --model_args pretrained=PATH --tasks TASK
    python -m megatron.evaluation.lm_eval_cli run ...

lm-eval looks models up in its own registry only, not in entry points or `--include_path`, so our
name is added to its registry before its command runs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron.errors import EvaluationError, KerpleError
from megatron.evaluation.tasks import Context, EvaluationOptions, WindowedTask
from megatron.evaluation.text_tables import text_table
from megatron.terminal import exit_with, require, run_command

INCLUDE_DEFAULTS = True  # lm-eval's own tasks; reading their files takes it several seconds


@lru_cache
def _task_manager(include_path: str | None, defaults: bool) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path, include_defaults=defaults)


def _manager_for(name: str, include_path: str | None) -> Any:
    """Where a task is found: the user's own folder first, which is quick to read."""
    if include_path is not None:
        if not Path(include_path).is_dir():
            raise EvaluationError(f"eval_include_path {include_path}: no such folder")
        own = _task_manager(include_path, False)
        if name in own.all_tasks:
            return own
    return _task_manager(include_path, INCLUDE_DEFAULTS)


def lm_eval_task_names(name: str, include_path: str | None) -> list[str]:
    """The tasks, groups and tags of lm-eval among which `name` is looked for."""
    if find_spec("lm_eval") is None:
        return []
    return list(_manager_for(name, include_path).all_tasks)


class LMEvalTask(WindowedTask):
    """One task (or group) by lm-eval's name."""

    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]  # one class, many names

    def parameters(self, options: EvaluationOptions) -> dict[str, Any]:
        return {
            "context_length": options.eval_context_length,
            "num_fewshot": options.num_fewshot,
            "limit": options.eval_limit,
            "include_path": options.eval_include_path,
            "seed": options.seed,
            "window": options.eval_window,
        }

    def measure(self, context: Context) -> dict[str, Any]:
        return {self.name: context.cells.get(self.name, lambda: self._evaluate(context))}

    def _evaluate(self, context: Context) -> dict[str, Any]:
        from lm_eval import simple_evaluate

        from megatron.evaluation.lm_eval_adapter import KerpleNeoXLM

        options = context.options
        lm = KerpleNeoXLM(
            context.model,
            tokenizer=context.tokenizer(),
            max_length=options.eval_context_length,
            batch_tokens=options.eval_batch_tokens,
            ranks=context.ranks,
            seed=options.seed,
        )
        # Ranks whose caches differ would wait for each other's requests: one process only.
        cache = str(context.request_cache) if context.ranks.size == 1 else None
        try:
            found = simple_evaluate(
                model=lm,
                tasks=[self.name],
                num_fewshot=options.num_fewshot,
                limit=options.eval_limit,
                task_manager=_manager_for(self.name, options.eval_include_path),
                use_cache=cache,
                random_seed=options.seed,
                numpy_random_seed=options.seed,
                torch_random_seed=options.seed,
                fewshot_random_seed=options.seed,
                log_samples=False,
            )
        except ValueError:
            raise
        except Exception as error:  # a broken or unreachable task must not end the other tasks
            raise EvaluationError(f"lm-eval: {type(error).__name__}: {error}") from error
        return context.ranks.broadcast(_plain(found) if found else None)

    def table(self, results: dict[str, Any]) -> str:
        rows = [
            [task, scores["n-shot"], name, value, scores["stderr"].get(name)]
            for task, scores in results[self.name]["tasks"].items()
            for name, value in scores["metrics"].items()
        ]
        return text_table(["task", "n-shot", "metric", "value", "stderr"], rows)


def _plain(found: Any) -> dict[str, Any]:
    """lm-eval's result as plain data: metrics and their errors by task."""
    tasks: dict[str, Any] = {}
    for task, scores in found["results"].items():
        numbers = {
            key.removesuffix(",none"): float(value) if math.isfinite(value) else None
            for key, value in scores.items()
            if isinstance(value, int | float) and "," in key
        }
        tasks[task] = {
            "n-shot": found.get("n-shot", {}).get(task),
            "samples": found.get("n-samples", {}).get(task, {}).get("effective"),
            "version": found.get("versions", {}).get(task),
            "metrics": {key: value for key, value in numbers.items() if "_stderr" not in key},
            "stderr": {
                key.replace("_stderr", ""): value
                for key, value in numbers.items()
                if "_stderr" in key
            },
        }
    return {"tasks": tasks}


# Our model in the lm_eval command.


def register() -> None:
    """Add our model to lm-eval's registry, as a reference followed only if it is asked for."""
    require("lm_eval.models", "the lm_eval command")
    from lm_eval.api.registry import model_registry

    if (name := "kerple_neox") not in model_registry:
        target = "megatron.evaluation.lm_eval_adapter:KerpleNeoXLM"
        model_registry.register(name, target=target)


def main(argv: Sequence[str] | None = None) -> int:
    """lm-eval's command line."""
    register()
    from lm_eval.__main__ import cli_evaluate

    if argv is not None:
        sys.argv = ["lm_eval", *argv]
    try:
        cli_evaluate()
    except KerpleError:
        raise
    except ValueError as error:  # what lm-eval says of wrong arguments
        raise EvaluationError(f"lm_eval: {error}") from error
    return 0


if __name__ == "__main__":
    exit_with(lambda: run_command(main))
