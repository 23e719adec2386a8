"""docs/reproducing.md, step by step on a real Slurm: the commands are the page's own.

Only `--only` and `--set` are added, which shrink the suite; `/path/to` becomes a folder with toy
files; the installation is the one that runs the tests.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zstandard

from tests.conftest import REPOSITORY
from tests.stories.hosts import CONTROLLER, Hosts
from tests.stories.test_hosts import hosts as hosts

SHRUNK = (
    "num_layers=1 hidden_size=32 num_attention_heads=2 seq_length=32 max_position_embeddings=32 "
)
SHRUNK += "train_iters=300 lr_decay_iters=300 train_micro_batch_size_per_gpu=2 precision=fp32 "
SHRUNK += "fp32_allreduce=false eval_lengths=[32,64] eval_num_sequences=2 eval_interval=100 "
SHRUNK += "eval_iters=1 log_interval=5 checkpoint_factor=100 num_workers=0 split=80,10,10"
RUNS = ["small.github.kerple_log.1235", "small.arxiv.alibi.1236"]


def steps() -> list[str]:
    """The shell blocks of the guide, in order."""
    page = (REPOSITORY / "docs" / "reproducing.md").read_text(encoding="utf-8")
    guide = page[page.index("## On Slurm") : page.index("### What is submitted")]
    return [
        "\n".join(line.removeprefix("   ") for line in block.splitlines())
        for block in re.findall(r"```bash\n(.*?)```", guide, flags=re.DOTALL)
    ]


def commands(block: str) -> list[list[str]]:
    """The commands of a block that call our scripts."""
    lines = block.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.strip().startswith("python ")]


def test_the_guide_has_the_steps_that_are_followed_here() -> None:
    install, vocabulary, plan, github, arxiv, submit, watch, report = steps()
    assert "make install" in install
    assert "gpt2-vocab.json" in vocabulary
    assert [words[1:3] for words in commands(plan)] == [["tools/reproduce.py", "plan"]]
    assert "--where" in arxiv and "--where" not in github
    assert [words[2] for words in commands(submit)] == ["submit", "submit"]
    assert "--dry-run" in commands(submit)[0] and "--dry-run" not in commands(submit)[1]
    assert [words[2] for words in commands(watch)] == ["status", "logs"]
    assert [words[2] for words in commands(report)] == ["report"]


def toy_text(folder: Path) -> None:
    """Subsets as the guide expects them: one file of GitHub, and shards of the whole Pile."""

    def line(part: str, number: int) -> bytes:
        text = " ".join(f"{part} {number} word{number * k % 97}" for k in range(60))
        return (json.dumps({"text": text, "meta": {"pile_set_name": part}}) + "\n").encode()

    (folder / "pile").mkdir(parents=True)
    pack = zstandard.ZstdCompressor().compress
    github = b"".join(line("Github", number) for number in range(60))
    (folder / "github.jsonl.zst").write_bytes(pack(github))
    for shard in range(2):
        lines = [line(part, n) for n in range(60) for part in ("ArXiv", "Github", "Books3")]
        (folder / "pile" / f"0{shard}.jsonl.zst").write_bytes(pack(b"".join(lines)))


class Reader:
    """Somebody who follows the guide in a folder of their own."""

    def __init__(self, place: Path, environment: dict[str, str]) -> None:
        self.place = place
        self.enter: list[str] = []
        """Words before a command, which let it run on another host."""
        binaries = Path(sys.executable).parent
        self.environment = {**environment, "PYTHONPATH": str(REPOSITORY)}
        self.environment["PATH"] = f"{binaries}{os.pathsep}{environment['PATH']}"
        for name in ("tools", "configs", "deepy.py", "train.py", "evaluate.py", "prepare_data.py"):
            (place / name).symlink_to(REPOSITORY / name)

    def shell(self, text: str) -> str:
        """Runs a block; the guide's own commands, shrunk where they name the suite."""
        shown = text.replace("/path/to", str(self.place / "raw")).replace("\\\n", " ")
        lines = [self._shrunk(line) for line in shown.splitlines()]
        return self.call("bash", "-e", "-c", "\n".join([f"cd {self.place}", *lines]))

    def call(self, *command: str) -> str:
        result = subprocess.run(
            [*self.enter, *command],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
        return result.stdout

    def _shrunk(self, line: str) -> str:
        if "tools/reproduce.py" not in line:
            return line
        runs = " ".join(shlex.quote(run) for run in RUNS)
        return f"{line} --only {runs} --set {shlex.quote(SHRUNK).strip(chr(39))}"


@pytest.mark.slurm
@pytest.mark.timeout(900)
def test_the_guide_works_as_written(hosts: Hosts, tmp_path: Path) -> None:
    """On several hosts with a Slurm over them; each has one GPU, by name."""
    _, vocabulary, plan, github, arxiv, submit, watch, report = steps()
    toy_text(tmp_path / "raw")
    reader = Reader(tmp_path, hosts.environment)
    reader.shell(vocabulary)  # the hosts have no network but their own
    reader.enter = hosts.hosts[CONTROLLER].enter
    assert "estimate" in reader.shell(plan)
    assert "60 documents" in reader.shell(github)
    assert "120 documents" in (text := reader.shell(arxiv))
    assert "240 documents left out by --where" in text
    for path in (tmp_path / "raw").rglob("*.zst"):
        path.unlink()  # the data job must do without

    printed = reader.shell(submit)
    for directive in ("--partition=a100", "--partition=cpu", "--gres=gpu:a100:1", "%16"):
        assert directive in printed
    train = re.search(r"^train-small: job (\d+),", printed, re.MULTILINE)
    assert train is not None
    wait_for(reader, lambda: (tmp_path / "runs/paper" / RUNS[0] / "metrics.jsonl").exists())
    task = f"{train.group(1)}_0"
    reader.call("scontrol", "requeue", task)
    status = reader.shell(watch)
    assert RUNS[0] in status
    wait_for(reader, lambda: not reader.call("squeue", "--noheader").strip())

    status = reader.shell(watch)
    assert "2 runs: 2 done" in status
    assert "nothing failed" in status
    details = reader.call("scontrol", "show", "job", task)
    assert "Restarts=1" in details
    assert re.search(r"\bNodeList=n[123]\b", details)
    assert "KERPLE-log" in reader.shell(report)
    page = (tmp_path / "runs" / "paper" / "report" / "report.html").read_text(encoding="utf-8")
    assert "2 of 2 finished" in page


def wait_for(reader: Reader, condition) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 400
    while not condition():
        logs = [
            *reader.place.glob("runs/paper/slurm/logs/*"),
            *reader.place.glob("runs/*/*/logs/*"),
        ]
        shown = "\n".join(f"== {path}\n{path.read_text()[-1500:]}" for path in logs)
        assert time.monotonic() < deadline, f"waited too long\n{reader.call('squeue')}\n{shown}"
        time.sleep(1)
