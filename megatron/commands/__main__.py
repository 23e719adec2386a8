"""`python -m megatron.commands NAME ...` is `kerple NAME ...`."""

from __future__ import annotations

import sys

from megatron.commands import kerple

if __name__ == "__main__":
    sys.exit(kerple())
