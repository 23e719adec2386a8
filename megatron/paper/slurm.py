"""`tools/reproduce.py submit`: a suite as Slurm array jobs with dependencies.

    data (array) -> train (one array per model) -> evaluate (array, task by task) -> report

The scripts are templates, filled in and kept beside the runs. Each array task calls this package
back with its index; the list of runs is a file written at submission.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron.atomic_files import read_json, write_text
from megatron.errors import ConfigError, ReproduceError
from megatron.evaluation.results_schema import first_problem
from megatron.neox_arguments.yaml_files import parse_yaml, read_text
from megatron.paper.execute import Children, Launcher, execute_run, prepare_data, tail
from megatron.paper.result_fit import is_finished
from megatron.paper.run_files import State, log_path, prepare_run, trained
from megatron.paper.suite import TRAIN, Run, Suite
from megatron.terminal import EXIT_REQUEUE, PACKAGE

TEMPLATES = Path(__file__).resolve().parent / "templates"


@dataclass(frozen=True)
class Job:
    """One sbatch call: its script and the earlier jobs it waits for."""

    name: str
    stage: str
    path: Path
    script: str
    runs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    dependency: str = "afterok"


def build_jobs(suite: Suite, options: ClusterOptions, suite_arguments: list[str]) -> list[Job]:
    """All jobs for the unfinished runs of a suite, in the order of submission."""
    open_runs = [run for run in suite.runs if not is_finished(run)]
    script = _Script(suite, options, suite_arguments)
    jobs: list[Job] = []
    if open_runs:
        jobs.append(script.job("data", tuple(dict.fromkeys(run.data for run in open_runs))))
    for model in dict.fromkeys(run.model for run in open_runs):
        own = [run for run in open_runs if run.model == model]
        names = tuple(run.name for run in own)
        # Evaluation waits task by task, so both arrays must have the same tasks; a task whose
        # training is finished ends at once.
        after, dependency = jobs[0], "afterok"
        if not all(trained(run) for run in own):
            after, dependency = script.job("train", names, (jobs[0].name,), one=own[0]), "aftercorr"
            jobs.append(after)
        jobs.append(script.job("evaluate", names, (after.name,), dependency, one=own[0]))
    last = tuple(job.name for job in jobs if job.stage == "evaluate")
    return [*jobs, script.job("report", (), last, "afterany")]


class _Script:
    """Fills the templates; every value that reaches a shell is quoted."""

    def __init__(self, suite: Suite, options: ClusterOptions, suite_arguments: list[str]) -> None:
        self._suite, self._options, self._suite_arguments = suite, options, suite_arguments
        self._stamp = time.strftime("%Y%m%d-%H%M%S")
        self._templates = Environment(
            loader=FileSystemLoader(TEMPLATES),
            undefined=StrictUndefined,
            keep_trailing_newline=True,
            trim_blocks=True,
            autoescape=False,  # noqa: S701 - a shell script; every value is quoted
        )
        self._templates.filters |= {"line": _line, "in_double_quotes": _in_double_quotes}
        self._templates.filters["quote"] = lambda value: shlex.quote(str(value))

    def job(
        self,
        stage: str,
        tasks: tuple[str, ...],
        after: tuple[str, ...] = (),
        dependency: str = "afterok",
        *,
        one: Run | None = None,
    ) -> Job:
        """For several data sets, or for runs of which `one` is like the others."""
        name = f"{stage}-{one.model}" if one else stage
        path = self._suite.directory / "slurm" / f"{self._stamp}-{name}.sbatch"
        template = self._templates.get_template(f"{stage}.sbatch.j2")
        text = template.render(
            suite=self._suite.name,
            model=one.model if one else "",
            gpus=one.gpus if one else 1,
            last=len(tasks) - 1,
            options=self._options,
            on_gpus=stage in ("train", "evaluate"),
            log_directory=_line((path.parent / "logs").resolve().as_posix()),
            place=Path.cwd(),
            package=PACKAGE.parent,
            worker=self._worker(path.with_suffix(".tasks") if tasks else None),
        )
        return Job(name, stage, path, text, tasks, after, dependency)

    def _worker(self, task_file: Path | None) -> str:
        options = self._options
        words = [sys.executable, "-u", "-m", "megatron.paper.cli", "worker"]
        words += self._suite_arguments
        for name in ("container", "python"):
            if value := getattr(options, name):
                words.append(f"--{name}={value}")
        if options.gpus_per_task == "one" and not options.no_gpus:
            words.append("--one-gpu-per-task")
        if task_file is not None:
            words.append(f"--tasks={task_file}")
        return shlex.join(words)


def _line(value: str) -> str:
    """A value that stays on its line of the script."""
    if "\n" in value or "\r" in value:
        raise ReproduceError(f"cluster option {value!r} contains a line break")
    return value


def _in_double_quotes(value: str) -> str:
    """The job's own variables are meant to be expanded, and nothing else."""
    place = _line(value).replace("\\", "\\\\").replace('"', '\\"')
    return place.replace("`", "\\`").replace("$(", "\\$(")


