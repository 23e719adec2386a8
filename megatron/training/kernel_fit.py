"""kerple_init: fit. A kernel starts as the mean that rotary adds to a trained model's scores.

With rotary, a query scores a key at distance d by q.R(d)k / sqrt(D); without it the same two score
q.k / sqrt(D). The mean of the difference over a text, by head and distance, is what the model loses
with its rotation. A bias is fitted to it by least squares over all pairs of tokens, up to a
constant, which the softmax cancels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.backends.interface import gathered
from megatron.checkpoints import Checkpoint, place_weights
from megatron.checkpoints.sharding import canonical_names
from megatron.errors import CheckpointError, KerpleError, PositionalEmbeddingError
from megatron.model import GPTModel, ModelSpec
from megatron.model.outline import layer_ranges, outline_of
from megatron.model.position_base import Bounded, DistanceKernel, PositionOptions
from megatron.model.position_names import positional_embedding_class
from megatron.mpu.job import current_device
from megatron.neox_arguments.run_keys import DataArgs
from megatron.training.batches import first_tokens

SAMPLE_TOKENS = 8192
_LARGEST = 100.0  # of a parameter without an upper bound
_ROUNDS, _POINTS = 12, 25


class Fit(NamedTuple):
    """Values per head of each parameter, and root mean squares (RMS) over pairs of tokens."""

    values: dict[str, Tensor]
    error: Tensor
    """RMS of the residual, per head."""
    size: Tensor
    """RMS of the target around its mean, per head."""


def fit_to_rotary(module: nn.Module, spec: ModelSpec, trained: Checkpoint, data: DataArgs) -> None:
    """Set the kernels of a module, whatever its layout; rank 0 fits them to the whole model."""
    tokens = first_tokens(data, spec, max(1, SAMPLE_TOKENS // spec.seq_length))
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            fits = _fits(spec, trained, tokens)
            answer = [{prefix: fit.values for prefix, fit in fits.items()}]
            print(_report(spec, fits, tokens.numel()), flush=True)
        except KerpleError as error:
            answer = [str(error)]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], str):
        raise CheckpointError(answer[0])
    names = canonical_names(module)
    for kernel in (part for part in module.modules() if isinstance(part, DistanceKernel)):
        first = next(kernel.parameters())
        values = answer[0][names[first].rpartition(".")[0] + "."]
        own = {name: value[kernel.options.local_heads] for name, value in values.items()}
        with gathered(kernel.parameters(), write=True):
            kernel.set_kernel_values_(own)


def _fits(spec: ModelSpec, checkpoint: Checkpoint, tokens: Tensor) -> dict[str, Fit]:
    """By how the names of a kernel's parameters begin."""
    model = GPTModel(checkpoint.spec)
    place_weights(model, checkpoint, checkpoint.spec)
    added = rotary_scores(model.to(current_device()).eval(), tokens)
    del model
    fits = {}
    for prefix, own, layers in outline_of(spec).kernels():
        kind = positional_embedding_class(own.pos_emb)
        if not issubclass(kind, DistanceKernel) or kind.scale is None:
            raise PositionalEmbeddingError(
                f"kerple_init: fit with pos_emb {own.pos_emb}, whose tables are not proportional "
                "to one parameter; use kerple_log, kerple_power or kerple_log3."
            )
        if lacking := [layer for layer in layers if layer not in added]:
            raise CheckpointError(
                f"{checkpoint.files.directory}: kerple_init = fit, and {layer_ranges(lacking)} "
                "(from 1) of the checkpoint has no rotary to fit a kernel to. Use kerple_init flat "
                "or official."
            )
        target = torch.stack([added[layer] / own.table_factor(layer) for layer in layers])
        fits[prefix] = fit_kernel(kind(PositionOptions(own)), target.mean(0))
    return fits


def _report(spec: ModelSpec, fits: dict[str, Fit], tokens: int) -> str:
    """The errors over all heads: their mean and the worst one."""
    errors = torch.stack([fit.error for fit in fits.values()])
    size = torch.stack([fit.size for fit in fits.values()]).mean()
    worst = int(errors.argmax())
    place, head = divmod(worst, errors.shape[1])
    layers = layer_ranges(outline_of(spec).kernels()[place][2])
    return (
        f"kernel fitted to rotary on {tokens:,} tokens: error {errors.mean():.3f} of {size:.3f} "
        f"(RMS in nats, mean over heads), worst {errors.max():.3f} (head {head + 1} of {layers}, "
        "both from 1)"
    )


# What rotary adds.


