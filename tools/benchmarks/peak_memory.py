"""Peak memory of one forward pass, or of one training step, in a process of its own.

`python -m benchmarks.peak_memory {forward,step} JSON` prints JSON. On device "meta" nothing is
computed, and the bytes of live tensors are counted instead of the process's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any


def measure_forward(length: int, heads: int, dim: int, threads: int) -> dict[str, Any]:
    """Seconds, bytes above the inputs and peak bytes of a tiled forward with a log bias."""
    return _measure("forward", length=length, heads=heads, dim=dim, threads=threads)


def measure_step(
    spec: dict[str, Any], shape: tuple[int, int], chunk: int | None, threads: int, device: str
) -> dict[str, Any]:
    """Seconds and peak bytes of forward, loss of `chunk` tokens at a time, backward and AdamW."""
    return _measure("step", spec=spec, shape=shape, chunk=chunk, threads=threads, device=device)


def _measure(what: str, **options: Any) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-m", f"{__package__}.peak_memory", what, json.dumps(options)],
        cwd=Path(__file__).resolve().parents[__package__.count(".") + 1],
        capture_output=True,
        text=True,
    )
    if result.returncode != 0:
        raise RuntimeError(f"the measuring process ended with {result.returncode}: {result.stderr}")
    measured: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return measured


def _status_bytes(key: str) -> int:
    """VmRSS (now) or VmHWM (peak). getrusage would count the parent that started this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def _forward(length: int, heads: int, dim: int, threads: int) -> dict[str, Any]:
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
    return {"seconds": seconds, "above_inputs": peak - before, "peak": peak}


def _step(
    spec: dict[str, Any], shape: tuple[int, int], chunk: int | None, threads: int, device: str
) -> dict[str, Any]:
    import torch

    from megatron.model import GPTModel, ModelSpec

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = GPTModel(ModelSpec(**spec)).to(device).train()
    on_cpu = device == "cpu"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_cpu, foreach=False)
    batch, length = shape
    tokens = torch.randint(spec["padded_vocab_size"], (batch, length + 1)).to(device)
    start = time.perf_counter()
    with _live_bytes(model.parameters()) if not on_cpu else nullcontext([0]) as counted:
        loss = model.token_losses(tokens[:, :-1], tokens[:, 1:], chunk).mean()
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - start
    if not on_cpu:
        return {"seconds": seconds, "loss": 0.0, "peak": max(counted)}
    return {"seconds": seconds, "loss": loss.item(), "peak": _status_bytes("VmHWM")}


def _live_bytes(before: Iterable[Any]) -> Any:
    """A context whose value lists the bytes of all live tensors, each time that there are more."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.now, self.known = 0, dict[int, Any]()
            self.history: list[int] = []

        def note(self, tensor: Any) -> None:
            storage = tensor.untyped_storage()
            place, size = storage._cdata, storage.nbytes()
            if place in self.known:
                return
            self.now += size
            self.history.append(self.now)

            def gone(_: Any) -> None:
                self.now -= size
                del self.known[place]

            self.known[place] = weakref.ref(storage, gone)

        def __enter__(self) -> list[int]:
            super().__enter__()
            return self.history

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = function(*args, **(kwargs or {}))
            for item in out if isinstance(out, tuple | list) else [out]:
                if isinstance(item, torch.Tensor):
                    self.note(item)
            return out

    count = Count()
    for tensor in before:
        count.note(tensor)
    return count


if __name__ == "__main__":
    options = json.loads(sys.argv[2])
    found = _forward(**options) if sys.argv[1] == "forward" else _step(**options)
    print(json.dumps(found))
