"""Run in one or two processes by the tests beside it: train a few steps in each case given.

Usage: worker.py OUTPUT CASES.json. A case is {"config": flat config, "steps": n, "resume":
directory or null, "save": directory or null}. Rank 0 writes, per case, what the tests compare.
"poison" lists steps at which the last rank gets a gradient that is not finite, in one parameter;
"export" asks for a universal checkpoint at the end, "copy" for one before the first step;
"deepspeed_resume" names one that DeepSpeed's own loader reads; "full_disk_on" names a rank whose
checkpoint files cannot be written. "background" is a step and a directory: a background save of the
state before that step, which is not written before the last step is taken.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from megatron.backends import TORCH, chosen_backend
from megatron.backends.interface import TrainingEngine, full_shape, gathered, is_partitioned
from megatron.checkpoints import safe_files
from megatron.checkpoints.resuming import Resumed, resume
from megatron.checkpoints.run_state import rng_state
from megatron.checkpoints.saving import Save, save_run, save_universal
from megatron.checkpoints.store import CheckpointStore
from megatron.errors import CheckpointError
from megatron.model import ModelSpec
from megatron.mpu.collectives import ParallelState, gather_from_group, initialize_parallel
from megatron.mpu.job import join_training, set_seeds
from megatron.neox_arguments import NeoXArgs, allow_kernel
from megatron.neox_arguments.allowed_code import classes_in
from megatron.training.batches import build_streams
from megatron.training.engine import build_engine, build_module
from megatron.training.progress_hooks import kernel_modules
from megatron.training.run import find_vocabulary
from megatron.training.trainer import agree


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    allow_kernel(classes_in(case["config"]))
    args = NeoXArgs.from_dict(case["config"])
    plain = chosen_backend(args.runtime.training_backend) == TORCH
    parallel = initialize_parallel(args.parallel, serial=plain)
    vocabulary = find_vocabulary(args.tokenizer, args.data)
    set_seeds(args.runtime.seed, parallel)
    spec = ModelSpec.from_args(args, args.padded_vocabulary(vocabulary.size))
    with watched_matrices() as whole_at_once:
        module = build_module(args, spec, parallel)
    engine = build_engine(args, module, parallel)
    start = 0
    if case.get("resume"):
        store = CheckpointStore(Path(case["resume"]))
        found = store.find(args.checkpoint.iteration)
        assert found is not None
        start = resume(engine, store, args, found, parallel).step
    if case.get("deepspeed_resume"):
        start = resume_by_deepspeed(engine, case["deepspeed_resume"])
    kernels_before = kernel_values(engine, parallel.tp)
    weights_before = whole_weights(engine)
    plan = args.batch_plan(dist.get_world_size())
    train, valid, _ = build_streams(
        args,
        spec,
        plan,
        parallel,
        eod=vocabulary.eod,
        start=Resumed(start, start * plan.train_batch_size),
    )
    assert train is not None and valid is not None

    def export(directory: str, step: int) -> None:
        target, at = CheckpointStore(Path(directory)), Resumed(step, step * plan.train_batch_size)
        save_universal(engine, target, args, at, parallel, vocabulary.size)

    if case.get("copy"):
        export(case["copy"], start)
    held = HeldSave(engine, args, case)
    record = take_steps(engine, parallel, train, case, held)
    end = start + case["steps"]
    save_error = None
    if case.get("save"):
        store = CheckpointStore(Path(case["save"]))
        progress = {"iteration": end, "consumed_samples": end * plan.train_batch_size}

        def save() -> Path:
            background = args.checkpoint.async_save
            return save_run(engine, store, args, end, progress, background=background).complete()

        save_error = on_a_full_disk(case, save)
    if case.get("export"):
        save_error = save_error or on_a_full_disk(case, lambda: export(case["export"], end))
    result = {
        **record,
        "held_until_the_end": everywhere(held.complete()),
        "save_errors": everywhere(save_error),
        "loss_scale": engine.loss_scale,
        "fingerprints": everywhere(fingerprint(engine)),
        "kernels_before": kernels_before,
        "weights_before": weights_before,
        "whole_at_once": max(whole_at_once),
        "kernels": kernel_values(engine, parallel.tp),
        "replicas_agree": replicas_agree(engine, parallel),
    }
    if case.get("validate"):
        result["valid_loss"] = float(engine.evaluate(valid, args.evaluation.eval_iters))
    return result


def take_steps(
    engine: TrainingEngine,
    parallel: ParallelState,
    batches: Any,
    case: dict[str, Any],
    held: HeldSave,
) -> dict[str, Any]:
    """Losses, norms, and which ranks refused or did not change at each step."""
    names = ("losses", "grad_norms", "skipped", "unchanged", "scalar_collectives")
    record: dict[str, Any] = {name: [] for name in names}
    poison = Poison(engine, case.get("poison", []))
    before = state_of(engine)
    for step in range(case["steps"]):
        poison.at(step)
        held.at(step)
        with counted_scalars() as scalars:
            record["losses"].append(agree(engine.train_step(batches), parallel, {})[0])
        record["scalar_collectives"].append(scalars)
        record["grad_norms"].append(engine.grad_norm)
        record["skipped"].append(everywhere(engine.step_skipped))
        after = state_of(engine)
        record["unchanged"].append(everywhere(before == after))
        before = after
    return record


@contextmanager
def watched_matrices() -> Iterator[list[int]]:
    """How many matrices are whole in this process, each time that a layer takes one."""
    counts, matrices = [0], []

    def look(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if parameter is not None and len(full_shape(parameter)) >= 2:
            matrices.append(parameter)
            counts.append(sum(p.shape == full_shape(p) for p in matrices))

    handle = register_module_parameter_registration_hook(look)
    try:
        yield counts
    finally:
        handle.remove()


@torch.no_grad()
def whole_weights(engine: Any) -> dict[str, str]:
    """Every parameter's bits by name, put together from ZeRO 3's pieces."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        with gathered([parameter]):
            found[name] = digest(parameter)
    return found


