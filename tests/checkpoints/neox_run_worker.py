"""Run as a program on every rank: DeepSpeed trains and saves GPT-NeoX's parameters, and loads them.

The parameters, their groups and the schedule are those of a recorded run; the loss is a polynomial
of them that differs by rank and step. `expected.npz` holds what a new engine has after loading.
"""

from __future__ import annotations

import json
import shutil
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn

from megatron.backends.deepspeed_processes import join_group

STEPS = 3


class Parameters(nn.Module):
    """Parameters with dotted names."""

    def __init__(self, shapes: dict[str, torch.Size]) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(1)
        for name, shape in shapes.items():
            *path, last = name.split(".")
            place: nn.Module = self
            for part in path:
                if not hasattr(place, part):
                    place.add_module(part, nn.Module())
                place = getattr(place, part)
            weight = nn.Parameter(torch.randn(shape, generator=source))
            place.register_parameter(last, weight)

    def forward(self, seed: int) -> Tensor:
        source = torch.Generator().manual_seed(seed)
        aims = [torch.randn(p.shape, generator=source).to(p) for p in self.parameters()]
        pairs = zip(self.parameters(), aims, strict=True)
        return torch.stack([(p.float() - aim.float()).square().sum() for p, aim in pairs]).sum()


class Schedule:
    """Saved as GPT-NeoX's is."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def step(self) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def engine_of(recorded: dict[str, Any], layout: dict[str, Any]) -> Any:
    names = [list(group) for group in recorded["param_shapes"]]
    module = Parameters({n: s for group in recorded["param_shapes"] for n, s in group.items()})
    named = dict(module.named_parameters())
    groups = [
        {"params": [named[name] for name in group], "weight_decay": decay}
        for group, decay in zip(names, (0.1, 0.0), strict=True)
    ]
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, **layout}
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.AdamW(groups, lr=0.01),
        lr_scheduler=Schedule(dict(recorded["lr_scheduler"])),
        config=config,
        dist_init_required=False,
    )
    return engine


def run(folder: Path, source: Path, layout: dict[str, Any]) -> None:
    step = source / "global_step3"
    recorded = torch.load(step / "mp_rank_00_model_states.pt", weights_only=False)
    engine = engine_of(recorded, layout)
    for number in range(STEPS):
        engine.backward(engine(100 * number + dist.get_rank()))
        engine.step()
    engine.save_checkpoint(str(folder), tag="global_step3", client_state={"iteration": STEPS})
    dist.barrier()
    loaded = engine_of(recorded, layout)
    loaded.load_checkpoint(str(folder), tag="global_step3")
    loaded.optimizer._lazy_init_hp_params_optimizer_state()
    expected = {}
    for name, parameter in loaded.module.named_parameters():
        found = {"fp32": safe_get_full_fp32_param(parameter)}
        for key in ("exp_avg", "exp_avg_sq"):
            found[key] = safe_get_full_optimizer_state(parameter, key)
        expected |= {f"{name}|{key}": value.numpy().copy() for key, value in found.items()}
    if dist.get_rank() == 0:
        shutil.copytree(step / "configs", folder / "global_step3" / "configs")
        np.savez(folder / "expected.npz", **expected)
    dist.barrier()


def main() -> None:
    join_group("gloo", timedelta(minutes=2), on_cpu=True)
    for name, layout in json.loads(sys.argv[3]).items():
        run(Path(sys.argv[1]) / name, Path(sys.argv[2]), layout)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
