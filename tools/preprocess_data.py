#!/usr/bin/env python
"""Tokenize text into .bin and .idx files, with GPT-NeoX's flags."""

from __future__ import annotations

from _start import start

if __name__ == "__main__":
    start("preprocess_data")
