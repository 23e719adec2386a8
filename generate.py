"""Generate text from a checkpoint: python deepy.py generate.py CONF... [-i PROMPTS] [-o SAMPLES]"""

from __future__ import annotations

import sys

from megatron.commands import run

if __name__ == "__main__":
    sys.exit(run("generate", sys.argv[1:]))
