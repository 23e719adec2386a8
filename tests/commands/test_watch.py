"""kerple watch: one frame as text, of runs under way and finished, and the page's answers."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from megatron.commands import run
from megatron.commands.watch import PAGE, Watched, curve, server
from tests.commands.test_plot_run import write_metrics


def test_a_frame_names_the_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = write_metrics(tmp_path / "one"), write_metrics(tmp_path / "other", "alibi")
    with (one / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": 0.8')  # being written
    cells = one / "results" / "cache" / "extrapolation-abc.part"
    cells.parent.mkdir(parents=True)
    cells.write_text(json.dumps({"cells": {"valid/512": {"length": 512, "loss": 2.5, "text": ""}}}))
    entry = {"length": 64, "sequences": 4, "buckets": [{"start": 0, "end": 2, "ppl": 7, "loss": 2}]}
    (one / "results" / "step6_positionwise.json").write_text(
        json.dumps({"results": {"test": entry, "own": {"score": 3.5}}})
    )
    assert run("watch", ["--once", str(one), str(other)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["loss", "5", "1", "1", "█▄▂▁▁"] in lines
    assert ["tokens/s", "9", "9", "9", "▁▁▁▁▁"] in lines
    assert ["1", "2.5", "0.5", "▁▃▅▆█", "1", "1", "▁▁▁▁▁"] in lines  # r1 and r2 of the first head
    assert ["extrapolation,", "under", "way:", "valid", "512,", "loss", "2.5"] in lines
    assert ["positionwise,", "step", "6:", "test", "positions", "0-1,", "perplexity", "7"] in lines
    assert ["positionwise,", "step", "6:", "own", "score", "3.5"] in lines
    assert "one: step 5, no news" in shown
    assert "other: " in shown


def test_states_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_metrics(tmp_path / "run")
    manifest = {"config": {"train_iters": 25}, "history": []}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "time": 1000.0, "step_seconds": 6.0}) + "\n")
    monkeypatch.setattr("megatron.commands.watch.time.time", lambda: 1060.0)
    assert Watched(folder).state == "step 5 of 25, running, about 2 minutes left"
    monkeypatch.setattr("megatron.commands.watch.time.time", lambda: 9000.0)
    assert Watched(folder).state == "step 5 of 25, no news for 10 minutes"
    manifest["history"] = [{"reason": "finished", "at_step": 5}]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert Watched(folder).state == "step 5 of 25, finished"
    (tmp_path / "new").mkdir()
    assert Watched(tmp_path / "new").state == "not begun"


def test_a_folder_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("watch", ["--once", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: no such file" in capsys.readouterr().err


def test_a_curve_ends_with_the_last_value() -> None:
    assert curve([]) == ""
    assert curve([3.0]) == "▁"
    assert curve(list(range(100)), 5)[-1] == "█"
    assert len(curve(list(range(100)), 5)) == 5


def test_the_page_and_its_numbers_are_for_this_machine_alone(tmp_path: Path) -> None:
    folder = write_metrics(tmp_path / "one")
    with server([folder], 0) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        try:
            host, port = served.server_address[:2]
            assert host == "127.0.0.1"
            address = f"http://127.0.0.1:{port}"
            with urllib.request.urlopen(f"{address}/", timeout=10) as answer:
                assert answer.read().decode() == PAGE
            with urllib.request.urlopen(f"{address}/runs.json", timeout=10) as answer:
                (found,) = json.load(answer)
            assert found["curves"]["loss"][-1] == [5, 1.0]
            assert found["kernels"]["r1"][0] == [[1, 0.5], [2, 1.0], [3, 1.5], [4, 2.0], [5, 2.5]]
            foreign = urllib.request.Request(f"{address}/runs.json", headers={"Host": "evil:80"})
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(foreign, timeout=10)
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"{address}/../manifest.json", timeout=10)
        finally:
            served.shutdown()
            thread.join()


def test_the_page_loads_nothing_from_elsewhere() -> None:
    assert "src=" not in PAGE and "@import" not in PAGE and "<link" not in PAGE
    assert PAGE.count("http") == 1  # the name of SVG's namespace
