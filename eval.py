"""GPT-NeoX's name for evaluate.py: python deepy.py eval.py CONF... --eval_tasks TASK..."""

from __future__ import annotations

import sys

from megatron.commands import run

if __name__ == "__main__":
    sys.exit(run("evaluate", sys.argv[1:]))