@contextmanager
def counted_scalars() -> Iterator[list[str]]:
    """The collectives on a handful of numbers: they cost their latency alone."""
    found: list[str] = []
    real = {name: getattr(dist, name) for name in ("all_reduce", "broadcast")}

    def counting(name: str) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.numel() <= 8:
                found.append(name)
            return real[name](tensor, *args, **kwargs)

        return call

    try:
        for name in real:
            setattr(dist, name, counting(name))
        yield found
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


class HeldSave:
    """A background save of the state before one step, its writer held until all are taken."""

    def __init__(self, engine: Any, args: NeoXArgs, case: dict[str, Any]) -> None:
        self.engine, self.args = engine, args
        self.step, self.directory = case.get("background", (None, None))
        self.saving: Save | None = None
        self.gate = threading.Event()
        self.real = safe_files.synced_save

    def at(self, step: int) -> None:
        if step != self.step:
            return

        def wait_and_save(state: Any, path: Any) -> tuple[int, str]:
            self.gate.wait()
            return self.real(state, path)

        safe_files.synced_save = wait_and_save
        size = self.args.batch_plan(dist.get_world_size()).train_batch_size
        progress = {"iteration": step, "consumed_samples": step * size}
        store = CheckpointStore(Path(self.directory))
        self.saving = save_run(self.engine, store, self.args, step, progress, background=True)

    def complete(self) -> bool:
        """Whether it was still being written."""
        if self.saving is None:
            return False
        held = not self.saving.is_written and not self.saving.store.steps()
        self.gate.set()
        self.saving.complete()
        safe_files.synced_save = self.real
        return held


class Poison:
    """Puts infinity into the gradient of one small parameter of the last rank."""

    def __init__(self, engine: Any, steps: list[int]) -> None:
        self.steps, self.active = steps, False
        if steps and dist.get_rank() == dist.get_world_size() - 1:
            small = [p for p in engine.module.parameters() if len(full_shape(p)) == 1]
            # Of whole copies, only those of the first tensor-parallel rank are in DeepSpeed's norm.
            slices = [p for p in small if getattr(p, "model_parallel", False)]
            (slices or small)[-1].register_hook(self._spoil)

    def at(self, step: int) -> None:
        self.active = step in self.steps

    def _spoil(self, gradient: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gradient, float("inf")) if self.active else gradient


