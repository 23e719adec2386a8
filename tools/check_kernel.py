#!/usr/bin/env python
"""Check the paper's theory on a kernel: a method's or a class of yours."""

from __future__ import annotations

from _start import start

if __name__ == "__main__":
    start("check_kernel")
