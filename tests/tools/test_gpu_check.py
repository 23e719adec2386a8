"""`make gpu-check` itself, on the device that is here: the same code, small sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.engines.triton_runtime import interpreted, unavailable
from megatron.engines.triton_tiles import KERNELS
from megatron.errors import EngineError, OutputError
from tests.conftest import REPOSITORY
from tools import gpu_check
from tools.gpu_checks import engine_choice, numbers
from tools.gpu_checks.findings import Finding


def test_numbers_and_speed_run_on_this_machine(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    parts = ["environment", "numbers", "speed"]
    code = gpu_check.main(["--device", "cpu", "--quick", "--parts", *parts, "--json", str(out)])
    content = json.loads(out.read_text())
    assert code == 0 and content["verdict"] == "PASS"
    by_part = {part: [f for f in content["findings"] if f["part"] == part] for part in parts}
    errors = [f["values"]["error"] for f in by_part["numbers"] if "error" in f["values"]]
    assert len(errors) > 15 and all(error > 0 for error in errors)
    ratios = [f["values"]["ours"]["over_sdpa"] for f in by_part["speed"]]
    assert len(ratios) == 4 and all(ratio > 0 for ratio in ratios)


@pytest.mark.skipif(unavailable() is not None or interpreted(), reason="Triton is not installed")
def test_the_page_says_which_engine_runs_on_each_gpu() -> None:
    page = engine_choice.page()
    assert page == engine_choice.PAGE.read_text(), "run tools/gpu_check.py --write-engines"
    assert " or " not in page.split(engine_choice.BEGIN)[1].split(engine_choice.END)[0]


def test_an_engine_that_the_page_does_not_name_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "check.json"
    args = ["--device", "cpu", "--parts", "engine_choice", "--json", str(out)]
    assert gpu_check.main(args) == 0
    row = {**engine_choice.row_of(None), "bf16": "triton"}
    monkeypatch.setattr(engine_choice, "row_of", lambda _: row)
    assert gpu_check.main(args) == 1
    failed = [f for f in json.loads(out.read_text())["findings"] if f["status"] == "fail"]
    assert [f["detail"] for f in failed] == ["tiled, the page says triton"]


@pytest.mark.slow
def test_training_is_checked_against_the_cpu_killed_and_spread(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    args = ["--device", "cpu", "--quick", "--parts", "training", "--json", str(out)]
    code = gpu_check.main(args)
    findings = {f["name"]: f for f in json.loads(out.read_text())["findings"]}
    assert code == 0, findings
    assert {f["status"] for f in findings.values()} == {"pass"}
    assert "async_save" in findings
    assert "kill and resume" in findings and "two processes, tensor parallel" in findings


@pytest.mark.skipif(unavailable() is not None, reason="Triton is not installed")
def test_tiles_are_tried_against_the_table_in_the_interpreter(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    run = subprocess.run(
        [sys.executable, "tools/gpu_check.py", "--device", "cpu", "--quick", "--parts", "tiles",
         "--json", str(out)],
        cwd=REPOSITORY,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    findings = json.loads(out.read_text())["findings"]
    assert {f["name"].split(",")[0] for f in findings} == set(KERNELS)
    for finding in findings:
        assert finding["values"]["unfit"] == {} and len(finding["values"]["ratios"]) == 1


def test_a_wrong_number_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(numbers.TOLERANCE, torch.float32, 1e-12)
    out = tmp_path / "check.json"
    args = ["--device", "cpu", "--quick", "--parts", "numbers", "--json", str(out)]
    assert gpu_check.main(args) == 1
    assert json.loads(out.read_text())["verdict"] == "FAIL"
    assert capsys.readouterr().out.startswith("FAIL: ")


def test_no_gpu_is_one_line(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(EngineError, match="no GPU is visible to torch"):
        gpu_check.main(["--json", str(tmp_path / "check.json")])


@pytest.mark.parametrize(
    ("option", "error"),
    [
        (["--device", "gpu"], EngineError),
        (["--device", "cpu", "--json", "/dev/null/x"], OutputError),
    ],
)
def test_a_wrong_option_is_told_before_the_checks(
    option: list[str], error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(error, match="--device gpu" if "gpu" in option else "--json"):
        gpu_check.main(["--json", str(tmp_path / "check.json"), *option])


def test_the_job_script_is_written(tmp_path: Path) -> None:
    script = tmp_path / "check.sbatch"
    args = ["--device", "cpu", "--quick", "--parts", "environment", "--sbatch", str(script)]
    assert gpu_check.main([*args, "--json", str(tmp_path / "check.json")]) == 0
    assert "--ntasks-per-node=8" in script.read_text()
    assert str(Finding("a", "b", "pass", "c")) == "pass     a            b: c"