def submit(suite: Suite, options: ClusterOptions, suite_arguments: list[str], dry_run: bool) -> int:
    """Submit everything, printing each script's name and job number; or print the scripts."""
    jobs = build_jobs(suite, options, suite_arguments)
    if dry_run:
        for job in jobs:
            waits = f", {job.dependency} {', '.join(job.after)}" if job.after else ""
            print(f"##### {job.path}: {max(len(job.runs), 1)} task(s){waits}")
            for index, name in enumerate(job.runs):
                print(f"# task {index}: {name}")
            print(job.script)
        return 0
    if shutil.which("sbatch") is None:
        raise ReproduceError("sbatch was not found: submit on a Slurm login node, or use `run`")
    if len(jobs) == 1:
        print(f"{suite.name}: every run is finished; only the report is written")
    for run in suite.runs:
        prepare_run(run)
    directory = suite.directory / "slurm"
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    numbers: dict[str, str] = {}
    known: dict[str, dict[str, Any]] = {}
    for job in jobs:
        numbers[job.name] = _submit_one(job, numbers)
        if job.stage != "report":
            known[job.name] = {"job": numbers[job.name], "runs": list(job.runs)}
        # For `status`, after every job, so that an interrupted submission is known too.
        write_text(directory / "jobs.json", json.dumps(known, indent=1) + "\n")
    return 0


def _submit_one(job: Job, numbers: Mapping[str, str]) -> str:
    path = job.path
    write_text(path, job.script, parents=True)
    write_text(path.with_suffix(".tasks"), "".join(f"{name}\n" for name in job.runs))
    command = ["sbatch", "--parsable"]
    waits = [numbers[name] for name in job.after if name in numbers]
    if waits:
        command.append(f"--dependency={job.dependency}:{':'.join(waits)}")
        if job.dependency != "afterany":
            # A job whose predecessor failed would otherwise wait for ever.
            command.append("--kill-on-invalid-dep=yes")
    result = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ReproduceError(f"sbatch refused {path}: {result.stderr.strip()}")
    number = result.stdout.strip().split(";")[0]
    print(f"{job.name}: job {number}, {max(len(job.runs), 1)} task(s), {path}")
    return number


def submitted_jobs(suite_directory: Path) -> dict[str, tuple[str, list[str]]]:
    """Job name -> (job number, run names in the order of array tasks) of the last submission."""
    content = read_json(suite_directory / "slurm" / "jobs.json") or {}
    return {
        name: (str(entry["job"]), [str(run) for run in entry["runs"]])
        for name, entry in content.items()
        if isinstance(entry, dict) and isinstance(entry.get("runs"), list)
        if re.fullmatch(r"[0-9]{1,20}", str(entry.get("job")))  # squeue gets it as an argument
    }


# What one Slurm array task does; also usable by hand to repeat a single task.


