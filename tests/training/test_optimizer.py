"""The optimizers by name, against torch's plain AdamW, and who is decayed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.training.optimizer import build_optimizer, parameter_groups
from tests.processes import REPOSITORY
from tests.training.cases import layout, write_data
from tests.training.runs import losses, run, run_config

SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}
DECAY = 0.1
# DeepSpeed compiles its own at first use, which takes minutes.
BUILT = [pytest.param(name, marks=pytest.mark.slow) for name in ("fused_adam", "cpu_adam")]


def named_parameters(seed: int = 0) -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"weight": (7, 5), "bias": (7,), "r1": (4,), "2.attention.qk_layernorm.weight": (2, 3)}
    found = {k: nn.Parameter(torch.randn(s, generator=generator)) for k, s in shapes.items()}
    found["r1"].is_kernel_parameter = True  # type: ignore[attr-defined]
    return list(found.items())


def take_steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "cpu_torch_adam", *BUILT])
def test_every_adam_takes_the_steps_of_adamw(kind: str) -> None:
    ours, theirs = named_parameters(), named_parameters()
    mine = [parameter for _, parameter in ours]
    plain = [parameter for _, parameter in theirs]
    take_steps(build_optimizer(kind, parameter_groups(ours, DECAY), **SETTINGS), mine)
    reference = [
        {"params": plain[:1], "weight_decay": DECAY},
        {"params": plain[1:], "weight_decay": 0.0},
    ]
    take_steps(torch.optim.AdamW(reference, **SETTINGS, foreach=False), plain)
    for own, expected in zip(mine, plain, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)


def test_deepspeeds_adam_without_a_compiler_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deepspeed.ops import adam

    def no_compiler(self: object, *args: object, **options: object) -> None:
        raise RuntimeError("c++: command not found")

    monkeypatch.setattr(adam.DeepSpeedCPUAdam, "__init__", no_compiler)
    with pytest.raises(ValueError, match=r"cpu_adam.*c\+\+: command not found.*type: Adam"):
        build_optimizer("cpu_adam", parameter_groups(named_parameters(), 0.0), **SETTINGS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["fused_adam", "cpu_adam"])
def test_deepspeeds_adam_trains_resumes_and_changes_layout(tmp_path: Path, kind: str) -> None:
    settings = {"lr": 0.01, "betas": [0.9, 0.95]}
    plain = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    data, save, moved = write_data(tmp_path), tmp_path / "run", tmp_path / "moved"
    run(run_config(data, tmp_path / "torch", train_iters=6, **plain), tmp_path)
    config = run_config(
        data, save, train_iters=6, optimizer={"type": kind, "params": settings}, **plain
    )
    run({**config, "train_iters": 2}, tmp_path, timeout=900)  # builds it
    assert "resuming after step 2" in run({**config, "train_iters": 4}, tmp_path)
    tool = [sys.executable, "tools/reshard_checkpoint.py", str(save), str(moved)]
    subprocess.run(tool, cwd=REPOSITORY, check=True, timeout=300)
    ending = {**config, **layout(zero=1), "load": str(moved), "save": str(tmp_path / "end")}
    assert "resuming after step 4" in run(ending, tmp_path)
    found = losses(save) | losses(tmp_path / "end")
    assert found == pytest.approx(losses(tmp_path / "torch"), rel=1e-4)
