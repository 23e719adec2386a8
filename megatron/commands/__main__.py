"""`python -m megatron.commands NAME ...` is `kerple NAME ...`.

An installed package has no train.py: deepy.py starts this file on every process instead.
"""

from __future__ import annotations

import sys

from megatron.terminal import leave_until_started

if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        leave_until_started()

from megatron.commands import kerple

if __name__ == "__main__":
    sys.exit(kerple())
