"""Speed and memory, measured: `python tools/benchmark.py {attention,step,data,evaluate} --help`.

Each benchmark prints its measurements beside the project's targets and can write them as JSON.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

BENCHMARKS = {
    "attention": "attention engines against torch's own, dense paths and FlexAttention",
    "step": "one optimizer step of the 162M model per positional embedding",
    "data": "index building, preprocessing, loading",
    "evaluate": "evaluation throughput",
}


def main(argv: Sequence[str] | None = None) -> int:
    listing = "\n".join(f"  {name:<11}{text}" for name, text in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="benchmark.py",
        description=f"{__doc__.splitlines()[0]}\n\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("benchmark", choices=BENCHMARKS, metavar="benchmark")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="see `benchmark.py NAME --help`")
    chosen = parser.parse_args(argv)
    # In a script the sibling package is `benchmarks`, in tests `tools.benchmarks`.
    package = f"{__package__}.benchmarks" if __package__ else "benchmarks"
    module = importlib.import_module(f"{package}.{chosen.benchmark}")
    own_parser = argparse.ArgumentParser(
        prog=f"benchmark.py {chosen.benchmark}", description=module.__doc__
    )
    module.add_arguments(own_parser)
    options = own_parser.parse_args(chosen.options)
    _check(own_parser, options)
    status: int = module.run(options)
    return status


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Check before the work: sizes of at least 1, a result file that can be written."""
    from megatron.atomic_files import check_writable

    for name, value in vars(options).items():
        sizes = value if isinstance(value, list) else [value]
        if any(type(size) is int and size < 1 for size in sizes):
            parser.error(f"--{name}: must be at least 1")
        if name in ("json", "output") and value is not None:
            check_writable(value, f"--{name}")


if __name__ == "__main__":
    from _start import start_main

    start_main(main)
