"""A page in a real browser: its document after its scripts ran, and what the console said."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium (apt-get install chromium)"
)


def open_page(address: str, profile: Path, *, dark: bool = False) -> tuple[str, list[str]]:
    """The document as HTML, and the lines of the console."""
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += ["--allow-file-access-from-files", f"--user-data-dir={profile}"]
    options += ["--virtual-time-budget=9000", "--enable-logging=stderr", "--dump-dom"]
    options.append(f"--blink-settings=preferredColorScheme={0 if dark else 1}")
    done = subprocess.run(
        [str(CHROMIUM), *options, address],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "</html>" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout, re.findall(r"CONSOLE:\d+\] (.*)", done.stderr)


def brightness(color: str) -> int:
    """The sum of red, green and blue of a computed colour."""
    return sum(map(int, re.findall(r"\d+", color)[:3]))