def run_task(suite: Suite, stage: str, name: str, launcher: Launcher) -> int:
    """Prepare a data set, or train or evaluate a run; the exit code for the batch script."""
    children = Children()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        # srun passes USR1 on to its tasks; on TERM it would end them without a chance to save.
        signal.signal(number, lambda *_: children.stop(signal.SIGUSR1))
    if stage == "data":
        user = next((run for run in suite.runs if run.data == name), None)
        if user is None:
            raise ReproduceError(f"suite {suite.name} has no data set {name!r}")
        prepare_data(children, launcher, suite, user)
        return EXIT_REQUEUE if children.stopping else 0
    run = suite.run_named(name)
    prepare_run(run)
    training = stage == "train"
    state = execute_run(children, launcher, run, lambda step: (step == TRAIN) == training)
    if state.state == State.INTERRUPTED:
        print(f"{run.name}: {stage} interrupted, exit code {EXIT_REQUEUE}", flush=True)
        return EXIT_REQUEUE
    if state.state == State.FAILED:
        log = log_path(run, state.step)
        print(f"{run.name}: {state.step} failed (exit code {state.exit_code}); {log}:")
        print(tail(log), flush=True)
        return 1
    print(f"{run.name}: {stage} finished", flush=True)
    return 0


# What differs between Slurm clusters: options of `submit`, or a file for its `--cluster`.


class ClusterOptions(BaseModel):
    """What differs between clusters; None leaves the cluster's default.

    The same names are options of `submit` (with hyphens) and keys of a file for `--cluster`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    account: str | None = Field(None, description="account to charge")
    partition: str | None = Field(None, description="partition of the GPU nodes")
    data_partition: str | None = Field(
        None, description="partition of the data and report jobs, which need no GPU"
    )
    qos: str | None = Field(None, description="quality of service")
    constraint: str | None = Field(None, description="node features of the GPU jobs")
    gpu_type: str | None = Field(None, description="GPU type as in --gres=gpu:TYPE:N")
    gpus_per_task: Literal["all", "one"] = Field(
        "all", description="which of a job's GPUs each task sees: all of them, or its own one"
    )
    no_gpus: bool = Field(False, description="CPU nodes: one process per task")
    cpus_per_task: int = Field(8, ge=1, description="processors of each training process (8)")
    memory: str | None = Field(None, description="memory of a node, as for --mem")
    time: str = Field("24:00:00", description="limit of a training job (24:00:00)")
    evaluate_time: str = Field("4:00:00", description="limit of an evaluation job (4:00:00)")
    data_time: str = Field("24:00:00", description="limit of a data job (24:00:00)")
    data_cpus: int = Field(8, ge=1, description="processors of a data job (8)")
    grace: int = Field(300, ge=1, description="seconds before the limit at which runs save (300)")
    at_once: int | None = Field(
        None, ge=1, description="largest number of array tasks that run at a time"
    )
    scratch: str | None = Field(
        None,
        description="node-local directory for temporary files and compiled engines; shell "
        "variables are expanded in the job, e.g. '/scratch/$SLURM_JOB_ID'",
    )
    container: str | None = Field(
        None, description="command before python, e.g. 'apptainer exec --nv image.sif'"
    )
    python: str | None = Field(None, description="python inside the container (this one)")
    setup: tuple[str, ...] = Field((), description="shell line before python, e.g. 'module load x'")
    sbatch: tuple[str, ...] = Field((), description="further sbatch option")

    @classmethod
    def from_file(cls, path: str | None, given: Mapping[str, Any]) -> ClusterOptions:
        """A cluster's file, overridden by the command line."""
        content: Any = {}
        try:
            if path is not None:
                content = parse_yaml(read_text(path), path) or {}
            if not isinstance(content, dict):
                raise ReproduceError(f"--cluster {path}: expected a mapping of options")
            return cls.model_validate({**content, **given})
        except ConfigError as error:
            raise ReproduceError(f"--cluster {error}") from error
        except ValidationError as error:
            known = ", ".join(cls.model_fields)
            raise ReproduceError(
                f"cluster option {first_problem(error)} (options: {known})"
            ) from error
