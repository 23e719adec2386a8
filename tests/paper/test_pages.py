"""The report in a real browser: phone and desk, light and dark, nothing cut off."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron.paper.report import make_report
from megatron.paper.suite import load_suite
from tests.paper.synthetic import write_run

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (apt-get install chromium)")

MEASURE = """
<script>
addEventListener("load", () => {
  const wide = [...document.querySelectorAll("body *")].filter(
    e => !e.closest(".scroll") && e.getBoundingClientRect().right > innerWidth + 1);
  const color = name => getComputedStyle(document.body)[name];
  const images = [...document.images].filter(i => !i.complete || !i.naturalWidth).length;
  document.title = JSON.stringify({
    page: document.documentElement.scrollWidth, window: innerWidth,
    wide: wide.map(e => e.tagName + "." + e.className), images,
    background: color("backgroundColor"), ink: color("color"),
    caption: document.querySelector(".caption").getBoundingClientRect().right});
});
</script>
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report whose tables are wider than a phone, with a script that measures it."""
    root = tmp_path_factory.mktemp("runs")
    suite = load_suite("laptop", ["main", "stdlib", "*.1235"], runs_root=root)
    for run in suite.runs:
        write_run(run)
    html = make_report(suite, command="python tools/reproduce.py run --suite laptop").html
    measured = html.with_name("measured.html")
    text = html.read_text(encoding="utf-8")
    measured.write_text(text.replace("</body>", f"{MEASURE}</body>"), encoding="utf-8")
    return measured


def measure(page: Path, width: int, dark: bool, profile: Path) -> dict[str, object]:
    """Inside a frame of that width: a browser's own window is never narrower than 500 pixels."""
    frame = page.with_name(f"frame-{width}-{dark}.html")
    frame.write_text(
        f'<iframe style="border:0;width:{width}px;height:3000px" src="{page.name}" onload="'
        'setTimeout(() => document.body.append(this.contentDocument.title), 300)"></iframe>',
        encoding="utf-8",
    )
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options.append("--allow-file-access-from-files")
    options += [f"--user-data-dir={profile}", "--virtual-time-budget=5000", "--dump-dom"]
    options.append(f"--blink-settings=preferredColorScheme={0 if dark else 1}")
    result = subprocess.run(
        [str(CHROMIUM), *options, frame.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = re.search(r"\{.*\}", result.stdout)
    assert found, result.stdout[-2000:] + result.stderr[-2000:]
    content: dict[str, object] = json.loads(found.group(0).replace("&quot;", '"'))
    return content


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1200])
def test_the_page_fits_and_can_be_read(page: Path, width: int, dark: bool, tmp_path: Path) -> None:
    seen = measure(page, width, dark, tmp_path)
    assert seen["window"] == width
    assert int(str(seen["page"])) <= width, "the page itself must not scroll sideways"
    assert seen["wide"] == []
    assert seen["images"] == 0, "a figure is not shown"
    assert float(str(seen["caption"])) <= width, "a caption is cut"
    background, ink = (
        sum(int(part) for part in re.findall(r"\d+", str(seen[key]))[:3])
        for key in ("background", "ink")
    )
    assert (background < ink) is dark
    assert abs(background - ink) > 400, "too little contrast"
