"""`python -m kerple COMMAND ...` is `kerple COMMAND ...`."""

from __future__ import annotations

import sys

from megatron.commands import kerple

if __name__ == "__main__":
    sys.exit(kerple())
