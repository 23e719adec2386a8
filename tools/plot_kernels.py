#!/usr/bin/env python
"""Draw the kernels of a checkpoint, of a method or of a class of yours."""

from __future__ import annotations

from _start import start

if __name__ == "__main__":
    start("plot_kernels")
