"""What this machine has, asked without torch."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from megatron import machine
from megatron.machine import count_gpus, is_running, memory_bytes


def test_gpus_are_counted_without_torch(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert count_gpus({}, tmp_path) == 3
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "1,2"}, tmp_path) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == 0
    assert count_gpus({"DS_ACCELERATOR": "cpu"}, tmp_path) == 0


def test_a_container_may_have_less_memory_than_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "CGROUP_LIMITS", (tmp_path / "absent", limits))
    whole = memory_bytes()
    assert whole is not None
    for text, found in (("max\n", whole), ("1048576\n", 1 << 20), (f"{2**62}\n", whole)):
        limits.write_text(text)
        assert memory_bytes() == found


def test_a_process_runs_until_it_has_ended() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert is_running(os.getpid()) and is_running(1)
    assert not is_running(ended.pid) and not is_running(2**70)


@pytest.mark.parametrize("described", [True, False])
def test_torch_is_kept_off_tiles_that_a_virtual_machine_does_not_describe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: bool
) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(machine, "_tiles_are_described", lambda: described)
    cpuinfo = tmp_path / "cpuinfo"
    machine.disable_undescribed_amx(cpuinfo)  # a machine without the file
    cpuinfo.write_text("flags\t\t: avx512f avx512_bf16\n")
    machine.disable_undescribed_amx(cpuinfo)
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ
    cpuinfo.write_text("flags\t\t: avx512f amx_bf16 amx_tile\n")
    machine.disable_undescribed_amx(cpuinfo)
    assert os.environ.get("ONEDNN_MAX_CPU_ISA") == (None if described else "AVX512_CORE_FP16")


def test_a_product_in_bf16_survives_on_this_machine() -> None:
    environ = {k: v for k, v in os.environ.items() if k != "ONEDNN_MAX_CPU_ISA"}
    code = (
        "from megatron import machine; machine.set_deepspeed_accelerator(); import torch;"
        "torch.nn.Linear(128, 256, dtype=torch.bfloat16)(torch.ones(64, 128).bfloat16())"
    )
    subprocess.run([sys.executable, "-c", code], env=environ, check=True)


_PAGE_FAULTS = """
import resource, sys
from megatron.machine import keep_freed_memory

if sys.argv[1:]:
    assert keep_freed_memory()
for _ in range(20):
    block = b"x" * (48 << 20)
    del block
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_memory_that_is_freed_costs_no_page_faults_again() -> None:
    command = [sys.executable, "-c", _PAGE_FAULTS]
    given_back, kept = (
        int(subprocess.run([*command, *words], check=True, capture_output=True).stdout)
        for words in ([], ["keep"])
    )
    assert kept < given_back / 5
