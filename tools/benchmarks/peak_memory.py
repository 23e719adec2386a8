"""Peak memory of one forward pass above its inputs, in a process of its own.

`python -m benchmarks.peak_memory LENGTH HEADS DIM THREADS` prints JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["measure_forward"]


def measure_forward(length: int, heads: int, dim: int, threads: int) -> dict[str, Any]:
    """Seconds, bytes above the inputs and peak bytes of a tiled forward with a log bias."""
    arguments = [str(value) for value in (length, heads, dim, threads)]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.peak_memory", *arguments],
        cwd=Path(__file__).resolve().parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    measured: dict[str, Any] = json.loads(result.stdout)
    return measured


def _status_bytes(key: str) -> int:
    """VmRSS (now) or VmHWM (peak). getrusage would count the parent that started this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def _main(length: int, heads: int, dim: int, threads: int) -> None:
    import torch

    from .contenders import Inputs, tiled

    torch.set_num_threads(threads)
    tiled(Inputs(1, heads, 256, dim, train=False), "kerple_log")()  # loads what there is to load
    run = tiled(Inputs(1, heads, length, dim, train=False), "kerple_log")
    before = _status_bytes("VmRSS")
    start = time.perf_counter()
    out = run()
    seconds = time.perf_counter() - start
    assert out.isfinite().all()
    peak = _status_bytes("VmHWM")
    print(json.dumps({"seconds": seconds, "above_inputs": peak - before, "peak": peak}))


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
