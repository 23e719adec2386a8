"""What a suite costs, and the Slurm scripts it becomes (the real Slurm is in test_slurm.py)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megatron.errors import ReproduceError
from megatron.paper.cli import main
from megatron.paper.plan import estimate_cost, parameter_count, plan_text
from megatron.paper.published import published_seconds_per_step
from megatron.paper.slurm import ClusterOptions, build_jobs, submit
from megatron.paper.suite import load_suite
from tests.paper.synthetic import write_run


def test_parameters_of_the_papers_model() -> None:
    run = load_suite("paper").runs[0]
    assert parameter_count(run.config) + 2 * 12 == 162_322_968


def test_gpu_hours_follow_the_papers_seconds_per_step() -> None:
    run = next(run for run in load_suite("paper").runs if run.method == "rpe")
    cost = estimate_cost(run)
    assert cost.steps == 50_000
    assert cost.tokens == 50_000 * 32 * 512
    training = 50_000 * published_seconds_per_step()["rpe"] / 3600
    assert training < cost.gpu_hours < 1.2 * training


def test_the_large_model_counts_its_accumulation_and_not_its_tensor_parallel_ranks() -> None:
    run = next(run for run in load_suite("paper").runs if run.model == "large")
    assert estimate_cost(run).tokens == 150_000 * 32 * 512


def test_plan_counts_shared_runs_once() -> None:
    text = plan_text(load_suite("paper"))
    assert "274 runs" in text
    assert "(runs shared with a section above)" in text
    assert "not measured" in text


def test_plan_writes_complete_configs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--suite", "demo", "--runs", str(tmp_path), "--write", "--list"]
    assert main(arguments) == 0
    configs = list((tmp_path / "demo").glob("*/config.yml"))
    assert len(configs) == len(load_suite("demo").runs)
    assert "pos_emb: " in configs[0].read_text(encoding="utf-8")
    assert configs[0].parent.name in capsys.readouterr().out


def jobs(tmp_path: Path, *only: str, **options: object):  # type: ignore[no-untyped-def]
    suite = load_suite("paper", only, runs_root=tmp_path)
    chosen = ClusterOptions(**options)  # type: ignore[arg-type]
    return {job.name: job for job in build_jobs(suite, tmp_path, chosen, ["--suite=paper"])}


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
        grace_seconds=120,
        container="apptainer exec --nv box.sif",
        setup=("module load cuda",),
        extra=("--mail-type=FAIL",),
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
        "module load cuda",
        "'--container=apptainer exec --nv box.sif'",
        "scontrol requeue",
    ):
        assert line in script


def test_every_script_is_valid_shell(tmp_path: Path) -> None:
    for job in jobs(tmp_path, no_gpus=True).values():
        check = subprocess.run(["bash", "-n"], input=job.script, text=True, check=False)
        assert check.returncode == 0, job.name
        assert "--gres" not in job.script


def test_finished_runs_are_not_submitted_again(tmp_path: Path) -> None:
    suite = load_suite("smoke", ["main"], runs_root=tmp_path)
    for run in suite.runs[:-1]:
        write_run(suite, tmp_path, run)
    found = {job.name: job for job in build_jobs(suite, tmp_path, ClusterOptions(), [])}
    assert found["train-smoke"].runs == (suite.runs[-1].name,)
    write_run(suite, tmp_path, suite.runs[-1])
    assert [job.name for job in build_jobs(suite, tmp_path, ClusterOptions(), [])] == ["report"]


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
        submit(suite, tmp_path, ClusterOptions(), [], dry_run=False)


def test_options_cannot_smuggle_lines_into_a_script(tmp_path: Path) -> None:
    with pytest.raises(ReproduceError, match="line break"):
        jobs(tmp_path, account="lab\nrm -rf /")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--suite", "nope"], "no suite 'nope'"),
        (["run", "--suite", "smoke", "-j", "0"], "at least one"),
        (["plan", "--suite", "smoke", "--set", "train_iters"], "expected KEY=VALUE"),
    ],
)
def test_wrong_arguments_end_with_a_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
