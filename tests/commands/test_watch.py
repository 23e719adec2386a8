"""kerple watch: one frame as text, of runs under way and finished, and the page's answers."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from megatron.commands import run, watch
from megatron.commands.watch import Watched, as_data, curve, server
from tests.browser import needs_chromium, open_page
from tests.commands.test_plot_run import write_metrics

PAGE = watch.PAGE.read_text(encoding="utf-8")
CELL = {"length": 64, "loss": 1.5, "ppl": 4.5, "stderr": 0.1, "tokens": 640, "sequences": 9}
FINISHED = {"task": "extrapolation", "results": {"valid": [CELL]}}


def test_a_frame_names_the_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = write_metrics(tmp_path / "one"), write_metrics(tmp_path / "other", "alibi")
    with (one / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": 0.8')  # being written
    cells = one / "results" / "cache" / "extrapolation-abc.part"
    cells.parent.mkdir(parents=True)
    cells.write_text(json.dumps({"cells": {"512": {"loss": 2.5, "text": "no", "tokens": 7}}}))
    (one / "results" / "step5_extrapolation.json").write_text(json.dumps(FINISHED))
    (one / "results" / "own.json").write_text('{"task": "os:getcwd", "results": {"score": 0.25}}')
    assert run("watch", ["--once", str(one), str(other)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["loss", "5", "1", "1", "█▄▂▁▁"] in lines
    assert ["tokens/s", "9", "9", "9", "▁▁▁▁▁"] in lines
    assert ["1", "2.5", "0.5", "▁▃▅▆█", "1", "1", "▁▁▁▁▁"] in lines  # r1 and r2 of the first head
    assert ["extrapolation-abc", "(under", "way)", "512", "loss", "2.5"] in lines
    assert [
        "valid",
        "64",
        "1.5000",
        "4.5000",
        "0.1000",
        "9",
        "640",
    ] in lines  # the task's own table
    assert ["own", "score", "0.25"] in lines and "tokens 7" not in shown
    assert "one: step 5, no new metrics for" in shown
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
    assert Watched(folder).state == "step 5 of 25, no new metrics for 10 minutes"
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


@pytest.mark.parametrize("port", ["99999", "-1"])
def test_a_port_that_does_not_exist_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], port: str
) -> None:
    folder = write_metrics(tmp_path / "one")
    assert run("watch", [str(folder), "--serve", port]) == 2
    assert f"error: --serve {port}: " in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["nan", "inf", "-3"])
def test_a_pause_that_is_no_time_is_refused(tmp_path: Path, seconds: str) -> None:
    folder = write_metrics(tmp_path / "one")
    with pytest.raises(SystemExit, match="2"):
        run("watch", [str(folder), "--seconds", seconds])


def test_the_page_of_a_run_that_was_moved_away_says_so(tmp_path: Path) -> None:
    folder = write_metrics(tmp_path / "one")
    with server([folder], 0) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        try:
            folder.rename(tmp_path / "elsewhere")
            address = f"http://127.0.0.1:{served.server_address[1]}/runs.json"
            with pytest.raises(urllib.error.HTTPError, match=r"404: .*one.* no such file"):
                urllib.request.urlopen(address, timeout=10)
        finally:
            served.shutdown()
            thread.join()


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


@needs_chromium
@pytest.mark.parametrize("width", [400, 1200])
def test_the_page_fits_a_phone_and_a_desk(tmp_path: Path, width: int) -> None:
    folder = write_metrics(tmp_path / "a_run_with_a_long_name.of_some_corpus.and_a_method.1234")
    (folder / "results").mkdir()
    (folder / "results" / "step5_extrapolation.json").write_text(json.dumps(FINISHED))
    answer = json.dumps(json.dumps(as_data([Watched(folder)])))
    script = f"<script>window.fetch = async () => ({{text: async () => {answer}}})</script>"
    (tmp_path / "page.html").write_text(PAGE.replace("<script>", f"{script}<script>", 1))
    look = "const page = this.contentDocument; document.body.replaceChildren(JSON.stringify(["
    look += "page.documentElement.scrollWidth, page.querySelectorAll('path').length,"
    look += "[...page.querySelectorAll('path')].filter(p => !p.getTotalLength()).length,"
    look += "page.querySelector('pre').scrollWidth - page.querySelector('pre').clientWidth]))"
    (tmp_path / "frame.html").write_text(
        f'<iframe src="page.html" style="border:0;width:{width}px;height:900px" '
        f'onload="setTimeout(() => {{{look}}}, 500)"></iframe>'
    )
    html, console = open_page((tmp_path / "frame.html").as_uri(), tmp_path / "profile")
    assert console == []
    # Five curves, and two numbers of two heads; one value alone is seen, and the table is whole.
    assert f"[{width},9,0,0]" in html
