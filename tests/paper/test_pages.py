"""Tables in every output format; the report in a real browser: phone and desk, light and dark."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.paper.cells import Cell
from megatron.paper.claims import Finding, Verdict
from megatron.paper.pages import (
    Chapter,
    Listing,
    Page,
    latex_row,
    page_html,
    page_markdown,
    to_csv,
    to_latex,
    to_markdown,
    to_text,
)
from megatron.paper.report import make_report
from megatron.paper.suite import load_suite
from megatron.paper.suite_file import Contrast, Rounding
from megatron.paper.tables import Entry, Table, contrast_table, lay_out, measured_cells
from tests.browser import brightness, needs_chromium, open_page
from tests.paper.synthetic import write_run
from tests.paper.test_run_results import RESULTS
from tests.paper.test_tables import SPEC, entry, table


def to_html(shown: Table) -> str:
    return page_html(Page("", "", [], [Chapter("", tables=[shown])]))


def test_missing_runs_are_shown_as_missing_in_every_format() -> None:
    assert entry(4096, "rpe").text() == "—"
    assert "—" in to_markdown(table())
    assert '<td class="missing">—' in to_html(table())
    assert "& --" in to_latex(table())
    missing = [row for row in csv.DictReader(io.StringIO(to_csv(table()))) if not row["mean"]]
    assert [(row["column"], row["row"], row["note"]) for row in missing] == [
        ("T5 bias", "4096", "missing")
    ]


def test_published_numbers_stand_beside_ours_at_the_same_multiple() -> None:
    """Trained at 128 and read at 4096 is 32x, which is 16384 in the paper."""
    assert entry(4096, "kerple_log").published_text() == "2.75 ± 0.16"
    assert "paper 2.75 ± 0.16" in to_markdown(table())
    assert '<small class="paper">2.75 ± 0.16</small>' in to_html(table())
    last = list(csv.DictReader(io.StringIO(to_csv(table()))))[-1]
    assert (last["published_mean"], last["published_std"]) == ("3.35", "0.27")


def test_csv_keeps_full_precision() -> None:
    first = next(csv.DictReader(io.StringIO(to_csv(table()))))
    assert float(first["mean"]) == pytest.approx((5.01 + 5.11 + 4.92) / 3, rel=1e-15)


def test_latex_has_balanced_rows_and_no_bare_special_characters() -> None:
    text = to_latex(table())
    rows = [line for line in text.splitlines() if re.match(r"\s+\d+ &", line)]
    assert len(rows) == 2
    assert all(line.count("&") == 3 for line in rows)
    assert text.count("{") == text.count("}")
    assert "†" not in text
    assert r"\textbf{4.02 $\pmb{\pm}$ 0.10}" in text
    assert r"4.51 $\pm$ 0.11$^\dagger$" in text


def test_words_in_place_of_a_number_are_latex_too() -> None:
    """A bare % would hide the rest of the row."""
    words = Entry(Cell(-1.5, words="−1.50% (3; p 0.01)"), Rounding.MAGNITUDE, 2)
    assert words.text() == "−1.50% (3; p 0.01)"
    assert latex_row("code", (words,)) == r"code & $-$1.50\% (3; p 0.01)\\"


def test_terminal_table_is_aligned() -> None:
    lines = to_text(table()).splitlines()
    assert lines[0] == "Python standard library"
    assert len({len(line) for line in lines[1:]}) == 1


def test_terminal_colours_do_not_change_the_width() -> None:
    coloured = re.sub(r"\033\[[0-9;]*m", "", to_text(table(), color=True)).splitlines()
    assert len({len(line) for line in coloured[1:]}) == 1


@pytest.mark.parametrize("render", [to_markdown, to_html, to_latex, to_csv, to_text])
def test_nothing_measured_gives_an_empty_table_not_an_error(render: Callable[..., str]) -> None:
    empty = lay_out(SPEC, measured_cells(SPEC, lambda *_: {}))
    assert "5.0" not in render(empty)
    assert not any(item.cell.bold or item.cell.dagger for item in empty.entries)


def test_the_page_says_what_a_p_value_compares() -> None:
    contrast = Contrast(title="", growth={"plain": "short.code.kerple_log"})
    growth = contrast_table("growth", contrast, RESULTS, "valid")
    assert growth is not None
    assert 'title="paired t-test: p = ' in to_html(growth)
    assert 'title="paired t-test against KERPLE-log: p = ' in to_html(table())


# In a browser: nothing cut off.

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
    caption: document.querySelector(".caption").getBoundingClientRect().right,
    scrolled: [...document.querySelectorAll("figure .scroll")].filter(
      e => e.scrollWidth > e.clientWidth).length,
    hints: [...document.querySelectorAll("figcaption")].filter(
      e => getComputedStyle(e, "::before").content.includes("scroll")).length});
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
    html, console = open_page(frame.as_uri(), profile, dark=dark)
    found = re.search(r"\{.*\}", html)
    assert found and console == [], html[-2000:]
    content: dict[str, object] = json.loads(found.group(0).replace("&quot;", '"'))
    return content


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1200])
def test_the_page_fits_and_can_be_read(page: Path, width: int, dark: bool, tmp_path: Path) -> None:
    seen = measure(page, width, dark, tmp_path)
    assert seen["window"] == width
    assert int(str(seen["page"])) <= width, "the page itself must not scroll sideways"
    assert seen["wide"] == []
    assert seen["images"] == 0, "a figure is not shown"
    assert float(str(seen["caption"])) <= width, "a caption is cut"
    assert seen["hints"] == (seen["scrolled"] if width == 400 else 0), "scrolls without a word"
    assert bool(seen["hints"]) is (width == 400)
    background, ink = (brightness(str(seen[key])) for key in ("background", "ink"))
    assert (background < ink) is dark
    assert abs(background - ink) > 400, "too little contrast"


HOSTILE = "=cmd|' /C calc'!A0 \\input{/etc/passwd} $x$ <script>|</script>"


def test_a_suites_words_are_text_in_every_format() -> None:
    shown = table()
    block = shown.blocks[0]
    rows = (replace(block.rows[0], label=HOSTILE), *block.rows[1:])
    shown = replace(shown, blocks=(replace(block, rows=rows), *shown.blocks[1:]))
    latex = to_latex(shown)
    assert r"\input" not in latex and r"\textbackslash{}input\{" in latex and r"\$x\$" in latex
    markdown = to_markdown(shown)
    assert "<script>" not in markdown and r"&lt;script>\|&lt;/script>" in markdown
    cells = [row["row"] for row in csv.DictReader(io.StringIO(to_csv(shown)))]
    assert f"'{HOSTILE}" in cells and HOSTILE not in cells


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("the key `a<b` and a < b", "the key `a<b` and a &lt; b"),
        ("# Not\na heading", r"\# Not a heading"),
        ("> no quote", r"\> no quote"),
        ("[here](http://x) ![y](z)", r"\[here\](http://x) !\[y\](z)"),
        (r"\[here](x) \`<b>`", r"\\\[here\](x) \\`&lt;b>`"),
        ("``<b>` and `<i>``", "``&lt;b>` and `&lt;i>``"),
        ("- 5 of 6, -3% and #1", r"\- 5 of 6, -3% and #1"),
    ],
)
def test_prose_in_markdown_has_no_markup_but_names(text: str, shown: str) -> None:
    finding = Finding(f"{text}|", "d", Verdict.AGREES, text)
    chapter = Chapter(f"about {text}", notes=[text], findings=[finding])
    listing = Listing("Files", text, ["a`<b>`\n# c"])
    page = page_markdown(Page(f"t {text}", text, [("Command", f"x {text}")], [chapter], [listing]))
    lines = page.splitlines()
    assert lines.count(shown) == 3 and "- `a'<b>' # c`" in lines
    for start in ("# t ", "## about ", "- Command: x "):
        line = next(line for line in lines if line.startswith(start))
        assert line.removeprefix(start).lstrip("\\") == shown.lstrip("\\")
    assert not [line for line in lines if line.startswith("# ") and line != lines[0]]
