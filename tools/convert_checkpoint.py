#!/usr/bin/env python
"""Convert a checkpoint (ours, official KERPLE, GPT-NeoX, Hugging Face) to another format."""

from __future__ import annotations

from _start import start

if __name__ == "__main__":
    start("convert_checkpoint")
