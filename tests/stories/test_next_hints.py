"""Every `next:` line that a command prints is run, with smaller sizes added and nothing else."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from megatron.commands import run
from tests.conftest import REPOSITORY

SMALL = [
    *("num_layers=1", "hidden_size=32", "num_attention_heads=2", "train_iters=2", "eval_iters=1"),
    *("seq_length=16", "max_position_embeddings=16", "train_batch_size=2", "checkpoint_factor=2"),
    *("training_backend=torch", "split=80,10,10", "eval_interval=2", "lr_decay_iters=2"),
]
PRINTED_BY = {
    "commands/checkpoint_tools.py": 3,
    "commands/data_tools.py": 1,
    "commands/demo_model.py": 1,  # run in tests/commands/test_demo_model.py
    "commands/model_scripts.py": 2,
    "evaluation/evaluator.py": 1,
    "training/entry.py": 1,
}
"""Who prints such a line, and how many; each is run below."""


def test_every_place_that_prints_a_hint_is_run_here() -> None:
    found: Counter[str] = Counter()
    for path in sorted((REPOSITORY / "megatron").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print_next_command":
                found[path.relative_to(REPOSITORY / "megatron").as_posix()] += 1
    assert found == PRINTED_BY


class Reader:
    """Somebody who pastes each line, in a folder with the repository's configs."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def start(self, command: str, *arguments: str) -> list[list[str]]:
        """Run a command; the hints that it printed, as words."""
        if command == "train":  # ends its process
            train = [sys.executable, str(REPOSITORY / "train.py"), *arguments]
            done = subprocess.run(train, capture_output=True, text=True, timeout=300, check=False)
            code, errors = done.returncode, done.stderr
        else:
            self._capsys.readouterr()
            code = run(command, list(arguments))
            errors = self._capsys.readouterr().err
        assert code == 0, f"{command} {shlex.join(arguments)}\n{errors}"
        lines = errors.splitlines()
        return [shlex.split(line)[1:] for line in lines if line.startswith("next: ")]

    def paste(self, hint: list[str], *more: str) -> list[list[str]]:
        starter, script, *rest = hint
        assert starter == "kerple" or (starter == "python" and (REPOSITORY / script).is_file())
        if Path(script).stem == "deepy":  # without the launcher: its one process
            script, *rest = rest
        return self.start(Path(script).stem, *rest, *more)


@pytest.fixture
def reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Reader:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    (tmp_path / "texts").mkdir()
    paragraphs = (REPOSITORY / "LICENSE").read_text(encoding="utf-8").split("\n\n")
    for number, paragraph in enumerate(paragraphs):
        (tmp_path / "texts" / f"{number:03d}.txt").write_text(paragraph, encoding="utf-8")
    return Reader(capsys)


def test_from_text_to_generated_text(reader: Reader) -> None:
    (train,) = reader.start("prepare_data", "-q", "-d", "data", "--input", "texts", "mine")
    (evaluate,) = reader.paste(train, *SMALL)
    (generate,) = reader.paste(evaluate, "--eval_lengths", "16", "--set", "eval_num_sequences=2")
    assert reader.paste(generate, "--set", "maximum_tokens=3", "-o", "out.txt") == []
    (inspect,) = reader.start("convert_checkpoint", "runs/mine", "neox", "--to", "neox")
    assert reader.paste(inspect) == []
    ((python, flag, code),) = reader.start("convert_checkpoint", "runs/mine", "hf", "--to", "hf")
    assert (python, flag) == ("python", "-c")
    exec(code, {})
    data = f"data_path={Path('data/mine/mine_text_document').resolve()}"
    exported = [
        "hf",
        "--eval_lengths",
        "16",
        "--set",
        data,
        "split=80,10,10",
        "eval_num_sequences=2",
    ]
    for more in ([], ["inference_dtype=bf16"], ["inference_dtype=int8"]):
        assert reader.start("evaluate", *exported, *more) == []
    results = [json.loads(path.read_text()) for path in Path("hf/results").glob("*.json")]
    losses = {
        r["settings"].get("inference_dtype"): r["results"]["valid"][0]["loss"] for r in results
    }
    assert losses.keys() == {None, "bf16", "int8"} and len(set(losses.values())) == 3
    assert max(losses.values()) - min(losses.values()) < 0.02
    (onnx,) = reader.start("convert_checkpoint", "runs/mine", "onnx", "--to", "onnx")
    greedy = ["--set", "maximum_tokens=20", "temperature=0", "-o", "onnx.txt"]
    Path("prompt.txt").write_text("The License")
    assert reader.paste(onnx, "-i", "prompt.txt", *greedy) == []
    (record,) = map(json.loads, Path("onnx.txt").read_text().splitlines())
    example = [sys.executable, "-X", "importtime", str(REPOSITORY / "examples/onnx_runtime.py")]
    command = [*example, "onnx", "The License", "20"]
    alone = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert alone.stdout.strip() == ("The License" + record["text"]).strip()
    imported = set(re.findall(r"\| +(\w+)$", alone.stderr, re.M))
    assert "onnxruntime" in imported and not imported & {"torch", "transformers", "megatron"}


def test_from_a_first_config(reader: Reader) -> None:
    prepare, train = reader.start("init")
    assert prepare[1:] == ["prepare_data", "stdlib"], "the README's first command, run by its test"
    assert train[1] == "train"
    with pytest.raises(SystemExit) as ended:
        run("train", [*train[2:], "--dry-run"])
    assert ended.value.code == 0
