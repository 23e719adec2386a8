"""The site: every page in its navigation, links that lead somewhere, pages that fit a phone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.browser import brightness, needs_chromium, open_page
from tests.conftest import REPOSITORY
from tools import site_hooks

PAGES = sorted(
    page.relative_to(REPOSITORY).as_posix()
    for page in [*(REPOSITORY / "docs").rglob("*.md"), *map(REPOSITORY.joinpath, site_hooks.PAGES)]
    if page.name != "tables.md"
)
SHOWN = ("index", "positional_embeddings", "api", "results/study/index", "gallery")
WIDTHS = (400, 1200)


def settings() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text("utf-8"))
    return content


def test_every_page_is_in_the_navigation() -> None:
    listed = [page for part in settings()["nav"] for pages in part.values() for page in pages]
    assert sorted(listed) == sorted({"api.md", *map(site_hooks.site_path, PAGES)})


@pytest.mark.parametrize("source", PAGES)
def test_every_link_leads_somewhere(source: str) -> None:
    text = (REPOSITORY / source).read_text(encoding="utf-8")
    targets = site_hooks.linked_files(source, text)
    assert {link for link, path in targets.items() if not (REPOSITORY / path).exists()} == set()


def test_links_lead_to_the_sites_pages() -> None:
    text = "[a](../README.md) [b](data.md#x) [c](../examples/custom_kernel.py) `[d](../README.md)`"
    assert site_hooks.relinked("docs/launching.md", text).startswith(
        "[a](index.md) [b](data.md#x) [c](source/examples/custom_kernel.py.md) "
    )
    shown = site_hooks.relinked("docs/results/study/README.md", "[x](../../README.md)")
    assert shown == "[x](../../guide.md)"
    assert site_hooks.relinked("README.md", "[x](docs/data.md)") == "[x](data.md)"


def test_files_are_shown_as_pages() -> None:
    page = site_hooks.file_page("examples/kernels_by_hand.ipynb")
    assert "```python\n" in page and "## Kernels by hand" not in page.splitlines()[:1]
    assert "````python\n" in site_hooks.file_page("examples/custom_kernel.py")
    assert "(figures/main_perplexity.png)" in site_hooks.file_page("docs/results/laptop/figures")


def test_figures_of_several_panels_are_wide() -> None:
    images = REPOSITORY / "docs" / "images"
    assert not site_hooks.is_wide(images / "demo.png")
    assert site_hooks.is_wide(images / "kernels" / "families.png")
    assert not site_hooks.is_wide(images / "nowhere.png")


def test_the_reference_has_every_public_name() -> None:
    import kerple

    page = site_hooks.api_page()
    for name in kerple.__all__:
        assert name.startswith("_") or re.search(rf"^::: [\w.]+\.{name}$", page, re.M)


# The site itself, in a browser.

MEASURE = """<html style="color-scheme: SCHEME"><body>FRAMES<script>
const frames = [...document.querySelectorAll("iframe")];
const look = frame => {
  const page = frame.contentDocument, style = frame.contentWindow.getComputedStyle(page.body);
  const article = page.querySelector("article").getBoundingClientRect();
  return {name: frame.title, window: frame.contentWindow.innerWidth,
    page: page.documentElement.scrollWidth, article: article.right, height: article.height,
    images: [...page.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src),
    background: style.backgroundColor, ink: style.color};
};
addEventListener("load", () => setTimeout(() => {
  const seen = JSON.stringify(frames.map(look));
  document.body.innerHTML = "";
  document.body.append(seen);
}, 1500));
</script></body></html>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make site` does: a warning is an error (with -q none would be counted)."""
    place = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(place)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return place


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="no mkdocs (make site installs it)")
@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_five_pages_fit_a_phone_and_a_desk(site: Path, scheme: str, tmp_path: Path) -> None:
    frames = "".join(
        f'<iframe title="{name} {width}" src="{name}.html" style="border:0;height:900px;'
        f'width:{width}px"></iframe>'
        for name in SHOWN
        for width in WIDTHS
    )
    (site / "frames.html").write_text(
        MEASURE.replace("FRAMES", frames).replace("SCHEME", scheme), encoding="utf-8"
    )
    address = (site / "frames.html").as_uri()
    html, console = open_page(address, tmp_path, dark=scheme == "dark")
    found = re.search(r"<body>(\[.*\])</body>", html)
    assert found and console == [], html[-2000:]
    seen = json.loads(found[1])
    assert [page["name"] for page in seen] == [f"{n} {w}" for n in SHOWN for w in WIDTHS]
    for page in seen:
        width = int(page["name"].split()[1])
        assert page["window"] == width and page["page"] <= width, "scrolls sideways"
        assert page["article"] <= width and page["height"] > 500 and page["images"] == [], page
        ground, ink = (brightness(page[key]) for key in ("background", "ink"))
        assert (ground < ink) is (scheme == "dark"), page
