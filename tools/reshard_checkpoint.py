#!/usr/bin/env python
"""Make a universal checkpoint of a run: it resumes under any layout."""

from __future__ import annotations

from _start import start

if __name__ == "__main__":
    start("reshard_checkpoint")
