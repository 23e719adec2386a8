"""What is recorded of a run beside its losses: spikes, and the share of what a device could do."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoints.reading import read_checkpoint
from megatron.neox_arguments.run_keys import LoggingArgs
from megatron.training.metrics import Sinks
from megatron.training.progress_hooks import (
    Profile,
    RecordMetrics,
    ShowProgress,
    clock_time,
    kernel_suffix,
    peak_flops,
)
from megatron.training.trainer import StepReport
from tests.training.cases import write_data
from tests.training.runs import run, run_config


class _Recorder:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def write(self, step: int, values: dict[str, Any]) -> None:
        self.lines.append({"step": step, **values})

    def close(self) -> None:
        return None


def test_a_loss_spike_is_logged() -> None:
    recorder = _Recorder()
    hook = RecordMetrics(Sinks([recorder]), 1000, flops_per_token=1.0)
    trainer: Any = type("T", (), {"say": print, "train_iters": 10_000})
    for step in range(1, 203):
        loss = 9.0 if step == 150 else 3.0 + 0.01 * math.sin(step)
        report = StepReport(step, loss, 0.1, 1.0, 0.1, 64, skipped=False)
        hook.after_step(trainer, report)
    spikes = [line for line in recorder.lines if "loss_spike" in line]
    assert [line["step"] for line in spikes] == [150]
    assert spikes[0]["loss_spike"] == 9.0
    assert spikes[0]["recent_loss"] == pytest.approx(3.0, abs=0.05)


def test_the_printed_loss_is_that_of_the_metrics() -> None:
    """The mean over the steps since the line before, and so are tokens/s."""
    recorder, said = _Recorder(), []
    trainer: Any = type(
        "T", (), {"say": staticmethod(said.append), "train_iters": 5, "step": 0, "is_main": True}
    )
    hooks = (RecordMetrics(Sinks([recorder]), 2, flops_per_token=1.0), ShowProgress(2))
    hooks[1].on_start(trainer)
    for step in range(1, 6):
        report = StepReport(step, float(step), 0.1, 1.0, 0.5 * step, 60, skipped=False)
        for hook in hooks:
            hook.after_step(trainer, report)
    assert [line["loss"] for line in recorder.lines] == [1.5, 3.5, 5.0]
    assert [line.split(":")[1].split(",")[0] for line in said] == [
        f" loss {line['loss']:.4f}" for line in recorder.lines
    ]
    assert all(
        f"{line['tokens_per_second']:,.0f} tokens/s" in text
        for line, text in zip(recorder.lines, said, strict=True)
    )


def test_peaks_by_device_name() -> None:
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA L40S") == 362e12
    assert peak_flops("Some new device") is None


def profiled(folder: Path, first: int, last: int, **keys: Any) -> list[str]:
    """What is said when steps `first` to `last` are taken, each of which multiplies matrices."""
    hook, said = Profile(LoggingArgs(**keys), folder), []
    trainer: Any = type("T", (), {"say": staticmethod(said.append), "step": first - 1})
    hook.on_start(trainer)
    for step in range(first, last + 1):
        with torch.profiler.record_function(f"step_{step}"):
            torch.ones(4, 4) @ torch.ones(4, 4)
        hook.after_step(trainer, StepReport(step, 1.0, 0.1, 1.0, 0.1, 64, skipped=False))
    hook.on_end(trainer)
    return said


def test_a_trace_has_the_steps_asked_for(tmp_path: Path) -> None:
    keys = {"profile": True, "profile_step_start": 2, "profile_step_stop": 4}
    trace = tmp_path / "trace_rank0.json.gz"
    assert profiled(tmp_path, 1, 6, **keys) == [f"profile: {trace} (open it with Perfetto)"]
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    names = {event.get("name") for event in events}
    whole = [event for event in events if event["ph"] == "X"]  # Chrome's complete events
    assert len(whole) > 2
    for event in whole:
        assert event["dur"] >= 0 and event["ts"] > 0 and {"name", "pid", "tid"} <= event.keys()
    assert {"step_3", "step_4", "aten::mm"} <= names
    assert names.isdisjoint({"step_2", "step_5"})


def test_a_profile_of_steps_that_were_not_taken_is_said(tmp_path: Path) -> None:
    (line,) = profiled(tmp_path, 13, 14, profile=True)
    assert "nothing was recorded" in line and "profile_step_start = 10" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="says that there is no GPU")
@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0:00:00"), (59.7, "0:01:00"), (3661, "1:01:01"), (93784.2, "26:03:04")],
)
def test_the_time_left_is_in_hours_however_many(seconds: float, shown: str) -> None:
    assert clock_time(seconds) == shown


def test_without_a_gpu_one_line_says_that_memory_is_not_recorded(tmp_path: Path) -> None:
    (line,) = profiled(tmp_path, 1, 2, memory_profiling=True)
    assert line.startswith("memory_profiling: ") and "GPU" in line
    assert not list(tmp_path.iterdir())


def test_the_norm_of_each_parameter(tmp_path: Path) -> None:
    """Those of the weights that are saved then, whatever ranks hold them."""
    save = tmp_path / "run"
    config = run_config(write_data(tmp_path), save, train_iters=2, log_interval=2)
    layout = {"log_param_norm": True, "model_parallel_size": 2, "precision": "fp32"}
    run({**config, **layout}, tmp_path, processes=2)
    lines = [json.loads(line) for line in (save / "metrics.jsonl").open()]
    (norms,) = [line["parameter_norms"] for line in lines if "parameter_norms" in line]
    weights = read_checkpoint(save).weights
    assert norms.keys() == weights.keys()
    for name, tensor in weights.items():
        assert norms[name] == pytest.approx(float(tensor.float().norm()), rel=1e-5), name


@pytest.mark.parametrize(
    "layout",
    [
        {"precision": "fp32"},
        {"precision": "bf16", "zero_optimization": {"stage": 2}},
        {"precision": "bf16", "zero_optimization": {"stage": 3}},
        {"precision": "fp32", "model_parallel_size": 2},
        {"precision": "fp32", "pipe_parallel_size": 2},
    ],
    ids=["one", "zero2", "zero3", "mp2", "pp2"],
)
def test_the_percentage_of_gradients_that_are_zero(layout: dict[str, Any], tmp_path: Path) -> None:
    """Three of four learned positions are beyond seq_length and have none."""
    save, processes = tmp_path / "run", 1 if layout == {"precision": "fp32"} else 2
    config = run_config(write_data(tmp_path), save, train_iters=2, log_interval=2)
    config |= {"pos_emb": "learned", "max_position_embeddings": 64, "log_grad_pct_zeros": True}
    run({**config, **layout}, tmp_path, processes)
    lines = [json.loads(line) for line in (save / "metrics.jsonl").open()]
    ((step, shares),) = [
        (line["step"], line["pct_grad_zeros"]) for line in lines if "pct_grad_zeros" in line
    ]
    assert step == 2
    assert shares.keys() == read_checkpoint(save).weights.keys()
    assert shares["0.position_embeddings.weight"] == pytest.approx(75, abs=0.5)
    assert all(share < 5 for name, share in shares.items() if "layernorm" in name)


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("sequential.1.embedding.2", "_shared2"),
        ("sequential.5.positions", "_layer3"),
        ("5.positions", "_layer3"),
        ("sequential.1.embedding", ""),
    ],
)
def test_a_kernel_is_recorded_by_its_place(name: str, suffix: str) -> None:
    assert kernel_suffix(name) == suffix
