#!/usr/bin/env python
"""Generate text from a checkpoint: python deepy.py generate.py CONF... [-i PROMPTS] [-o SAMPLES]"""

from __future__ import annotations

from megatron.commands import start

if __name__ == "__main__":
    start("generate")
