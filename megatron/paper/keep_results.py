"""Keep what finished runs have to show, small enough for a repository: no checkpoints, no caches.

A folder of runs that was copied back counts as finished, so that another machine goes on where this
one stopped::

    tools/reproduce.py keep --suite study --out docs/results/study/runs
    cp -r docs/results/study/runs/study runs/          # elsewhere, then `run` as usual
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from megatron.atomic_files import write_text
from megatron.errors import ReproduceError
from megatron.evaluation.results_schema import read_json
from megatron.paper.run_files import done_steps, read_state, step_names, write_state
from megatron.paper.suite import Suite

__all__ = ["keep_results"]

_FILES = ("config.yml", "run.json", "metrics.jsonl")


def keep_results(suite: Suite, root: Path, target: Path) -> list[str]:
    """Copy the finished runs of a suite to ``target/SUITE``; their names."""
    kept = []
    for run in suite.runs:
        source, copy = suite.run_directory(root, run), suite.run_directory(target, run)
        if done_steps(source, run) != set(step_names(run)):
            continue
        copy.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            shutil.copyfile(source / name, copy / name)
        shutil.copytree(source / ".done", copy / ".done", dirs_exist_ok=True)
        # Whose process it was and on which machine is nobody's business.
        write_state(copy, replace(read_state(source), process=None, host=""))
        for file in sorted((source / "results").glob("*.json")):
            content = read_json(file)
            if content is None:
                raise ReproduceError(f"{file}: not a result file; delete it or evaluate again")
            compact = json.dumps(content, separators=(",", ":")) + "\n"
            write_text(copy / "results" / file.name, compact, parents=True)
        kept.append(run.name)
    return kept
