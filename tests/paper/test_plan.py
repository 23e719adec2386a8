"""What a suite costs, and the Slurm scripts it becomes (the real Slurm is in test_slurm.py)."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.errors import ReproduceError
from megatron.paper.cli import main
from megatron.paper.execute import Launcher, step_command
from megatron.paper.plan import estimate_cost, plan_text
from megatron.paper.slurm import ClusterOptions, build_jobs, submit, submitted_jobs
from megatron.paper.suite import TRAIN, load_suite
from megatron.paper.tables import published_seconds_per_step
from tests.conftest import REPOSITORY
from tests.paper.synthetic import write_run


def test_parameters_of_the_papers_model() -> None:
    run = load_suite("paper").runs[0]
    assert estimate_cost(run).parameters + 2 * 12 == 162_322_968


def test_gpu_hours_follow_the_papers_seconds_per_step() -> None:
    run = next(run for run in load_suite("paper").runs if run.method == "rpe")
    cost = estimate_cost(run)
    assert cost.steps == 50_000
    assert cost.tokens == 50_000 * 32 * 512
    training = 50_000 * published_seconds_per_step()["rpe"] / 3600
    assert cost.train_hours == pytest.approx(training)
    assert training < cost.hours < 1.3 * training


def test_the_large_model_counts_its_accumulation_and_not_its_tensor_parallel_ranks() -> None:
    run = next(run for run in load_suite("paper").runs if run.model == "large")
    assert estimate_cost(run).tokens == 150_000 * 32 * 512


def test_plan_counts_shared_runs_once() -> None:
    text = plan_text(load_suite("paper"))
    assert "274 runs" in text
    assert "(runs of a section above)" in text
    assert "Nothing of this was measured on a GPU by us" in text
    for fact in ("A100 40 GB", "A100 80 GB", "H100 80 GB", "95.16 GB raw", "tokenizing about"):
        assert fact in text


def test_laptop_suites_are_planned_in_minutes_on_cores() -> None:
    text = plan_text(load_suite("demo"))
    assert "A100" not in text
    found = re.search(r"With -j 2 on two cores about ([\d.]+) min", text)
    assert found is not None
    assert 4 < float(found.group(1)) < 16  # `make demo` took 8 minutes here


def test_a_corpus_with_its_own_vocabulary_is_not_counted_with_gpt2s() -> None:
    """The study's models have 4,096 tokens; with 50,257 they would look fifteen times as costly."""
    run = load_suite("study").run_named("short.python_projects.kerple_log.1235")
    assert estimate_cost(run).parameters + 2 * 4 == 1_841_928  # as its results record
    cost = estimate_cost(run)
    assert cost.on_cpu
    assert 100 < 3600 * cost.train_hours < 250  # 134 to 166 s were measured
    tokens = 12 * 4096 * 6 + 12 * 2 * (1024 + 4096)  # one split, two window sizes
    assert cost.evaluation_tokens == tokens


def test_cores_and_gpus_are_never_added_up() -> None:
    """A suite of both has a row, a total and a table for each."""
    small = load_suite("study", ["short.python_projects.kerple_log.1235"])
    large = load_suite("paper", ["small.github.kerple_log.1235", "main"])
    runs = (*large.runs, replace(small.runs[0], sections=("main",)))
    file = large.file.model_copy(update={"data": large.file.data | small.file.data})
    both = replace(large, runs=runs, file=file)
    costs = [estimate_cost(run) for run in both.runs]
    assert [cost.on_cpu for cost in costs] == [False, True]
    rows = [line for line in plan_text(both).splitlines() if "one core" in line or "A100" in line]
    assert any(re.search(r"^main .* 1.02M +one core +\S+ min", row) for row in rows)
    assert any(re.search(r"^ +819M +an A100 +4.\d h +4.\d h", row) for row in rows)
    assert any(
        re.search(r"estimate: \S+ min on one core and 4.\d h on an A100", row) for row in rows
    )
    gpu_table = [row for row in rows if row.startswith("A100 40 GB")]
    assert gpu_table
    assert all("short" not in row for row in gpu_table)


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


def test_srun_repeats_what_it_does_not_inherit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load_suite("paper", ["large"]).runs[0]
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "6")
    command = step_command(Launcher(srun=True, one_gpu_per_task=True), run, TRAIN)
    assert {"--cpus-per-task=6", "--gpus-per-task=1", "--ntasks=2"} <= set(command)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK")
    assert not any(
        "gpus" in word or "cpus" in word for word in step_command(Launcher(srun=True), run, TRAIN)
    )


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
    assert main([*call, str(wrong)]) == 2
    assert "cluster option partitions: " in capsys.readouterr().err
    wrong.write_text("time: 12:30:00\n")  # YAML 1.1 takes it for a number
    assert main([*call, str(wrong)]) == 0
    assert "#SBATCH --time=12:30:00" in capsys.readouterr().out
    for broken in ("a: &x [*x]", "when: !!timestamp nonsense", "[" * 5000, "a: !!int x"):
        wrong.write_text(broken)
        assert main([*call, str(wrong)]) == 2
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


def test_set_shrinks_a_suite_with_its_lengths_and_tables() -> None:
    sets = {"seq_length": 32, "eval_lengths": [32, 64], "train_iters": 10}
    suite = load_suite("paper", ["main", "github"], sets=sets)
    assert {tuple(run.config["eval_lengths"]) for run in suite.runs} == {(32, 64)}
    assert not [step for run in suite.runs for step in run.evaluations if step.length]
    table = suite.sections[0].table
    assert table is not None
    assert [(point.train_length, point.length) for point in table.points] == [(32, 32), (32, 64)]


def test_every_script_is_valid_shell(tmp_path: Path) -> None:
    for job in jobs(tmp_path, no_gpus=True).values():
        check = subprocess.run(["bash", "-n"], input=job.script, text=True, check=False)
        assert check.returncode == 0, job.name
        assert "--gres" not in job.script


def test_finished_runs_are_not_submitted_again(tmp_path: Path) -> None:
    suite = load_suite("smoke", ["main"], runs_root=tmp_path)
    for run in suite.runs[:-1]:
        write_run(run)
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