def resume_by_deepspeed(engine: Any, directory: str) -> int:
    """DeepSpeed's own loader, as with `checkpoint: {load_universal: true}` in its config."""
    raw = engine.deepspeed
    raw._config.load_universal_checkpoint = True
    path, state = raw.load_checkpoint(directory)
    assert path is not None
    assert raw.global_steps == state["iteration"] == raw.lr_scheduler.steps
    return int(state["iteration"])


def on_a_full_disk(case: dict[str, Any], write: Callable[[], Any]) -> str | None:
    """Write, on a disk that may be full for one rank; the error's text."""
    real = safe_files.synced_save
    if case.get("full_disk_on") == dist.get_rank():
        safe_files.synced_save = no_space
    try:
        write()
    except CheckpointError as error:
        return str(error)
    finally:
        safe_files.synced_save = real
    return None


def no_space(state: Any, path: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def state_of(engine: Any) -> str:
    """Weights, masters and moments of this rank as one digest."""
    parts = fingerprint(engine)
    return digest([parts["weights"], parts["masters"], parts["moments"]])


@torch.no_grad()
def kernel_values(engine: Any, tp: Any) -> dict[str, list[float]]:
    """All heads' raw parameters in fp32, from the first stage that holds a kernel."""
    found: dict[str, list[float]] = {}
    for number, kernel in enumerate(kernel_modules(engine.module).values()):
        for name, parameter in kernel.named_parameters():
            values = gather_from_group(master(parameter), tp)
            found[f"{number}.{name}"] = values.flatten().tolist()
    return found


def master(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The fp32 value that the optimizer works on."""
    if is_partitioned(parameter) or hasattr(parameter, "_hp_mapping"):
        from deepspeed.utils import safe_get_full_fp32_param

        value = safe_get_full_fp32_param(parameter)
        assert value is not None
        return value.view(full_shape(parameter))
    return parameter.detach().float()


@torch.no_grad()
def replicas_agree(engine: Any, parallel: ParallelState) -> bool:
    """Whether the kernel's parameters are the same bits on every data-parallel rank."""
    own = []
    for kernel in kernel_modules(engine.module).values():
        with gathered(kernel.parameters()):
            own += [digest(p.detach().float()) for p in kernel.parameters()]
    copies: list[Any] = [None] * parallel.dp_size
    group = parallel.grid.get_data_parallel_group() if parallel.grid else None
    dist.all_gather_object(copies, own, group=group)
    return all(everywhere(all(copy == own for copy in copies)))


def digest(value: Any) -> str:
    """A name for the exact bits of a nested value."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().reshape(-1).contiguous()
        content = value.view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return hashlib.sha256(content + str(value.dtype).encode()).hexdigest()
    if isinstance(value, dict):
        return digest([[str(key), digest(item)] for key, item in value.items()])
    if isinstance(value, list | tuple):
        return hashlib.sha256("".join(map(digest, value)).encode()).hexdigest()
    return hashlib.sha256(repr(value).encode()).hexdigest()


def fingerprint(engine: Any) -> dict[str, str]:
    """This rank's weights, optimizer, schedule and random states, to the bit."""
    basic = engine.optimizer
    moments = [dict(state) for state in basic.state.values()]
    names = (
        "fp32_partitioned_groups_flat",  # ZeRO 3
        "single_partition_of_fp32_groups",  # ZeRO 1 and 2
        "fp32_groups_flat_partition",  # BF16_Optimizer
    )
    wrapper = engine.deepspeed.optimizer if hasattr(engine, "deepspeed") else None
    masters = [getattr(wrapper, name, None) for name in names]
    return {
        "weights": digest(
            [p.ds_tensor if hasattr(p, "ds_tensor") else p for p in engine.module.parameters()]
        ),
        "masters": digest(masters),
        "moments": digest(moments),
        "count": str(len(moments)),
        "schedule": digest(engine.scheduler.state_dict()),
        "lr": digest([group["lr"] for group in basic.param_groups]),
        "rng": digest(rng_state()),
    }


def everywhere(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def main() -> None:
    output, cases = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    join_training(NeoXArgs.from_dict(next(iter(cases.values()))["config"]))
    results = {}
    for name, case in cases.items():
        print("case", name, flush=True)
        try:
            results[name] = run_case(case)
        except Exception as error:
            raise RuntimeError(f"case {name} failed") from error
        dist.barrier()
    if dist.get_rank() == 0:
        output.write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
