"""deepy.py, kerple compare and kerple init from the outside."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.commands import run
from megatron.neox_arguments import NeoXArgs
from tests.conftest import REPOSITORY
from tests.neox_arguments.samples import TINY

TOY = """
import sys, time
from pathlib import Path
from megatron.launcher.environment import environment_for
from megatron.neox_arguments import parse_command_line

args, options = parse_command_line("toy.py")
place = environment_for(args.launcher, options.local_rank)
out = Path(args.checkpoint.save)
{body}
"""
ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", rank=place.rank, world_size=place.world_size)
total = torch.tensor([float(place.rank + 1)])
dist.all_reduce(total)
(out / f"rank{place.rank}").write_text(f"{total.item()} {args.data.split}")
dist.destroy_process_group()
sys.exit(0 if args.runtime.seed == 0 else args.runtime.seed if place.rank == 1 else 0)
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    values = {**TINY, "save": str(tmp_path), "split": "9,1, 0"}
    (tmp_path / "toy.yml").write_text(json.dumps({**values, "wandb_group": "a b $(x) `y` \"z'"}))
    (tmp_path / "toy.py").write_text(TOY.replace("{body}", ALL_REDUCE))
    return tmp_path


def environment() -> dict[str, str]:
    removed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    values = {key: value for key, value in os.environ.items() if key not in removed}
    return {**values, "PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu"}


def deepy(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "deepy.py"), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=120, check=False
    )


def test_two_processes_meet_over_gloo_and_the_exit_code_comes_back(toy: Path) -> None:
    with socket.socket() as busy:
        busy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            busy.bind(("127.0.0.1", 29500))
            busy.listen()
        except OSError:
            pass  # somebody else holds it, which serves as well
        result = deepy(toy / "toy.py", toy / "toy", "--set", "num_gpus=2", "seed=7")
    assert (toy / "rank0").read_text() == "3.0 9,1, 0", result.stderr
    assert (toy / "rank1").read_text() == "3.0 9,1, 0"
    assert result.returncode == 7


def test_srun_tasks_find_each_other_without_a_launcher(toy: Path) -> None:
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NODELIST": "node7"}
    tasks = []
    for rank in ("0", "1"):
        task = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NTASKS": "2"}
        command = [sys.executable, toy / "toy.py", toy / "toy.yml", "--set", "seed=0"]
        tasks.append(subprocess.Popen(command, env={**environment(), **job, **task}))
    assert [task.wait(timeout=120) for task in tasks] == [0, 0]
    assert [(toy / f"rank{rank}").read_text() for rank in (0, 1)] == ["3.0 9,1, 0"] * 2


def test_one_process_is_the_script_itself(toy: Path) -> None:
    body = "(out / 'one').write_text(f'{place.source} {args.logging.wandb_group}'); sys.exit(5)"
    (toy / "toy.py").write_text(TOY.replace("{body}", body))
    assert deepy(toy / "toy.py", "-d", toy, "toy").returncode == 5
    assert (toy / "one").read_text() == "single a b $(x) `y` \"z'"


def test_terminating_deepy_ends_all_processes(toy: Path) -> None:
    body = "import os\n(out / f'pid{place.rank}').write_text(str(os.getpid()))\ntime.sleep(100)\n"
    (toy / "toy.py").write_text(TOY.replace("{body}", body))
    command = [sys.executable, REPOSITORY / "deepy.py", toy / "toy.py", toy / "toy.yml"]
    job = subprocess.Popen([*command, "--set", "num_gpus=2"], env=environment())
    files = [toy / "pid0", toy / "pid1"]
    try:
        deadline = time.monotonic() + 90
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < deadline and job.poll() is None
            time.sleep(0.1)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=60) != 0
    finally:
        job.kill()
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["toy.yml", "--set", "train_itres=3"], "train_iters"),
        (["nothere.yml"], "nothere.yml"),
        (["toy.yml", "--set", "hidden_size=33"], "hidden_size = 33"),
        (["toy.yml", "--set", "hostfile=/nonexistent/hosts", "num_nodes=2"], "hostfile"),
        (["toy.yml", "--set", "model_parallel_size=2"], "1 processes"),
        ([], "no config file"),
    ],
)
def test_wrong_config_is_one_line_and_status_2(
    toy: Path, arguments: list[str], fragment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron.commands import run

    assert run("deepy", [str(toy / "toy.py"), "-d", str(toy), *arguments]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and fragment in errors and "Traceback" not in errors


def test_dry_run_explains_without_deepspeed(toy: Path) -> None:
    program = (
        "import sys; from megatron.commands.model_scripts import deepy\n"
        f"code = deepy(['train.py', {str(REPOSITORY / 'configs' / 'small_bf16')!r}, '--override', "
        f"{str(REPOSITORY / 'configs' / 'local_setup.yml')!r}, '--dry-run'])\n"
        "assert code == 0 and 'deepspeed' not in sys.modules"
    )
    (toy / "train.py").write_text("")
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, cwd=toy, env=environment(), check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    for fragment in (
        "pos_emb: kerple_log", "162,322,968", "16,384 tokens per step", "819,200,000 tokens",
        "GiB", "train.py --megatron_config",
    ):  # fmt: skip
        assert fragment in result.stdout


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    from megatron.commands.model_scripts import deepy

    with pytest.raises(SystemExit) as ending:
        deepy(["--help"])
    assert ending.value.code == 0
    text = capsys.readouterr().out
    assert "--override" in text and "examples:" in text and "python deepy.py train.py" in text


@pytest.mark.parametrize("setup", ["slurm_local", "eleutherai_cluster", "local_setup"])
@pytest.mark.parametrize("model", ["XL", "small_bf16"])
def test_a_dry_run_works_away_from_the_cluster_and_names_missing_files(
    model: str,
    setup: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.commands import run

    monkeypatch.chdir(tmp_path)
    configs = REPOSITORY / "configs"
    (tmp_path / "train.py").write_text("")
    files = [str(configs / f"{model}.yml"), str(configs / f"{setup}.yml")]
    assert run("deepy", ["train.py", *files, "--dry-run"]) == 0
    report = capsys.readouterr().out
    assert "# parameters" in report and "# batch on" in report
    assert "MISSING vocab_file: " in report and "_text_document.bin\n" in report
    alone = model == "small_bf16" and setup != "slurm_local"
    assert ("not possible here: " in report) != alone
    # Without its hostfile the cluster is this machine, as in GPT-NeoX; the report says so.
    warned = "hostfile = hostfile does not exist: this machine alone is used" in report
    assert warned == (setup == "eleutherai_cluster" and alone)


def test_a_dry_run_says_that_the_model_is_too_large_for_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.commands import run

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    config = str(REPOSITORY / "configs" / "laptop" / "tiny.yml")
    sets = ["--set", "num_layers=200", "hidden_size=4096"]
    with pytest.raises(SystemExit) as ending:
        run("train", [config, *sets, "--dry-run"])
    assert ending.value.code == 0
    report = capsys.readouterr().out
    assert "this machine, without a GPU" in report
    assert "warning: a model of 40.7 billion parameters needs 606.3 GiB" in report


# kerple init.


def test_a_first_config_is_complete_and_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("init", []) == 0
    args = NeoXArgs.from_files(["my_model.yml"])
    assert args.model.pos_emb == "kerple_log" and args.checkpoint.save == "runs/my_model"
    assert "# Transformer layers.\nnum_layers: 4\n" in Path("my_model.yml").read_text("utf-8")
    hints = capsys.readouterr().err.splitlines()
    assert hints == ["next: kerple prepare_data stdlib", "next: kerple train my_model.yml"]
    with pytest.raises(SystemExit) as ended:
        run("train", ["my_model.yml", "--dry-run"])
    assert ended.value.code == 0
    values = ["pos_emb=alibi", "optimizer.params.lr=1e-3", "sliding_window_width=64"]
    assert run("init", ["mine", "--set", *values]) == 0
    mine = NeoXArgs.from_files(["mine.yml"])
    assert (mine.model.pos_emb, mine.model.sliding_window_width) == ("alibi", 64)
    assert mine.to_dict()["optimizer"]["params"]["lr"] == 1e-3


def test_no_file_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_model.yml").write_text("mine")
    assert run("init", []) == 2
    assert "my_model.yml: exists" in capsys.readouterr().err
    assert (tmp_path / "my_model.yml").read_text() == "mine"
