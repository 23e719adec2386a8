"""Finished runs in one file: the same report, the same bytes, and nothing beside the runs."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest

from megatron.errors import ReproduceError
from megatron.paper.cli import main
from megatron.paper.report import collect_results
from megatron.paper.result_fit import is_finished
from megatron.paper.run_archive import pack_runs, unpacked
from megatron.paper.suite import Suite, load_suite
from tests.paper.synthetic import write_run

SMOKE = ["--suite", "smoke", "--only", "main"]


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    """Its first run is finished, the second has lost its results."""
    suite = load_suite("smoke", ["main"], runs_root=tmp_path / "runs")
    for run in suite.runs[:2]:
        folder = write_run(run)
        (folder / "global_step20").mkdir(exist_ok=True)
        (folder / "global_step20" / "weights.pt").write_bytes(b"large")
    shutil.rmtree(suite.runs[1].directory / "results")
    return suite


def test_only_finished_runs_are_packed_and_they_count_elsewhere(
    suite: Suite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, first = tmp_path / "kept" / "runs.tar.gz", suite.runs[0]
    assert main(["pack", *SMOKE, "--runs", str(tmp_path / "runs"), "--out", str(target)]) == 0
    assert "1 finished runs" in capsys.readouterr().out
    with unpacked(target) as folder:
        assert [path.name for path in (folder / "smoke").iterdir()] == [first.name]
        assert not list(folder.rglob("*.pt"))
        state = json.loads((folder / "smoke" / first.name / "state.json").read_text())
        assert state["host"] == "" and state["process"] is None
        copied = load_suite("smoke", ["main"], runs_root=folder)
        assert is_finished(copied.run_named(first.name))
        there = {item.run.name: item for item in collect_results(copied).runs}
    here = {item.run.name: item for item in collect_results(suite).runs}
    assert there[first.name].cells == here[first.name].cells != {}
    assert there[first.name].losses == here[first.name].losses != []


def test_a_report_of_the_file_is_the_report_of_the_folder(suite: Suite, tmp_path: Path) -> None:
    target = tmp_path / "runs.tar.gz"
    pack_runs(suite, target)
    texts = []
    for place in (tmp_path / "runs", target):
        out = tmp_path / f"out-{place.name}"
        assert main(["report", *SMOKE, "--runs", str(place), "--out", str(out)]) == 0
        texts.append((out / "tables" / "main.csv").read_text())
    assert texts[0] == texts[1]
    assert main(["status", *SMOKE, "--runs", str(target)]) == 0
    with pytest.raises(ReproduceError, match="only report and status read"):
        main(["run", *SMOKE, "--runs", str(target)])


def test_the_same_runs_give_the_same_bytes(suite: Suite, tmp_path: Path) -> None:
    first, second = tmp_path / "a.tar.gz", tmp_path / "b.tar.gz"
    pack_runs(suite, first)
    with unpacked(first) as folder:
        pack_runs(load_suite("smoke", ["main"], runs_root=folder), second)
    assert first.read_bytes() == second.read_bytes()
    with pytest.raises(ReproduceError, match=r"ends in \.tar\.gz"):
        pack_runs(suite, tmp_path / "runs.zip")


def test_an_archive_is_never_replaced_by_one_that_lacks_its_runs(
    suite: Suite, tmp_path: Path
) -> None:
    target = tmp_path / "runs.tar.gz"
    pack_runs(suite, target)
    kept = target.read_bytes()
    elsewhere = load_suite("smoke", ["main"], runs_root=tmp_path / "mistyped")
    with pytest.raises(ReproduceError, match=r"mistyped/smoke: none of the suite's 4 runs is fin"):
        pack_runs(elsewhere, target)
    with pytest.raises(ReproduceError, match="none of"):
        pack_runs(elsewhere, tmp_path / "empty.tar.gz")
    assert not (tmp_path / "empty.tar.gz").exists()
    shutil.rmtree(suite.runs[0].directory)
    write_run(suite.runs[1])
    name = suite.runs[0].name
    with pytest.raises(ReproduceError, match=f"holds runs that .* has not finished: {name}"):
        pack_runs(suite, target)
    assert target.read_bytes() == kept
    write_run(suite.runs[0])
    assert len(pack_runs(suite, target)) == 2, "one with more runs replaces it"


@pytest.mark.parametrize("name", ["../outside.json", "/outside.json", "smoke/link"])
def test_an_archive_of_a_stranger_writes_nothing_outside(tmp_path: Path, name: str) -> None:
    path = tmp_path / "runs.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        entry = tarfile.TarInfo(name)
        if name.endswith("link"):
            entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
        else:
            entry.size = 2
        archive.addfile(entry, io.BytesIO(b"{}"))
    with pytest.raises(ReproduceError, match="not a regular file"), unpacked(path):
        pass
    path.write_bytes(b"no archive")
    with pytest.raises(ReproduceError, match="not an archive of runs"), unpacked(path):
        pass


def test_an_archive_that_unpacks_to_a_full_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.paper.run_archive._MOST_BYTES", 1000)
    path = tmp_path / "runs.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        entry = tarfile.TarInfo("smoke/run/metrics.jsonl")
        entry.size = 1001
        archive.addfile(entry, io.BytesIO(bytes(1001)))
    with pytest.raises(ReproduceError, match="exceeds"), unpacked(path):
        pass
