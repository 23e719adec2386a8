"""Methods whose scores depend on the text: each layer computes terms of its scores from its input.

    score(m, n) = (q_m . k_n) / sqrt(head_dim) + bias(d) + f_m . P[:, d] + decay,    d = m - n

and all of it times a factor of the query, where a method has one.

Inkling: f_m are R features of the query's token, P a learned table of R x E features of distance.
BAM: with its SSMax, a factor s log n for a query that sees n keys.
CABLE: decay is minus the sum of what each token after the key takes off.
FIRE: bias is a function of d and of the query's position m.
Torch only: every exported model contains this file.

Shapes: B batch, L length, h hidden size, H heads (of this rank), R features, E distances.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .position_base import (
    CONSTRAINTS,
    KERNEL_FACTS,
    PositionalEmbedding,
    PositionalEmbeddingError,
    PositionOptions,
    Positive,
    at_least_fp32,
    register,
)
from .positional_embeddings import Bam, Constant, KerpleLog

MOST_FEATURES = 64  # the attention function's limit


class RowBias(NamedTuple):
    """FIRE's bias: f(psi(d) / psi(max(m, L))) of distance d and position m, psi(x) = log(c x + 1).

    f is a network 1 -> 32 -> ReLU -> heads. All heads share the first four.
    """

    c: Tensor
    threshold: Tensor
    """L, a number: up to it the bias is a table over distance."""
    hidden_weight: Tensor
    hidden_bias: Tensor
    head_weight: Tensor
    """[H, 32]"""
    head_bias: Tensor
    """[H]"""

    def psi(self, x: Tensor) -> Tensor:
        return torch.log1p((self.c * x).abs())

    def of(self, distance: Tensor, position: Tensor) -> Tensor:
        """The bias at distances [.., K] of queries at positions that broadcast: [.., K, H]."""
        normalizer = self.psi(torch.maximum(position.to(self.c.dtype), self.threshold)) + 1e-6
        ratio = self.psi(distance.to(self.c.dtype)) / normalizer
        hidden = F.relu(ratio[..., None] * self.hidden_weight + self.hidden_bias)
        return F.linear(hidden, self.head_weight, self.head_bias)

    def table(self, length: int, position: int = 0) -> Tensor:
        """The bias over distance of a query at this position, [H, length]; 0: up to L."""
        device = self.c.device
        distance = torch.arange(length, device=device)
        return self.of(distance, torch.tensor(position, device=device)).T

    def dense(self, distance_QK: Tensor, positions_BQ: Tensor) -> Tensor:
        """The bias of every pair, [B, H, Q, K]; at distance 0 for keys in the future."""
        return self.of(distance_QK.clamp(min=0), positions_BQ[..., None]).movedim(-1, 1)

    def of_heads(
        self, shared: Callable[[Tensor], Tensor], own: Callable[[Tensor], Tensor]
    ) -> RowBias:
        """`shared` of what all heads share, `own` of each head's numbers."""
        return RowBias(*map(shared, self[:4]), *map(own, self[4:]))


class ScoreTerms(NamedTuple):
    """What a layer's input says about its scores."""

    query_features: Tensor | None = None
    """[B, H, L, R]"""
    distance_features: Tensor | None = None
    """[1, R, at most E], for all heads."""
    log_gates: Tensor | None = None
    """[B, H, L], at most 0: a score gets those of all tokens after its key."""
    row_scale: Tensor | None = None
    """[B or 1, H, L], above 0: all scores of a query, but a sink, times this."""
    row_bias: RowBias | None = None
    """A bias that depends on the distance and on the query's position."""


