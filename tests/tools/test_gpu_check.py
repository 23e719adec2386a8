"""`make gpu-check` itself, on the device that is here: the same code, small sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.errors import EngineError
from tools import gpu_check
from tools.gpu_checks import numbers
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


@pytest.mark.slow
def test_training_is_checked_against_the_cpu_killed_and_spread(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    args = ["--device", "cpu", "--quick", "--parts", "training", "--json", str(out)]
    code = gpu_check.main(args)
    findings = {f["name"]: f for f in json.loads(out.read_text())["findings"]}
    assert code == 0, findings
    assert {f["status"] for f in findings.values()} == {"pass"}
    assert "kill and resume" in findings and "two processes, tensor parallel" in findings


def test_a_wrong_number_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(numbers.TOLERANCE, __import__("torch").float32, 1e-12)
    out = tmp_path / "check.json"
    args = ["--device", "cpu", "--quick", "--parts", "numbers", "--json", str(out)]
    assert gpu_check.main(args) == 1
    assert json.loads(out.read_text())["verdict"] == "FAIL"
    assert capsys.readouterr().out.startswith("FAIL: ")


def test_no_gpu_is_one_line(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(EngineError, match="no GPU is visible to torch"):
        gpu_check.main(["--json", str(tmp_path / "check.json")])


def test_the_job_script_is_written(tmp_path: Path) -> None:
    script = tmp_path / "check.sbatch"
    args = ["--device", "cpu", "--quick", "--parts", "environment", "--sbatch", str(script)]
    assert gpu_check.main([*args, "--json", str(tmp_path / "check.json")]) == 0
    assert "--ntasks-per-node=8" in script.read_text()
    assert str(Finding("a", "b", "pass", "c")) == "pass     a            b: c"
