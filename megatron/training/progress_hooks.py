"""Hooks for metrics, progress output, and kernels: their values and their `project` constraint."""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from megatron.backends.interface import gathered
from megatron.checkpoints.sharding import canonical_names
from megatron.model.kernel_theory import PAPER_MAX_DISTANCE, effective_length
from megatron.model.layer_list import FIRST_LAYER
from megatron.model.position_base import TableEmbedding
from megatron.model.rotary_and_input_positions import RotaryEmbedding
from megatron.mpu.collectives import gather_from_group, gather_objects
from megatron.neox_arguments.run_keys import LoggingArgs
from megatron.training.metrics import Sinks
from megatron.training.trainer import Hook, StepReport, Trainer


class RecordMetrics(Hook):
    """One line of numbers every `interval` steps; losses of all steps are averaged into it."""

    SPIKE_WINDOW = 100

    def __init__(self, sinks: Sinks, interval: int, flops_per_token: float) -> None:
        self.sinks, self.interval, self.flops_per_token = sinks, interval, flops_per_token
        self._pending: list[StepReport] = []
        self._recent: deque[float] = deque(maxlen=self.SPIKE_WINDOW)
        self._skipped = 0

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        self._pending.append(report)
        self._skipped += report.skipped
        self._note_spike(trainer, report)
        if report.step % self.interval == 0 or report.step == trainer.train_iters:
            self._write()

    def on_end(self, trainer: Trainer) -> None:
        self._write()

    def _write(self) -> None:
        if not self._pending:
            return
        reports, self._pending = self._pending, []
        loss, speed = _means(reports)
        values: dict[str, Any] = {
            "loss": loss,
            "lr": reports[-1].lr,
            "grad_norm": reports[-1].grad_norm,
            "tokens_per_second": speed,
            **self._utilisation(speed),
            "step_seconds": sum(r.seconds for r in reports) / len(reports),
            "memory_gb": _memory_gb(),
            "skipped_steps": self._skipped,
            "time": time.time(),
        }
        if reports[-1].loss_scale is not None:
            values["loss_scale"] = reports[-1].loss_scale
        self.sinks.write(reports[-1].step, values)

    def _utilisation(self, tokens_per_second: float) -> dict[str, float]:
        """Model FLOP/s of all ranks, and the MFU if the devices' peak is known."""
        flops = tokens_per_second * self.flops_per_token
        values = {"model_tflops": flops / 1e12}
        peak = peak_flops()
        if peak is not None:
            values["mfu"] = flops / (peak * dist.get_world_size())
        return values

    def _note_spike(self, trainer: Trainer, report: StepReport) -> None:
        """Print a loss far above its recent mean."""
        if len(self._recent) == self.SPIKE_WINDOW:
            recent = torch.tensor(list(self._recent))
            mean, deviation = float(recent.mean()), float(recent.std())
            if report.loss > mean + max(6 * deviation, 0.5):
                self.sinks.write(report.step, {"loss_spike": report.loss, "recent_loss": mean})
                trainer.say(f"step {report.step}: loss spike {report.loss:.3f} (was {mean:.3f})")
        self._recent.append(report.loss)


def _means(reports: list[StepReport]) -> tuple[float, float]:
    """Loss, and tokens a second, over several steps."""
    seconds = sum(report.seconds for report in reports)
    speed = sum(report.tokens for report in reports) / max(seconds, 1e-9)
    return sum(report.loss for report in reports) / len(reports), speed


# Dense bf16 FLOP/s by device name, from the makers' data sheets.
PEAK_FLOPS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "A40": 150e12,
    "A30": 165e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
    "MI300X": 1307e12,
    "MI250X": 383e12,
}


def peak_flops(device: str | None = None) -> float | None:
    """Peak FLOP/s of the device; None for devices that are not in the table (CPUs)."""
    if device is None:
        if not torch.cuda.is_available():
            return None
        device = torch.cuda.get_device_name()
    matches = [name for name in PEAK_FLOPS if re.search(rf"\b{re.escape(name)}\b", device)]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None


