#!/usr/bin/env python
"""GPT-NeoX's name and flags for tools/inspect_checkpoint.py."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path
from runpy import run_path


def translated(words: list[str]) -> list[str]:
    """`FIRST,SECOND --compare` as two paths; what has no counterpart ends with what to use."""
    parser = ArgumentParser(prog="inspect_checkpoints.py", allow_abbrev=False)
    parser.add_argument("dir", help="a run or global_stepN; two with a comma between to compare")
    parser.add_argument("-c", "--compare", action="store_true", help="compare the two")
    parser.add_argument("-d", "--diff", action="store_true", help="only differences (always so)")
    parser.add_argument("-i", "--interactive", action="store_true", help="refused")
    parser.add_argument("--attributes", nargs="*", help="refused")
    args, rest = parser.parse_known_args(words)
    if args.interactive:
        parser.error("--interactive: no shell is opened. Use --json, or kerple.load_pretrained.")
    if args.attributes is not None:
        parser.error("--attributes: pickled values are not shown. Use --json and choose from it.")
    paths = args.dir.split(",") if args.compare else [args.dir]
    if args.compare and len(paths) != 2:
        parser.error(f"--compare: {args.dir} is not two paths with a comma between")
    return [*(path.strip() for path in paths), *rest]


if __name__ == "__main__":
    beside = run_path(str(Path(__file__).resolve().parents[1] / "_start.py"))
    sys.argv[1:] = translated(sys.argv[1:])
    beside["start"]("inspect_checkpoint")
