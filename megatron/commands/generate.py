"""Generate text: python deepy.py generate.py CONF... [-i PROMPTS] [-o SAMPLES]"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron.terminal import leaving_at_once, run_command


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    from megatron.neox_arguments import parse_command_line

    args, options = parse_command_line("generate.py", argv)
    with leaving_at_once():
        from megatron.machine import settle_accelerator

        settle_accelerator()
        from megatron.generation.text import run_generation

    return run_generation(args, options.local_rank)


if __name__ == "__main__":
    sys.exit(run_command(main))