def _memory_gb() -> float:
    """Peak memory of this process: of the GPU if there is one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    import resource

    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e9


class ShowProgress(Hook):
    """A bar on a terminal with each step's loss; elsewhere a line every `interval` steps.

    Loss and tokens/s of a line are means over the steps since the line before, as in the metrics.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._pending: list[StepReport] = []
        self._bar: tqdm[Any] = tqdm(disable=True)
        self._start_time, self._start_step = 0.0, 0

    def on_start(self, trainer: Trainer) -> None:
        self._start_time, self._start_step = time.perf_counter(), trainer.step
        self._bar = tqdm(
            total=trainer.train_iters,
            initial=trainer.step,
            unit="step",
            dynamic_ncols=True,
            disable=not (trainer.is_main and sys.stderr.isatty()),
        )

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        self._bar.update(1)
        self._bar.set_postfix_str(
            f"loss {report.loss:.3f}, {report.tokens_per_second:,.0f} tokens/s"
        )
        self._pending.append(report)
        if report.step % self.interval == 0 or report.step == trainer.train_iters:
            if self._bar.disable:
                trainer.say(self._line(trainer, self._pending))
            self._pending = []

    def on_end(self, trainer: Trainer) -> None:
        self._bar.close()
        if trainer.stop_reason is not None:
            trainer.say(f"stopped after step {trainer.step}: {trainer.stop_reason}")

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        self._bar.close()

    def _line(self, trainer: Trainer, reports: list[StepReport]) -> str:
        report, (loss, speed) = reports[-1], _means(reports)
        done = report.step - self._start_step
        per_step = (time.perf_counter() - self._start_time) / max(done, 1)
        left = per_step * (trainer.train_iters - report.step)
        norm = f", grad norm {report.grad_norm:.3f}" if report.grad_norm is not None else ""
        return (
            f"step {report.step}/{trainer.train_iters}: loss {loss:.4f}, "
            f"lr {report.lr:.2e}{norm}, {speed:,.0f} tokens/s, "
            f"{clock_time(left)} left"
        )


def clock_time(seconds: float) -> str:
    """`0:01:05`, `26:03:04`: hours, minutes and seconds; days are hours too."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


class Profile(Hook):
    """`profile` and `memory_profiling`: a trace, and a memory snapshot, of some steps."""

    def __init__(self, options: LoggingArgs, folder: Path) -> None:
        self.options, self.folder = options, folder
        self._profiler: torch.profiler.profile | None = None
        self._records_memory = False
        self._written: list[str] = []

    def on_start(self, trainer: Trainer) -> None:
        if self.options.memory_profiling and not torch.cuda.is_available():
            trainer.say("memory_profiling: torch records the memory of GPUs, and there is none")
        if trainer.step == self.options.profile_step_start:
            self._begin()

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        if report.step == self.options.profile_step_start:
            self._begin()
        elif report.step == self.options.profile_step_stop:
            self._finish()

    def on_end(self, trainer: Trainer) -> None:
        self._finish()
        for line in self._written:
            trainer.say(line)
        if self.options.profile and not self._written:
            trainer.say(
                f"profile: nothing was recorded; the run took no step after profile_step_start = "
                f"{self.options.profile_step_start}"
            )

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        self._finish()

    def _begin(self) -> None:
        if self.options.memory_profiling and torch.cuda.is_available():
            torch.cuda.memory._record_memory_history()
            self._records_memory = True
        if self.options.profile:
            self._profiler = torch.profiler.profile(record_shapes=True)
            self._profiler.start()

    def _finish(self) -> None:
        """Write what was recorded; also when the run ends before the last step to record."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        if self._profiler is not None:
            self._profiler.stop()
            path = self._place(self.folder, f"trace_rank{rank}.json.gz")
            unfinished = path.with_name(f".{path.name}")
            self._profiler.export_chrome_trace(str(unfinished))
            unfinished.replace(path)
            self._profiler = None
            self._written.append(f"profile: {path} (open it with Perfetto)")
        if self._records_memory:
            folder = self.options.memory_profiling_path
            path = self._place(Path(folder or self.folder), f"memory_rank{rank}.pickle")
            torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)
            self._records_memory = False
            self._written.append(f"memory_profiling: {path} (open it with torch's memory viewer)")

    def _place(self, folder: Path, name: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name


# The learned kernels: their values per head in the metrics, and the `project` constraint.


def kernel_modules(module: nn.Module) -> dict[str, TableEmbedding]:
    """The tables on this rank that learn something, by their names in the module."""
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, TableEmbedding) and next(part.parameters(), None) is not None
    }


def kernel_suffix(name: str) -> str:
    """`_layer3` for a layer's kernel, from 0; `_shared1` for one of several that layers share."""
    if shared := re.search(r"\bembedding\.(\d+)$", name):
        return f"_shared{shared[1]}"
    layer = re.search(r"(\d+)\.positions$", name)
    return f"_layer{int(layer[1]) - FIRST_LAYER}" if layer else ""


