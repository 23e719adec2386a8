#!/usr/bin/env python
"""Join token datasets made with one tokenizer into a new one."""

from __future__ import annotations

from _start import start

if __name__ == "__main__":
    start("merge_datasets")
