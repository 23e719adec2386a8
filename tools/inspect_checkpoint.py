#!/usr/bin/env python
"""Show what a checkpoint holds, or what differs between two."""

from __future__ import annotations

from _start import start

if __name__ == "__main__":
    start("inspect_checkpoint")