class RecordKernels(Hook):
    """r1, r2, ... and the effective length of each head, every `interval` steps."""

    def __init__(self, sinks: Sinks, interval: int) -> None:
        self.sinks, self.interval = sinks, interval

    def on_start(self, trainer: Trainer) -> None:
        if trainer.step == 0:
            self._record(trainer)

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        if report.step % self.interval == 0 or report.step == trainer.train_iters:
            self._record(trainer)

    @torch.no_grad()
    def _record(self, trainer: Trainer) -> None:
        kernels = kernel_modules(trainer.engine.module)
        for module_name, kernel in kernels.items():
            with gathered(kernel.parameters()):
                values = {
                    name: gather_from_group(value.float(), trainer.parallel.tp).tolist()
                    for name, value in kernel.kernel_values().items()
                }
                bias = kernel(PAPER_MAX_DISTANCE + 1).bias
            suffix = kernel_suffix(module_name) if len(kernels) > 1 else ""
            line: dict[str, Any] = {f"kernel{suffix}": values}
            if bias is not None:
                everyone = gather_from_group(bias.T, trainer.parallel.tp).T
                line[f"effective_length{suffix}"] = effective_length(everyone)
            self.sinks.write(trainer.step, line)


class RecordParameterNorms(Hook):
    """`log_param_norm`: the norm of each parameter, over all ranks that hold a part of it."""

    def __init__(self, sinks: Sinks, interval: int) -> None:
        self.sinks, self.interval = sinks, interval

    @torch.no_grad()
    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        if report.step % self.interval:
            return
        tp, own = trainer.parallel.tp, {}
        for parameter, name in canonical_names(trainer.engine.module).items():
            with gathered([parameter]):
                square = parameter.float().square().sum()
            if tp.size > 1 and getattr(parameter, "model_parallel", False):
                dist.all_reduce(square, group=tp.group)
            own[name] = float(square.sqrt())
        norms = {name: norm for stage in gather_objects(own) for name, norm in stage.items()}
        self.sinks.write(report.step, {"parameter_norms": norms})


class RecordZeroGradients(Hook):
    """`log_grad_pct_zeros`: how many of a step's gradients are 0, over all ranks, in percent."""

    def __init__(self, sinks: Sinks, interval: int) -> None:
        self.sinks, self.interval = sinks, interval
        self._counts: dict[tuple[str, int], tuple[int, int]] = {}

    def on_start(self, trainer: Trainer) -> None:
        names = canonical_names(trainer.engine.module)

        def count(*_: Any) -> None:
            """Before the optimizer's step, which ZeRO takes group by group."""
            if (trainer.step + 1) % self.interval:
                return
            for master, spans in trainer.engine.master_spans():
                if master.grad is None:
                    continue
                gradient = master.grad.flatten()
                for parameter, begin, end, first in spans:
                    zeros = int((gradient[begin:end] == 0).sum())
                    self._counts[names[parameter], first] = zeros, end - begin

        trainer.engine.optimizer.register_step_pre_hook(count)

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        if report.step % self.interval:
            return
        ranks = gather_objects(self._counts)
        self._counts = {}
        sums: dict[str, list[int]] = {}
        for (name, _), both in (item for counts in ranks for item in counts.items()):
            sums[name] = [a + b for a, b in zip(sums.get(name, (0, 0)), both, strict=True)]
        if sums:  # not of a step that was skipped
            percent = {name: 100 * zeros / max(size, 1) for name, (zeros, size) in sums.items()}
            self.sinks.write(report.step, {"pct_grad_zeros": percent})


class FadeRotary(Hook):
    """rotary_fade_iters: before each step, the share of rotary's angles that it has."""

    def on_start(self, trainer: Trainer) -> None:
        self._set(trainer)

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        self._set(trainer)

    def _set(self, trainer: Trainer) -> None:
        share = trainer.args.model.rotary_share(trainer.step)
        for module in trainer.engine.module.modules():
            if isinstance(module, RotaryEmbedding) and module.is_beside:
                module.share = share


class ProjectKernels(Hook):
    """kerple_constraint `project`: put parameters back into their bounds after every step."""

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        for kernel in kernel_modules(trainer.engine.module).values():
            with gathered(kernel.parameters(), write=True):
                kernel.project_()
            for parameter in kernel.parameters():
                trainer.engine.copy_to_master(parameter)
