#!/usr/bin/env python
"""Convert a checkpoint: ours, official KERPLE, GPT-NeoX or Hugging Face, any to any."""

from __future__ import annotations

from _start import start

if __name__ == "__main__":
    start("convert_checkpoint")
