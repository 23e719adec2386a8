"""Check this machine's GPU in about ten minutes: one JSON file and one line, PASS or FAIL.

Every part runs on a CPU too (--device cpu), which is how the script itself is tested.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PARTS = ("environment", "engine_choice", "numbers", "speed", "tiles", "training")
SBATCH = """#!/usr/bin/env bash
#SBATCH --job-name=gpu-check
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=00:20:00
# Two nodes of eight: `sbatch gpu_check.sbatch`, then look for "step 20" in its output.
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-4}" \\
  python train.py configs/small_bf16.yml configs/slurm_local.yml \\
  --set train_iters=20 train_batch_size=32 train_micro_batch_size_per_gpu=2 log_interval=1 \\
  save=null load=null
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 for PASS, 1 for FAIL."""
    parser = argparse.ArgumentParser(prog="gpu_check.py", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda (default), cuda:1, cpu")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="small sizes, as the tests use")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="the result file")
    parser.add_argument("--sbatch", type=Path, help="also write a two-node job script here")
    parser.add_argument(
        "--write-engines", action="store_true", help="write the table of docs/attention_engines.md"
    )
    options = parser.parse_args(argv)
    if options.write_engines:
        from tools.gpu_checks import engine_choice

        engine_choice.PAGE.write_text(engine_choice.page())
        return 0
    if options.sbatch:
        options.sbatch.write_text(SBATCH)
    from megatron.atomic_files import check_writable

    check_writable(options.json, "--json")
    return _check(options)


def _check(options: argparse.Namespace) -> int:
    import importlib

    from megatron.atomic_files import write_text
    from tools.gpu_checks.findings import Settings, summary

    device = _device(options.device)
    findings = []
    with tempfile.TemporaryDirectory() as scratch:
        settings = Settings(device, Path(scratch), options.quick)
        for name in options.parts:
            module = importlib.import_module(f"tools.gpu_checks.{name}")
            for finding in module.check(settings):
                print(finding, file=sys.stderr, flush=True)
                findings.append(finding)
    content = summary(settings, findings)
    write_text(options.json, json.dumps(content, indent=2) + "\n")
    failed = sum(finding.status == "fail" for finding in findings)
    print(f"{content['verdict']}: {len(findings)} findings, {failed} failed; see {options.json}")
    return 1 if failed else 0


def _device(name: str) -> torch.device:
    import torch

    from megatron.errors import EngineError

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise EngineError(f"--device {name}: torch has no such device; use cuda or cpu") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EngineError(
            "gpu_check.py: no GPU is visible to torch. Check nvidia-smi, CUDA_VISIBLE_DEVICES and "
            "that torch is not a CPU build; --device cpu tries the script itself."
        )
    return device


if __name__ == "__main__":
    from _start import start_main

    start_main(main)
