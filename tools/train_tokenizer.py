#!/usr/bin/env python
"""Train a tokenizer on your text: GPT-2-style byte-level BPE, or SentencePiece."""

from __future__ import annotations

from _start import start

if __name__ == "__main__":
    start("train_tokenizer")
