"""The commands of each step, as argument lists: prepare_data.py, train.py, evaluate.py."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.neox_arguments.environment import free_port
from megatron.reproduce.suite import DataSource, EvalStep, Run

__all__ = ["REPOSITORY", "Launcher", "evaluate_command", "prepare_command", "train_command"]

REPOSITORY = Path(__file__).resolve().parents[2]
"""Steps are started here, where deepy.py lives and relative paths of configs begin."""


@dataclass(frozen=True)
class Launcher:
    """How a script is started: deepy.py here, or srun inside a Slurm job."""

    srun: bool = False
    container: Sequence[str] = ()
    python: str = sys.executable

    def command(self, script: str, config: Path, run: Run, arguments: Sequence[str]) -> list[str]:
        if self.srun:
            # The first rank that has saved must not end the others; a lost rank ends them soon.
            waits = ["--kill-on-bad-exit=0", "--wait=60"]
            start = ["srun", f"--ntasks={run.gpus}", *waits, *self.container]
            return [*start, self.python, "-u", script, str(config), *arguments]
        # Several runs on one machine must not share the port of their process groups.
        port = ["--set", f"master_port={free_port()}"]
        return [self.python, "-u", "deepy.py", script, str(config), *arguments, *port]


def prepare_command(
    source: DataSource, config: Mapping[str, Any], python: str = sys.executable
) -> list[str]:
    """Download or read, tokenize with the runs' own tokenizer, and index one data set."""
    command = [python, "-u", "prepare_data.py", source.source, "-d", source.directory]
    command += ["-t", str(config["tokenizer_type"])]
    for key, flag in (("vocab_file", "--vocab-file"), ("merge_file", "--merge-file")):
        if config.get(key):
            command += [flag, str(config[key])]
    return [*command, *source.arguments]


def train_command(launcher: Launcher, directory: Path, run: Run) -> list[str]:
    return launcher.command("train.py", directory / "config.yml", run, [])


def evaluate_command(launcher: Launcher, directory: Path, run: Run, step: EvalStep) -> list[str]:
    """Results of different lengths of one task must not overwrite each other: own prefixes."""
    arguments = ["--eval_tasks", step.task]
    if step.length is not None:
        prefix = directory / "results" / f"length{step.length}"
        arguments += [
            "--eval_results_prefix",
            str(prefix),
            "--set",
            f"eval_lengths=[{step.length}]",
        ]
        if step.window is not None:
            arguments.append(f"eval_window={step.window}")
    return launcher.command("evaluate.py", directory / "config.yml", run, arguments)
