"""The commands of docs/data.md, run as they are written."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY


def test_a_users_own_corpus_in_three_commands(tmp_path: Path) -> None:
    (tmp_path / "my_texts").mkdir()
    for path in (REPOSITORY / "megatron" / "data").glob("*.py"):
        (tmp_path / "my_texts" / f"{path.stem}.txt").write_text(path.read_text())
    text = (REPOSITORY / "docs" / "data.md").read_text()
    block = re.search(r"```bash\n(.*?)```", text, re.DOTALL)
    assert block is not None
    commands = block.group(1).replace("\\\n", " ").strip().splitlines()
    assert len(commands) == 3
    for command in commands:
        words = shlex.split(command)
        assert words[0] == "python"
        script = [sys.executable, str(REPOSITORY / words[1])]
        arguments = [
            str(REPOSITORY / word) if word.startswith("configs/") else word for word in words[2:]
        ]
        if words[1] == "train.py":  # the training itself is tested elsewhere; two steps will do
            arguments += ["train_iters=2", "eval_interval=2", "eval_iters=1", "train_batch_size=2"]
        finished = subprocess.run(
            [*script, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert finished.returncode == 0, finished.stderr[-2000:]
    assert (tmp_path / "runs" / "my_corpus" / "latest").read_text().strip() == "global_step2"
