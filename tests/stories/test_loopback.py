"""On one machine, no socket of a job can be reached from another."""

from __future__ import annotations

from pathlib import Path

from tests.processes import run_ranks

PROGRAM = """
import sys, os
from pathlib import Path
import torch
import torch.distributed as dist
from megatron.mpu.job import join_job
from megatron.neox_arguments import NeoXArgs

join_job(NeoXArgs.from_dict({"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1,
                             "train_micro_batch_size_per_gpu": 1}))
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size()

def listening(table):
    own = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
           if os.path.islink(f"/proc/self/fd/{fd}")}
    for line in Path(table).read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in own:
            yield words[1].split(":")[0]

found = [*listening("/proc/net/tcp"), *listening("/proc/net/tcp6")]
loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
print("elsewhere:", sorted(set(found) - loopback), flush=True)
dist.barrier()
"""


def test_one_and_two_processes_listen_on_loopback_alone(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    for processes in (1, 2):
        for output in run_ranks([str(program)], processes):
            assert "elsewhere: []" in output, output
