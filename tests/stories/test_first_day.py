"""The first day of three people, by commands alone: a student, a GPT-NeoX user, an engineer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron.commands import run
from tests.conftest import REPOSITORY

SMALL = [
    *("num_layers=1", "hidden_size=32", "num_attention_heads=2", "train_iters=2", "eval_iters=1"),
    *("seq_length=16", "max_position_embeddings=16", "train_micro_batch_size_per_gpu=2"),
    *("eval_interval=2", "checkpoint_factor=2", "lr_decay_iters=2", "log_interval=1"),
    *("split=80,10,10", "training_backend=torch", "warmup=0", "eval_num_sequences=2"),
]
KERNEL = """
from megatron.model.positional_embeddings import DistanceKernel, Positive, Uniform

class Rational(DistanceKernel):
    learnable = {"r1": Positive(Uniform(0, 2))}

    def bias(self, d, r1):
        return -r1 * d / (1 + d)
"""


class Person:
    """Types commands in a folder of their own."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def types(self, command: str, *words: str, code: int = 0) -> str:
        """What a command prints; training ends its process, so it gets one."""
        self._capsys.readouterr()
        if command == "train":
            program = [sys.executable, str(REPOSITORY / "train.py"), *words]
            done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
            ended, said = done.returncode, done.stdout + done.stderr
        else:
            ended = run(command, list(words))
            captured = self._capsys.readouterr()
            said = captured.out + captured.err
        assert ended == code, said
        return said


@pytest.fixture
def person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Person:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    text = (REPOSITORY / "LICENSE").read_text("utf-8")
    (tmp_path / "book.txt").write_text(text)
    return Person(capsys)


def prepare(person: Person) -> None:
    words = ["-q", "--split-text", "line", "--input", "book.txt", "book"]
    assert "book: ready" in person.types("prepare_data", *words)


def test_a_student_compares_two_methods(person: Person) -> None:
    """A first config, two runs, their perplexity side by side, a look at the run, some text."""
    prepare(person)
    data = "data_path=data/book/book_text_document"
    for name, method in (("first", "kerple_log"), ("other", "alibi")):
        person.types("init", name, "--set", *SMALL, data, f"pos_emb={method}")
        assert "step 2/2: loss" in person.types("train", f"{name}.yml")
    person.types("evaluate", "runs/first", "--eval_lengths", "16", "32")
    lengths = ["--set", "eval_lengths=[16,32]"]
    compared = person.types("compare", "runs/first", "runs/other", *lengths)
    assert "runs/first: evaluating" not in compared, "its result is there"
    assert "runs/other: evaluating at lengths [16, 32]" in compared
    assert "length  KERPLE-log" in compared and "ALiBi against KERPLE-log" in compared
    report = Path("runs/compared/report")
    assert (report / "figures" / "main_kernels.png").is_file()
    assert "Missing runs" not in (report / "report.md").read_text("utf-8")
    watched = person.types("watch", "--once", "runs/first")
    assert "step2_extrapolation" in watched and re.search(r"valid +32 +[0-9.]+", watched)
    person.types("generate", "runs/first", "-o", "out.txt", "--set", "maximum_tokens=3")


def test_a_gpt_neox_user_brings_a_config(person: Person) -> None:
    """Checked on one page, mended where it says so, trained with one key changed."""
    prepare(person)
    neox = {
        key.replace("_", "-"): yaml.safe_load(value)
        for key, _, value in (item.partition("=") for item in SMALL)
    } | {"pos-emb": "rotary", "data-path": "data/book/book_text_document", "save-interval": 2}
    del neox["checkpoint-factor"]
    neox |= {"tokenizer-type": "CharLevelTokenizer", "moe_num_experts": 4, "save": "runs/neox"}
    Path("mine.yml").write_text(yaml.safe_dump(neox))
    page = person.types("check", "mine.yml", code=2)
    assert "moe_num_experts = 4 is a GPT-NeoX key that is not implemented here" in page
    assert "save-interval: 2  ->  checkpoint_factor: 2" in page
    neox["moe_num_experts"] = 1
    Path("mine.yml").write_text(yaml.safe_dump(neox))
    page = person.types("check", "mine.yml", "--set", "pos_emb=kerple_log")
    assert "refused           0" in page and "found   data_path: data/book" in page
    assert page.rstrip().endswith("train.py mine.yml --set pos_emb=kerple_log")
    person.types("train", "mine.yml", "--set", "pos_emb=kerple_log")
    assert "kerple_log" in person.types("inspect_checkpoint", "runs/neox")
    person.types("convert_checkpoint", "runs/neox", "back", "--to", "neox")


def test_an_engineer_wants_one_kernel(person: Person) -> None:
    """A class of one's own: is it a kernel, how does it look, what does it add to scores?"""
    Path("my_kernels.py").write_text(KERNEL)
    checked = person.types("check_kernel", "my_kernels:Rational")
    assert "gradients finite" in checked and "  128  yes " in checked and "  no " not in checked
    person.types("plot_kernels", "my_kernels:Rational", "--out", "drawn")
    assert list(Path("drawn").glob("*.png"))
    import torch

    import kerple

    q = torch.randn(1, 2, 40, 8)
    tables = kerple.kernel("my_kernels:Rational", heads=2)(40)
    out = kerple.attention(q, q, q, bias=tables.bias)
    distance = (torch.arange(40)[:, None] - torch.arange(40)).clamp(min=0)
    scores = q @ q.transpose(-1, -2) / 8**0.5 + tables.bias[:, distance]
    future = torch.ones(40, 40).triu(1).bool()
    dense = scores.masked_fill(future, float("-inf")).softmax(-1) @ q
    assert torch.allclose(out, dense, atol=1e-5)