class LayerTerms(PositionalEmbedding):
    """Computes terms of the score from a layer's input; each layer has its own."""

    kind = "layer"
    weight: nn.Parameter

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.layer_terms = cls

    def __init__(self, options: PositionOptions) -> None:
        super().__init__(options)
        self.heads = options.local_heads.stop - options.local_heads.start

    def forward(self, x_BLh: Tensor, keys: int, n_BL: Tensor) -> ScoreTerms:
        """The terms of the queries at x, the last of so many keys; each sees n of them."""
        raise NotImplementedError

    def _add(self, name: str, *shape: int, split: int | None = None, **facts: Any) -> None:
        """A parameter with its facts, described at ParameterFacts in mpu/parallel_layers.py."""
        parameter = nn.Parameter(torch.empty(shape))
        parameter.facts = {"split": split, **facts}  # type: ignore[attr-defined]
        for flag in ("model_parallel", "tensor_model_parallel"):
            setattr(parameter, flag, split is not None and self.options.tp_size > 1)
        self.register_parameter(name, parameter)

    def _add_matrix(self, name: str, rows_per_head: int) -> None:
        """A projection of the layer's input, trained as its other matrices; split by heads."""
        self._add(name, self.heads * rows_per_head, self.options.hidden_size, split=0)

    def _draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Normal numbers for the whole model, which depend on the seed, the layer and the name."""
        values = torch.empty(shape, device="cpu")
        return values.normal_(
            0.0, self.options.init_method_std, generator=self.options.generator(name)
        )

    def _draw_matrix(self, name: str, rows_per_head: int) -> Tensor:
        everyone = self._draw(
            name, (self.options.num_heads * rows_per_head, self.options.hidden_size)
        )
        mine = self.options.local_heads
        return everyone[mine.start * rows_per_head : mine.stop * rows_per_head]

    def _start(self) -> None:
        """Set the parameters to their initial values, unless they are on device meta."""
        if next(self.parameters()).is_meta:
            return
        with torch.no_grad():
            for name, value in self.initial_values().items():
                self.get_parameter(name).copy_(value)


@register("inkling")
class Inkling(LayerTerms):
    """Inkling's bias (Thinking Machines 2026): features of the query times features of distance.

    f = W x has R numbers per head, from the layer's input. P is the layer's, for all of its heads,
    and 0 from distance E on; a layer with a window has no more distances than its window.
    """

    distance_features: nn.Parameter

    def __init__(self, options: PositionOptions) -> None:
        super().__init__(options)
        self.features, extent = options.inkling_features, options.inkling_distances
        if not 1 <= self.features <= MOST_FEATURES:
            raise PositionalEmbeddingError(
                f"inkling_features: {self.features} must be from 1 to {MOST_FEATURES}."
            )
        window = getattr(options.config, "attention_window", None)
        self.extent = extent if window is None else min(extent, window)
        self._add_matrix("weight", self.features)
        self._add("distance_features", self.features, self.extent, **KERNEL_FACTS)
        self._start()

    def initial_values(self) -> dict[str, Tensor]:
        return {
            "weight": self._draw_matrix("inkling.weight", self.features),
            "distance_features": self._draw(
                "inkling.distance_features", (self.features, self.extent)
            ),
        }

    def own_flops(self, length: int) -> float:
        """Of one token: the projection, and its product with the features of each distance."""
        reach = min(self.extent, length)
        distances = reach - reach**2 / (2 * length)
        heads = self.options.num_heads
        return 2.0 * heads * self.features * (self.options.hidden_size + distances)

    def to_draw(self, length: int) -> dict[str, Tensor]:
        return {"features of distance": self.distance_features}

    def forward(self, x_BLh: Tensor, keys: int, n_BL: Tensor) -> ScoreTerms:
        features = F.linear(x_BLh, self.weight.to(x_BLh.dtype))
        by_head = features.unflatten(-1, (self.heads, self.features)).transpose(1, 2)
        table = at_least_fp32(self.distance_features)[None, :, :keys]
        return ScoreTerms(by_head, table)


@register("kerple_inkling")
class KerpleInkling(KerpleLog):
    """Ours: Inkling's bias near (d < E), and the log kernel, shared by all layers, everywhere."""

    official: ClassVar = {}
    layer_terms = Inkling


@register("cable")
class Cable(LayerTerms):
    """CABLE (Veisi et al. 2025): each token subtracts softplus(w x + b) from all scores across it.

    The forget gate of the Forgetting Transformer with the signs of w and b turned, alone.
    """

    bias: nn.Parameter

    def __init__(self, options: PositionOptions) -> None:
        super().__init__(options)
        self._add_matrix("weight", 1)
        self._add("bias", self.heads, split=0)
        self._start()

    def initial_values(self) -> dict[str, Tensor]:
        return {
            "weight": self._draw_matrix("cable.weight", 1),
            "bias": torch.zeros(self.heads, device="cpu"),
        }

    def own_flops(self, length: int) -> float:
        return 2.0 * self.options.num_heads * self.options.hidden_size

    def to_draw(self, length: int) -> dict[str, Tensor]:
        taken = F.softplus(at_least_fp32(self.bias))[:, None]
        return {"bias, tokens with w x = 0": -taken * torch.arange(length, device=taken.device)}

    def forward(self, x_BLh: Tensor, keys: int, n_BL: Tensor) -> ScoreTerms:
        logits = F.linear(x_BLh, self.weight.to(x_BLh.dtype), self.bias.to(x_BLh.dtype))
        return ScoreTerms(log_gates=-F.softplus(at_least_fp32(logits)).transpose(1, 2))


