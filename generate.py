"""Generate text from a checkpoint: python deepy.py generate.py CONF... [-i PROMPTS] [-o SAMPLES]"""

from __future__ import annotations

import sys

from megatron.neox_arguments import parse_command_line


def main() -> int:
    """The exit code."""
    args, options = parse_command_line("generate.py")
    from megatron.generation.text import run_generation

    return run_generation(args, options.local_rank)


if __name__ == "__main__":
    sys.exit(main())
