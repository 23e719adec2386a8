"""Draw every kernel over distance for docs/positional_embeddings.md.

python tools/draw_kernel_docs.py [--out docs/images/kernels]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from _start import start_main


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pictures; a run's, or your own kernels: tools/plot_kernels.py."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs/images/kernels"))
    out = parser.parse_args(argv).out
    from tools.kernel_pictures import draw_all

    draw_all(out)
    return 0


if __name__ == "__main__":
    start_main(main)
