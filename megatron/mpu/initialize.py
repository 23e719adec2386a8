"""Initial weights that do not depend on the parallel layout.

Every parameter has a generator of its own, seeded from the run's seed and the parameter's name.
The full tensor is drawn and the rank's slice is kept, so one process, two tensor-parallel ranks or
four pipeline stages start from the same model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

InitMethod = Callable[[Tensor, torch.Generator], Tensor]


def seeded_generator(seed: int, *names: str | int) -> torch.Generator:
    """A CPU generator for one named draw."""
    key = "/".join([str(seed), *map(str, names)])
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator(device="cpu")
    generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return generator


def _normal(std: float) -> InitMethod:
    return lambda tensor, generator: tensor.normal_(0.0, std, generator=generator)


def _orthogonal(gain: float) -> InitMethod:
    return lambda tensor, generator: nn.init.orthogonal_(tensor, gain, generator=generator)


def init_method(name: str, *, std: float, num_layers: int, hidden_size: int) -> InitMethod:
    """GPT-NeoX's initialisation methods by name."""
    depth_scale = 1.0 / math.sqrt(2.0 * num_layers)
    methods: dict[str, InitMethod] = {
        "normal": _normal(std),
        "scaled_normal": _normal(std * depth_scale),
        "orthogonal": _orthogonal(1.0),
        "scaled_orthogonal": _orthogonal(depth_scale),
        "xavier_uniform": lambda t, g: nn.init.xavier_uniform_(t, generator=g),
        "xavier_normal": lambda t, g: nn.init.xavier_normal_(t, generator=g),
        "wang_init": _normal(2.0 / num_layers / math.sqrt(hidden_size)),
        "small_init": _normal(math.sqrt(2.0 / (5.0 * hidden_size))),
    }
    if name not in methods:
        raise ValueError(f"init_method {name!r} is unknown; choose one of {', '.join(methods)}")
    return methods[name]