@torch.no_grad()
def rotary_scores(model: GPTModel, tokens_BL: Tensor) -> dict[int, Tensor]:
    """Layer -> the mean over a text of what rotary adds to scores, [heads, distances] in fp64."""
    sums: dict[int, Tensor] = {}

    def record(layer: int, _module: nn.Module, inputs: Any, outputs: Any) -> None:
        added = _sums_by_distance(*outputs) - _sums_by_distance(*inputs[:2])
        sums[layer] = sums.get(layer, 0) + added.sum(0)

    handles = [
        layer.attention.rotary.register_forward_hook(partial(record, number))
        for number, layer in enumerate(model.layers)
        if layer.attention.rotary is not None
    ]
    for row in tokens_BL:
        model.hidden_states(row[None].to(model.device))
    for handle in handles:
        handle.remove()
    length = tokens_BL.shape[1]
    pairs = len(tokens_BL) * torch.arange(length, 0, -1, dtype=torch.float64)
    scale = math.sqrt(model.spec.head_dim)
    return {layer: total.cpu() / (pairs * scale) for layer, total in sums.items()}


def _sums_by_distance(q_BHLD: Tensor, k_BHLD: Tensor) -> Tensor:
    """The sum of q_m . k_(m - d) over m, [B, H, L]: a correlation, by Fourier transforms."""
    k_BHLD = k_BHLD.repeat_interleave(q_BHLD.shape[1] // k_BHLD.shape[1], dim=1)
    length = q_BHLD.shape[2]
    q, k = (torch.fft.rfft(x.double(), 2 * length, dim=2) for x in (q_BHLD, k_BHLD))
    return torch.fft.irfft((q * k.conj()).sum(-1), 2 * length)[..., :length]


# The fit.


def fit_kernel(kernel: DistanceKernel, target_HL: Tensor) -> Fit:
    """The values with which a kernel's bias is nearest to a target, up to a constant per head.

    The bias is proportional to `scale`, which has a solution for given others; those are searched
    on a grid that narrows round by round.
    """
    assert kernel.scale is not None
    length = target_HL.shape[1]
    share_L = torch.arange(length, 0, -1, dtype=torch.float64)  # of pairs at each distance
    share_L /= share_L.sum()
    target_HL = _centred(target_HL.double(), share_L)
    unit = {kernel.scale: torch.ones(len(target_HL))}
    best = torch.full((len(target_HL),), math.inf, dtype=torch.float64)
    values: dict[str, Tensor] = {name: torch.zeros_like(best) for name in kernel.learnable}
    for others in _candidates(kernel, values):
        kernel.set_kernel_values_(unit | others)
        bias = _centred(kernel(length).bias.detach().double(), share_L)
        ratio = (bias * target_HL * share_L).sum(1) / (bias**2 * share_L).sum(1)
        scale = kernel.learnable[kernel.scale].clamp(ratio)
        error = ((target_HL - scale[:, None] * bias) ** 2 * share_L).sum(1)
        better = error < best
        best = torch.where(better, error, best)
        for name, value in (others | {kernel.scale: scale}).items():
            values[name] = torch.where(better, value.double(), values[name])
    size = (target_HL**2 * share_L).sum(1)
    return Fit(values, best.sqrt(), size.sqrt())


def _centred(x_HL: Tensor, share_L: Tensor) -> Tensor:
    return x_HL - (x_HL * share_L).sum(1, keepdim=True)


def _candidates(kernel: DistanceKernel, best: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Values of all parameters but the scale: a grid, then finer ones around the best so far."""
    others = {name: spec for name, spec in kernel.learnable.items() if name != kernel.scale}
    points = _POINTS if len(others) < 2 else 9
    width = 1.0
    for number in range(_ROUNDS if others else 1):
        grids = []
        for name, spec in others.items():
            middle = _place(best[name], spec) if number else torch.full_like(best[name], 0.5)
            low = (middle - width / 2).clamp(0, 1 - width)
            grids.append([_value(low + width * i / (points - 1), spec) for i in range(points)])
        yield from (dict(zip(others, chosen, strict=True)) for chosen in product(*grids))
        width *= 4 / (points - 1)


def _value(place: Tensor, spec: Bounded) -> Tensor:
    """A value from its place between the bounds, 0 to 1; a logarithmic one without an upper."""
    if math.isinf(spec.maximum):
        return spec.minimum * (_LARGEST / spec.minimum) ** place
    return spec.minimum + (spec.maximum - spec.minimum) * place


def _place(value: Tensor, spec: Bounded) -> Tensor:
    if math.isinf(spec.maximum):
        return (value / spec.minimum).log() / math.log(_LARGEST / spec.minimum)
    return (value - spec.minimum) / (spec.maximum - spec.minimum)
