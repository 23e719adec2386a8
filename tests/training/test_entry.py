"""train.py's outermost layer: what a user can fix is one line, said before the first step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.commands import run
from megatron.training.control_hooks import EXIT_DIVERGED
from megatron.training.entry import text_log
from tests.conftest import REPOSITORY
from tests.evaluation.helpers import tiny_config, write_data
from tests.processes import run_ranks


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    data = write_data(tmp_path / "toy_text_document")
    return tiny_config(
        data_path=str(data), save=str(tmp_path / "run"), optimizer={"type": "Adam"}, train_iters=2
    )


def written(tmp_path: Path, config: dict[str, Any]) -> str:
    (tmp_path / "config.yml").write_text(yaml.safe_dump(config), "utf-8")
    return str(tmp_path / "config.yml")


def train(tmp_path: Path, config: dict[str, Any], **variables: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "train.py", written(tmp_path, config)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_save_that_cannot_be_written_is_one_line(
    tmp_path: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "file").write_text("x")
    for save in (tmp_path / "file", tmp_path / "file" / "deep"):
        assert run("train", [written(tmp_path, {**config, "save": str(save)})]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error (rank 0): save = ") and "another place" in line
    monkeypatch.setenv("KERPLE_TRACEBACK", "1")
    assert run("train", [written(tmp_path, {**config, "save": str(tmp_path / "file")})]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback") and line.partition(":")[0] in shown


def test_a_corpus_of_less_than_one_sequence_is_refused(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    short = write_data(tmp_path / "short_text_document", documents=2, length=7)
    code, _, errors = train(tmp_path, {**config, "data_path": str(short), "split": "1,0,0"})
    assert code == 2
    assert errors == (
        "error (rank 0): the train split holds 14 tokens, too few for one sequence of seq_length "
        "= 16. Use more text, a larger share in split, or a shorter seq_length.\n"
    )


def test_a_split_without_documents_to_train_on_is_refused(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    code, _, errors = train(tmp_path, {**config, "split": "0,50,50"})
    assert code == 2
    assert errors == (
        "error (rank 0): no documents to train on: set train_data_paths, or data_path with a "
        'first share in split (now "0,50,50").\n'
    )


def test_a_model_larger_than_the_machine_is_refused_with_numbers(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    large = {**config, "num_layers": 2000, "hidden_size": 4096}
    code, output, errors = train(tmp_path, large)
    assert code == 2 and output == ""
    assert "403 billion parameters needs 6,001.6 GiB" in errors and "this machine has" in errors
    assert len(errors.splitlines()) == 1


def test_a_first_run_on_the_terminal(tmp_path: Path, config: dict[str, Any]) -> None:
    """Tokens and passes are told, TensorBoard may be absent, libraries are silent."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['tensorboard'] = None")
    settings = {"tensorboard_dir": str(tmp_path / "tb"), "log_dir": str(tmp_path / "logs")}
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    code, output, errors = train(tmp_path, {**config, **settings}, **environment)
    assert code == 0
    assert "data: 900 training tokens; the run reads 32: 4% of it" in output
    assert "tensorboard is not installed" in output and "requirements-wandb.txt" in output
    assert "WARNING" not in output
    assert errors == f"next: python evaluate.py {tmp_path}/run\n"
    assert (tmp_path / "logs" / "rank_00000.log").read_text("utf-8") == output + errors


def test_a_reader_that_leaves_ends_the_run_in_silence(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    """`python train.py ... | head -1`: the code is that of a program which SIGPIPE ended."""
    process = subprocess.Popen(
        [sys.executable, "train.py", written(tmp_path, {**config, "train_iters": 100_000})],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().startswith("data: ")
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 141


def test_a_rank_that_is_no_number_is_one_line(
    tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("RANK", "x")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert run("train", [written(tmp_path, config)]) == 2
    assert capsys.readouterr().err == "error: environment variable RANK = 'x' is not a number.\n"


def test_an_error_of_all_ranks_is_said_once(tmp_path: Path, config: dict[str, Any]) -> None:
    wrong = {**config, "data_path": str(tmp_path / "nowhere"), "train_batch_size": 2}
    outputs = run_ranks(["train.py", written(tmp_path, wrong)], 2, check=False)
    assert sum(output.count("error (rank") for output in outputs) == 1


def test_ctrl_c_while_starting_is_one_word(tmp_path: Path, config: dict[str, Any]) -> None:
    process = subprocess.Popen(
        [sys.executable, "train.py", written(tmp_path, config)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    libraries = Path(f"/proc/{process.pid}/maps")
    while "libtorch" not in libraries.read_text():  # in the middle of the imports
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors == "interrupted\n"


# log_dir keeps what a rank prints.


def test_output_goes_to_the_terminal_and_to_the_ranks_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with text_log(str(tmp_path / "logs"), 3):
        print("a line")
        print("a warning", file=sys.stderr)
    print("not logged")
    captured = capsys.readouterr()
    assert captured.out == "a line\nnot logged\n" and captured.err == "a warning\n"
    assert (tmp_path / "logs" / "rank_00003.log").read_text() == "a line\na warning\n"


def test_without_a_directory_nothing_changes() -> None:
    before = sys.stdout
    with text_log(None, 0):
        assert sys.stdout is before


NAN_AT_ZERO = """
import torch
from megatron.model.positional_embeddings import DistanceKernel, Positive, Uniform

class NanAtZero(DistanceKernel):
    learnable = {"r1": Positive(Uniform(0, 2)), "r2": Positive(Uniform(0, 1))}

    def bias(self, d, r1, r2):
        return -r1 * torch.sqrt(torch.log1p(r2 * d))
"""


@pytest.mark.parametrize("changes", [{}, {"zero_optimization": {"stage": 1}}], ids=["0", "1"])
def test_a_run_of_skipped_steps_names_the_parameter_and_saves_nothing(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any]
) -> None:
    (tmp_path / "nan_kernel.py").write_text(NAN_AT_ZERO)
    own = {**config, "pos_emb": "nan_kernel:NanAtZero", "attention_engine": "auto", **changes}
    path = f"{tmp_path}{os.pathsep}{REPOSITORY}"
    code, output, errors = train(tmp_path, own, PYTHONPATH=path)
    assert code == EXIT_DIVERGED
    assert "(the first in the backward pass: " in output and ".r2); the step was skipped" in output
    assert "error: every step was skipped, so nothing was learned or saved" in output
    assert "saved " not in output and "next: " not in errors
    assert not list((tmp_path / "run").glob("global_step*"))


def test_wandb_without_a_login_is_one_line(tmp_path: Path, config: dict[str, Any]) -> None:
    settings = {"WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(tmp_path)}
    settings |= {"NETRC": str(tmp_path / "none")}
    code, _, errors = train(tmp_path, {**config, "use_wandb": True}, **settings)
    assert code == 2
    (line,) = (line for line in errors.splitlines() if line.startswith("error"))
    assert "use_wandb: " in line and "`wandb login`" in line and "WANDB_MODE=offline" in line
    assert "Traceback" not in errors
