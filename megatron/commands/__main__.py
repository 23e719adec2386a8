"""`python -m megatron.commands NAME ...` is `kerple NAME ...`.

An installed package has no train.py: deepy.py starts this file on every process instead.
"""

from __future__ import annotations

import sys

from megatron.terminal import exit_on_signal

if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        exit_on_signal()

from megatron.commands import kerple

if __name__ == "__main__":
    kerple()
