#!/usr/bin/env python
"""Repeat the paper: tools/reproduce.py {plan,run,submit,status,report} --suite SUITE."""

from __future__ import annotations

from _start import start

if __name__ == "__main__":
    start("reproduce")