@register("fire")
class Fire(LayerTerms):
    """FIRE (Li et al. 2023): a learned function of log distance over log position.

    Starts as in the authors' listing: c = 0.1, L = fire_threshold, torch's draws of linear layers.
    L is stored as its share of fire_threshold. Each layer has its own.
    """

    width = 32
    shared: ClassVar = ("distance_scale", "threshold", "hidden_weight", "hidden_bias")
    of_heads: ClassVar = ("head_weight", "head_bias")

    def __init__(self, options: PositionOptions) -> None:
        super().__init__(options)
        single, row = (1,), (self.width,)
        shapes = (single, single, row, row, (self.heads, self.width), (self.heads,))
        for name, shape in zip((*self.shared, *self.of_heads), shapes, strict=True):
            split = 0 if name in self.of_heads else None
            self._add(name, *shape, split=split, **KERNEL_FACTS)
        self._start()

    def initial_values(self) -> dict[str, Tensor]:
        heads, reach = self.options.num_heads, self.width**-0.5
        shapes = {
            "hidden_weight": ((self.width,), 1.0),
            "hidden_bias": ((self.width,), 1.0),
            "head_weight": ((heads, self.width), reach),
            "head_bias": ((heads,), reach),
        }
        values = {
            "distance_scale": torch.full((1,), 0.1, device="cpu"),
            "threshold": torch.ones(1, device="cpu"),
        }
        for name, (shape, most) in shapes.items():
            drawn = torch.empty(shape, device="cpu")
            drawn.uniform_(-most, most, generator=self.options.generator(f"fire.{name}"))
            values[name] = drawn[self.options.local_heads] if name in self.of_heads else drawn
        return values

    def own_flops(self, length: int) -> float:
        """Of a table, shared by the tokens of a sequence; rows beyond the threshold cost more."""
        return 2.0 * self.width * (1 + self.options.num_heads)

    def row_bias(self) -> RowBias:
        names = (*self.shared, *self.of_heads)
        numbers = RowBias(*(at_least_fp32(self.get_parameter(name)) for name in names))
        return numbers._replace(threshold=(numbers.threshold * self.options.fire_threshold).abs())

    def to_draw(self, length: int) -> dict[str, Tensor]:
        """Of a query up to L, and of one at eight times L."""
        rows = self.row_bias()
        return {
            "bias": rows.table(length),
            "bias at 8 L": rows.table(length, int(8 * rows.threshold)),
        }

    def forward(self, x_BLh: Tensor, keys: int, n_BL: Tensor) -> ScoreTerms:
        return ScoreTerms(row_bias=self.row_bias())


class ScaledRows(LayerTerms):
    """SSMax on whole scores: those of a query that sees n keys times s log n, s from 1 per head.

    With one key its factor does not matter, and is that of two.
    """

    bounds: ClassVar = Positive(Constant(1.0))
    row_scale: nn.Parameter

    def __init__(self, options: PositionOptions) -> None:
        super().__init__(options)
        self._add("row_scale", self.heads, split=0, fp32=True, decay=False)
        self._start()

    def initial_values(self) -> dict[str, Tensor]:
        return {"row_scale": torch.ones(self.heads, device="cpu")}

    def forward(self, x_BLh: Tensor, keys: int, n_BL: Tensor) -> ScoreTerms:
        scale = CONSTRAINTS["ste"].value(at_least_fp32(self.row_scale), self.bounds)
        log = n_BL.clamp(min=2).to(scale.dtype).log()
        return ScoreTerms(row_scale=scale[:, None] * log[:, None])


@register("bam_ssmax")
class BamSSMax(Bam):
    """BAM's prior with the authors' SSMax, which sharpens q.k and the prior alike."""

    layer_terms = ScaledRows
