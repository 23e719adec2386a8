"""The Slurm scripts that a suite becomes (tests/stories/test_real_slurm.py submits them)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megatron.commands import run
from megatron.errors import ReproduceError
from megatron.paper.cli import main
from megatron.paper.slurm import ClusterOptions, build_jobs, submit, submitted_jobs
from megatron.paper.suite import load_suite
from tests.conftest import REPOSITORY
from tests.paper.synthetic import write_run


def jobs(tmp_path: Path, *only: str, **options: object):  # type: ignore[no-untyped-def]
    suite = load_suite("paper", only, runs_root=tmp_path)
    chosen = ClusterOptions(**options)  # type: ignore[arg-type]
    return {job.name: job for job in build_jobs(suite, chosen, ["--suite=paper"])}


def test_stages_wait_for_each_other(tmp_path: Path) -> None:
    found = jobs(tmp_path, "main", "long")
    assert list(found) == [
        "data",
        "train-small",
        "evaluate-small",
        "train-small_1024",
        "evaluate-small_1024",
        "report",
    ]
    assert found["train-small"].after == ("data",)
    assert (found["evaluate-small"].after, found["evaluate-small"].dependency) == (
        ("train-small",),
        "aftercorr",
    )
    assert found["report"].after == ("evaluate-small", "evaluate-small_1024")
    assert found["report"].dependency == "afterany"
    assert found["train-small"].runs == found["evaluate-small"].runs


def test_scripts_carry_the_clusters_options(tmp_path: Path) -> None:
    script = jobs(
        tmp_path,
        "large",
        account="lab",
        partition="a100",
        gpu_type="a100",
        time="12:00:00",
        at_once=7,
        grace=120,
        container="apptainer exec --nv box.sif",
        setup=("module load cuda",),
        sbatch=("--mail-type=FAIL",),
        scratch="/scratch/$SLURM_JOB_ID",
        constraint="a100-80gb",
        qos="long",
        gpus_per_task="one",
    )["train-large"].script
    for line in (
        "#SBATCH --account=lab",
        "#SBATCH --partition=a100",
        "#SBATCH --gres=gpu:a100:2",
        "#SBATCH --ntasks=2",
        "#SBATCH --time=12:00:00",
        "#SBATCH --array=0-44%7",
        "#SBATCH --signal=B:USR1@120",
        "#SBATCH --requeue",
        "#SBATCH --mail-type=FAIL",
        "#SBATCH --constraint=a100-80gb",
        "#SBATCH --qos=long",
        'export TMPDIR="/scratch/$SLURM_JOB_ID"',
        "--one-gpu-per-task",
        "module load cuda",
        "'--container=apptainer exec --nv box.sif'",
        "scontrol requeue",
    ):
        assert line in script


def test_data_jobs_go_to_their_own_partition_and_ask_for_no_gpu(tmp_path: Path) -> None:
    options = {"partition": "a100", "data_partition": "cpu", "constraint": "a100-80gb"}
    found = jobs(tmp_path, "main", **options)
    for name in ("data", "report"):
        assert "#SBATCH --partition=cpu" in found[name].script
        assert "gres" not in found[name].script
        assert "constraint" not in found[name].script
    assert "#SBATCH --partition=a100" in found["evaluate-small"].script
    assert "#SBATCH --partition=a100" in jobs(tmp_path, "main", partition="a100")["data"].script


def test_a_cluster_file_and_options_that_win_over_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = str(REPOSITORY / "configs" / "slurm" / "a100.yml")
    call = ["submit", "--suite", "smoke", "--runs", str(tmp_path), "--dry-run", "--cluster"]
    assert main([*call, shipped, "--partition", "h100"]) == 0
    text = capsys.readouterr().out
    assert "#SBATCH --partition=h100" in text
    assert "#SBATCH --partition=cpu" in text
    assert "#SBATCH --gres=gpu:a100:1" in text
    wrong = tmp_path / "mine.yml"
    wrong.write_text("partitions: x\n")
    assert run("reproduce", [*call, str(wrong)]) == 2
    assert "cluster option partitions: " in capsys.readouterr().err
    wrong.write_text("time: 12:30:00\n")  # YAML 1.1 takes it for a number
    assert main([*call, str(wrong)]) == 0
    assert "#SBATCH --time=12:30:00" in capsys.readouterr().out
    for broken in ("a: &x [*x]", "when: !!timestamp nonsense", "[" * 5000, "a: !!int x"):
        wrong.write_text(broken)
        assert run("reproduce", [*call, str(wrong)]) == 2
        assert capsys.readouterr().err.startswith(f"error: --cluster {wrong}: ")


def test_a_note_of_jobs_that_cannot_be_read_is_as_good_as_none(tmp_path: Path) -> None:
    note = tmp_path / "slurm" / "jobs.json"
    note.parent.mkdir()
    for content in ("[]", "{", '{"train": 7}', '{"train": {"job": "7"}}', "[" * 100_000):
        note.write_text(content)
        assert submitted_jobs(tmp_path) == {}
    note.write_text(
        '{"train": {"job": "7 --user=x", "runs": []}, "b": {"job": "\\ud800", "runs": []}}'
    )
    assert submitted_jobs(tmp_path) == {}
    note.write_text('{"train": {"job": 7, "runs": ["a"]}, "other": []}')
    assert submitted_jobs(tmp_path) == {"train": ("7", ["a"])}


def test_every_script_is_valid_shell(tmp_path: Path) -> None:
    for job in jobs(tmp_path, no_gpus=True).values():
        check = subprocess.run(["bash", "-n"], input=job.script, text=True, check=False)
        assert check.returncode == 0, job.name
        assert "--gres" not in job.script


def test_finished_runs_are_not_submitted_again(tmp_path: Path) -> None:
    suite = load_suite("smoke", ["main"], runs_root=tmp_path)
    for finished in suite.runs[:-1]:
        write_run(finished)
    found = {job.name: job for job in build_jobs(suite, ClusterOptions(), [])}
    assert found["train-smoke"].runs == (suite.runs[-1].name,)
    write_run(suite.runs[-1])
    assert [job.name for job in build_jobs(suite, ClusterOptions(), [])] == ["report"]


def test_dry_run_prints_and_submits_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["submit", "--suite", "smoke", "--runs", str(tmp_path), "--dry-run"]
    assert main([*arguments, "--account", "lab"]) == 0
    text = capsys.readouterr().out
    assert "#SBATCH --account=lab" in text
    assert "# task 0: smoke.stdlib.kerple_log.1235" in text
    assert not list(tmp_path.iterdir())


def test_without_slurm_submit_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    suite = load_suite("smoke", runs_root=tmp_path)
    with pytest.raises(ReproduceError, match="login node"):
        submit(suite, ClusterOptions(), [], dry_run=False)


def test_options_cannot_smuggle_lines_into_a_script(tmp_path: Path) -> None:
    with pytest.raises(ReproduceError, match="line break"):
        jobs(tmp_path, account="lab\nrm -rf /")
