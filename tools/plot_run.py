#!/usr/bin/env python
"""Draw training runs from their metrics: loss, rate, gradient norm, tokens/s, kernels."""

from __future__ import annotations

from _start import start

if __name__ == "__main__":
    start("plot_run")
