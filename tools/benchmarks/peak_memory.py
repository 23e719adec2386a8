"""Peak memory and seconds of one piece of work, in a process of its own.

`python -m benchmarks.peak_memory NAME JSON` prints JSON. On device "meta" nothing is computed, and
the bytes of live tensors are counted instead of the process's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any


def measure(work: str, **options: Any) -> dict[str, Any]:
    """What one of `WORK`'s functions finds in a new process."""
    result = subprocess.run(
        [sys.executable, "-m", f"{__package__}.peak_memory", work, json.dumps(options)],
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
    """A tiled forward with a log bias; also bytes above the inputs."""
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


def _terms(term: str, length: int, heads: int, dim: int, threads: int) -> dict[str, Any]:
    """Forward and backward of the log bias with one more term; bytes above the inputs."""
    import torch

    from .contenders import Inputs, with_terms

    torch.set_num_threads(threads)
    with_terms(Inputs(1, heads, 256, dim, train=True), term)()  # loads what there is to load
    run = with_terms(Inputs(1, heads, length, dim, train=True), term)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, start = _status_bytes("VmRSS"), time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "above_inputs": _status_bytes("VmHWM") - before}


def _inkling_step(ours: bool, length: int, rounds: int, threads: int) -> dict[str, Any]:
    """A training step of transformers' Inkling: CPU seconds of the fastest, and bytes above it."""
    import torch

    from .contenders import inkling_model

    torch.set_num_threads(threads)
    model = inkling_model(ours=ours)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    tokens = torch.randint(1, model.config.vocab_size, (1, length))

    def run(tokens: torch.Tensor) -> float:
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # so that gradients are not counted below
        return float(loss.item())

    first = run(tokens[:, :64])  # loads what there is to load, and makes gradients and moments
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, seconds, last = _status_bytes("VmRSS"), [], first
    for _ in range(rounds):
        start = time.process_time()
        last = run(tokens)
        seconds.append(time.process_time() - start)
    above = _status_bytes("VmHWM") - before
    return {"seconds": min(seconds), "above_model": above, "loss": last}


def _step(
    spec: dict[str, Any], shape: tuple[int, int], chunk: int | None, threads: int, device: str
) -> dict[str, Any]:
    """Forward, loss of `chunk` tokens at a time, backward and AdamW."""
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


def _steps(
    spec: dict[str, Any], shape: tuple[int, int], threads: int, steps: int, kept: bool
) -> dict[str, Any]:
    """CPU seconds of each step, with or without `keep_freed_memory`."""
    import torch

    from megatron.machine import keep_freed_memory
    from megatron.model import GPTModel, ModelSpec

    if kept and not keep_freed_memory():
        raise RuntimeError("this C library cannot keep freed memory")
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = GPTModel(ModelSpec(**spec)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch, length = shape
    tokens = torch.randint(spec["padded_vocab_size"], (batch, length + 1))
    seconds, loss = [], torch.zeros(())
    for _ in range(steps):
        start = time.process_time()
        loss = model.token_losses(tokens[:, :-1], tokens[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - start)
    return {"seconds": seconds, "loss": loss.item(), "peak": _status_bytes("VmHWM")}


def _shared(
    spec: dict[str, Any], length: int, threads: int, rank: int, size: int, store: str
) -> dict[str, Any]:
    """Forward and backward of a rank that shares its sequence; bytes above weights and gradients.

    A first step of 64 tokens a rank loads what there is to load.
    """
    import torch
    import torch.distributed as dist

    from megatron.model import GPTModel, ModelSpec
    from megatron.mpu.collectives import SequenceParallel

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    sp = SequenceParallel(dist.group.WORLD, rank, size)
    model = GPTModel(ModelSpec(**spec), sp=sp).train()

    def run(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens[:, :-1], tokens[:, 1:]).mean()
        loss.backward()
        return loss.detach()

    tokens = torch.randint(spec["padded_vocab_size"], (1, length + 1))
    run(tokens[:, : 64 * size + 1])
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, start = _status_bytes("VmRSS"), time.perf_counter()
    loss = run(tokens)
    seconds, peak = time.perf_counter() - start, _status_bytes("VmHWM") - before
    dist.all_reduce(loss)
    dist.destroy_process_group()
    return {"seconds": seconds, "peak": peak, "loss": loss.item() / size}


def _evaluation(pos_emb: str, length: int, threads: int) -> dict[str, Any]:
    """The losses of one sequence by the 162M model."""
    import torch

    from .evaluate import VOCABULARY, build

    torch.set_num_threads(threads)
    model = build(pos_emb)
    text = torch.randint(VOCABULARY, (1, length + 1))
    start = time.perf_counter()
    with torch.inference_mode():
        losses = model.token_losses(text[:, :-1], text[:, 1:])
    seconds = time.perf_counter() - start
    assert losses.isfinite().all()
    return {"seconds": seconds, "peak": _status_bytes("VmHWM")}


def _index(prefix: str, length: int, samples: int, cache: str) -> dict[str, Any]:
    """The index of a dataset: made, then read from the cache; also how many samples it has."""
    from megatron.data import build_train_valid_test_datasets

    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        train, _, _ = build_train_valid_test_datasets(
            prefix, "1,0,0", (samples, 0, 0), length, length, 1234, cache_dir=cache
        )
        seconds.append(time.perf_counter() - start)
    assert train is not None
    return {"seconds": seconds, "peak": _status_bytes("VmHWM"), "samples": len(train)}


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


WORK: dict[str, Callable[..., dict[str, Any]]] = {
    "forward": _forward,
    "terms": _terms,
    "inkling_step": _inkling_step,
    "step": _step,
    "steps": _steps,
    "shared": _shared,
    "evaluation": _evaluation,
    "index": _index,
}

if __name__ == "__main__":
    print(json.dumps(WORK[sys.argv[1]](**json.loads(sys.argv[2]))))
