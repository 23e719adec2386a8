"""From a config to result files: every task runs, even if another fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tqdm import tqdm

from kerple import __version__
from megatron.atomic_files import fingerprint
from megatron.errors import EvaluationError, KerpleError
from megatron.evaluation.losses import TotalBar, total_work
from megatron.evaluation.results_schema import (
    FORMAT,
    Cells,
    ResultStore,
    weights_id,
)
from megatron.evaluation.task_registry import find_task
from megatron.evaluation.tasks import Context, EvaluationOptions, EvaluationTask, requested
from megatron.generation.pretrained import SelectedCheckpoint
from megatron.mpu.job import Ranks, join_evaluation
from megatron.neox_arguments.allowed_code import allow_flags
from megatron.terminal import (
    EXIT_USER_ERROR,
    print_error,
    print_next_command,
    show_traceback_if_asked,
    shown_command,
)
from megatron.training.liveness import bounded_join, watched_peers

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

Result = TypeVar("Result")
DEFAULT_TASKS = ("extrapolation",)
NO_SPLIT = "nothing to measure: do_valid and do_test are both false; leave one of them out"


def run_evaluation(args: NeoXArgs, local_rank: int | None = None) -> int:
    """Evaluate as the config says; the exit code is 0 if every task gave a result."""
    minutes = args.runtime.distributed_timeout_minutes
    with bounded_join(minutes):
        ranks, device = join_evaluation(args.launcher, minutes, local_rank)
    with watched_peers(minutes):
        return _evaluate(args, ranks, device)


def _evaluate(args: NeoXArgs, ranks: Ranks, device: str) -> int:
    try:
        selected = SelectedCheckpoint(args, device)
        evaluation = Evaluation(args, selected, ranks)
    except KerpleError as error:
        return print_error(error) if ranks.is_main else EXIT_USER_ERROR
    code = evaluation.run(args.evaluation.eval_tasks or DEFAULT_TASKS)
    config = selected.checkpoint / "configs" / "resolved.yml"
    if code == 0 and ranks.is_main and config.is_file():
        allowed = allow_flags(args.to_dict())
        print_next_command(f"{shown_command('generate')} {selected.checkpoint}{allowed}")
    return code


class Evaluation:
    """One checkpoint under evaluation."""

    def __init__(self, args: NeoXArgs, selected: SelectedCheckpoint, ranks: Ranks) -> None:
        self.args, self.selected, self.ranks = args, selected, ranks
        self.options = EvaluationOptions.from_args(args)
        default = Path(selected.place) / "results" / f"step{selected.iteration}"
        self.store = ResultStore(Path(args.evaluation.eval_results_prefix or default), ranks)
        self.model_key = [
            selected.identity,
            args.model.model_dump(mode="json"),
            args.tokenizer.model_dump(mode="json"),
        ]
        if self.options.inference_dtype is not None:
            self.model_key.append(self.options.inference_dtype)

    def run(self, names: Sequence[str]) -> int:
        """All named tasks; 1 if any of them gave no result."""
        failures: list[str] = []

        def attempt(name: str, step: Callable[[], Result]) -> Result | None:
            try:
                return step()
            except ValueError as error:
                failures.append(name)
                if self.ranks.is_main:
                    show_traceback_if_asked(error)
                self.say(f"error: {name}: {error}", error=True)
                return None

        folder = self.options.eval_include_path
        found = {name: attempt(name, partial(find_task, name, folder)) for name in names}
        tasks = {name: task for name, task in found.items() if task is not None}
        hidden_size = self.args.model.hidden_size
        work = [total_work(hidden_size, task.work(self.options)) for task in tasks.values()]
        with closing(TotalBar(hidden_size, sum(work), show=self.ranks.is_main)) as bar:
            for (name, task), end in zip(tasks.items(), accumulate(work), strict=True):
                content = attempt(name, partial(self._run_task, task, bar))
                bar.move_to(end)
                if content is not None:
                    self._report(task, content)
        if failures:
            self.say(f"{len(failures)} of {len(found)} tasks failed: {', '.join(failures)}", True)
        return 1 if failures else 0

    def say(self, text: str, error: bool = False) -> None:
        """Print, once for all ranks."""
        if self.ranks.is_main:
            stream = sys.stderr if error else sys.stdout
            tqdm.write(text, file=stream)
            stream.flush()

    def _run_task(self, task: EvaluationTask, bar: TotalBar) -> dict[str, Any]:
        name, parameters = task.file_name(self.options), task.parameters(self.options)
        key = fingerprint([FORMAT, task.name, *self.model_key, parameters])
        content = self.store.finished(name, key)
        if content is not None:
            self.say(f"{name}: already evaluated")
            self.store.publish(name, key, content)
            return content
        cells = self.store.cells(name, key)
        if cells.resumed:
            self.say(f"{name}: continues an interrupted evaluation ({cells.resumed} parts done)")
        results = task.run(self._context(cells, bar))
        if cells.all_failed or not results:
            reasons = [error["error"] for error in cells.errors]
            nothing = "the task measured nothing" if self.options.splits else NO_SPLIT
            raise EvaluationError("; ".join(dict.fromkeys(reasons)) or nothing)
        provenance = self._provenance(task)
        content = {**provenance, "results": results, "errors": cells.errors}
        self.store.publish(name, key, content)
        cells.discard()
        return content

    def _context(self, cells: Cells, bar: TotalBar) -> Context:
        options = self.options
        # Everything that the answer to one lm-eval request depends on.
        length, window = options.eval_context_length, options.eval_window
        request = fingerprint([self.model_key, length, window, options.seed])
        return Context(
            model=self.selected.model,
            options=options,
            cells=cells,
            ranks=self.ranks,
            tokenizer=lambda: self.selected.tokenizer,
            say=self.say,
            bar=bar,
            request_cache=self.store.cache_folder / f"requests-{request}",
        )

    def _provenance(self, task: EvaluationTask) -> dict[str, Any]:
        """The part of a result that records how it was made."""
        model = self.selected.model
        return {
            "format": FORMAT,
            **requested(task, self.options, self.args.model.model_dump(mode="json")),
            "checkpoint": str(self.selected.checkpoint),
            "iteration": self.selected.iteration,
            "config_hash": self.selected.config_hash,
            "pos_emb": model.spec.method,
            "train_length": model.spec.seq_length,
            "parameters": model.num_parameters(),
            "checkpoint_id": weights_id(self.selected.checkpoint),
            "version": __version__,
        }

    def _report(self, task: EvaluationTask, content: dict[str, Any]) -> None:
        name = task.file_name(self.options)
        self.say(f"\n{name}: {content['pos_emb']}, step {content['iteration']}")
        self.say(task.table(content["results"]))
        for error in content["errors"]:
            where = " ".join(str(value) for key, value in error.items() if key != "error")
            self.say(f"not measured: {where}: {error['error']}")
        self.say(f"results: {self.store.path(name, content['settings'])}")
