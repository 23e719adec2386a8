"""`tools/reproduce.py status`: every run with its state, step, loss and ETA."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

from megatron.paper.progress import RunProgress, duration, progress_of
from megatron.paper.run_files import State
from megatron.paper.slurm import submitted_jobs
from megatron.paper.suite import Suite

__all__ = ["queue_states", "status_text"]


def status_text(suite: Suite, root: Path) -> str:
    """From the run directories, and squeue where there is one."""
    queued = queue_states(suite, root)
    rows = [progress_of(suite.run_directory(root, run), run) for run in suite.runs]
    head = f"{'run':<36}{'state':<13}{'stage':<22}{'step':>14}{'loss':>9}{'left':>10}  queue"
    lines = [head, *(_row(progress, queued.get(progress.name, "")) for progress in rows)]
    counts = Counter(progress.state for progress in rows)
    summary = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    return "\n".join([*lines, "", f"{len(rows)} runs: {summary}"]) + "\n"


def _row(progress: RunProgress, queue: str) -> str:
    step = f"{progress.step}/{progress.total}" if progress.step else ""
    loss = f"{progress.loss:.3f}" if progress.loss is not None else ""
    running = progress.state == State.RUNNING and progress.seconds_left is not None
    left = duration(progress.seconds_left or 0) if running else ""
    start = f"{progress.name:<36}{progress.state:<13}{progress.stage:<22}"
    return f"{start}{step:>14}{loss:>9}{left:>10}  {queue}".rstrip()


def queue_states(suite: Suite, root: Path) -> dict[str, str]:
    """Run name -> "train PENDING (Priority)" from squeue; empty without Slurm or jobs."""
    submission = submitted_jobs(root / suite.name)
    if not submission or shutil.which("squeue") is None:
        return {}
    jobs = ",".join(job for job, _ in submission.values())
    command = ["squeue", "--noheader", "--array", "--format=%A %F %K %T %r", f"--jobs={jobs}"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    states: dict[str, str] = {}
    by_job = {job: (stage, names) for stage, (job, names) in submission.items()}
    for line in listed.stdout.splitlines():
        match = re.match(r"\S+ (\d+) (\d+|N/A) (\S+) (.*)", line.strip())
        if match is None or match.group(1) not in by_job:
            continue
        stage, names = by_job[match.group(1)]
        if match.group(2).isdigit() and int(match.group(2)) < len(names):
            reason = "" if match.group(4) == "None" else f" ({match.group(4)})"
            name = names[int(match.group(2))]
            # A run waits in two arrays at once: training is the more interesting one.
            if name not in states or stage.startswith("train"):
                states[name] = f"{stage} {match.group(3)}{reason}"
    return states
