"""Tensor-parallel layers, whose initial weights do not depend on the split.

Every parameter has a generator of its own, seeded from the run's seed and the parameter's name.
The full tensor is drawn and the rank's slice is kept, so one process, two tensor-parallel ranks or
four pipeline stages start from the same model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.backends.interface import full_shape
from megatron.mpu.collectives import (
    SERIAL,
    TensorParallel,
    copy_to_group,
    reduce_from_group,
    scatter_to_group,
)

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
        "orthogonal": _orthogonal(math.sqrt(2.0)),  # the gain of the official KERPLE fork
        "scaled_orthogonal": _orthogonal(math.sqrt(2.0 / num_layers)),
        "xavier_uniform": lambda t, g: nn.init.xavier_uniform_(t, generator=g),
        "xavier_normal": lambda t, g: nn.init.xavier_normal_(t, generator=g),
        "wang_init": _normal(2.0 / num_layers / math.sqrt(hidden_size)),
        "small_init": _normal(math.sqrt(2.0 / (5.0 * hidden_size))),
    }
    return methods[name]


# The facts of a parameter.


@dataclass(frozen=True)
class ParameterFacts:
    """The facts of a parameter, declared once, where the parameter is made.

    Sharding, resharding, casts, optimizer groups and conversions read it (`parameter_facts`), from
    the model or, where there is none, from its layers on device meta (`model/outline.py`).
    """

    split: int | None = None
    """The dimension split over tensor-parallel ranks; None: each rank holds the whole."""
    parts: tuple[int, ...] = (1,)
    """Relative sizes of the parts stacked along that dimension, each of which is split."""
    fp32: bool = False
    """Kept in fp32 by exports and `load_pretrained`, whatever the precision of the others."""
    decay: bool | None = None
    """Whether weight_decay applies; None: to matrices, not to vectors."""
    rate: str = "model"
    """Learning-rate group: `kernel` has kerple_lr_scale and kerple_weight_decay."""
    vocabulary: bool = False
    """Whether rows are token ids; the last may be padding, which depends on the rank count."""
    after_sum: bool = False
    """A bias added once, after the sum over ranks. GPT-NeoX adds some on every rank instead."""
    neox: str | None = None
    """The name in a layer's file of GPT-NeoX or the official KERPLE code, where not ours."""

    def part_sizes(self, shape: Sequence[int]) -> list[int]:
        """The sizes of the stacked parts in a tensor of this shape; none if nothing is split."""
        if self.split is None:
            return []
        return [part * shape[self.split] // sum(self.parts) for part in self.parts]

    def is_linear(self, shape: Sequence[int]) -> bool:
        """Whether it is the matrix of a linear layer, and no embedding or head."""
        return len(shape) == 2 and self.split is not None and not self.vocabulary

    @property
    def is_split_vocabulary(self) -> bool:
        """Whether each tensor-parallel rank holds the rows of some token ids."""
        return self.vocabulary and self.split == 0

    def is_decayed(self, shape: Sequence[int]) -> bool:
        return len(shape) >= 2 if self.decay is None else self.decay


def parameter_facts(parameter: Tensor) -> ParameterFacts:
    """What was declared of a parameter; the defaults if nothing was."""
    return ParameterFacts(**getattr(parameter, "facts", {}))


def declare(parameter: nn.Parameter, **facts: Any) -> None:
    """Set the facts of a parameter that another library's module has made."""
    parameter.facts = vars(ParameterFacts(**facts))  # type: ignore[attr-defined]


# Linear layers and an embedding, split over the tensor-parallel ranks.


_after_initialisation: ContextVar[Callable[[nn.Parameter], None] | None] = ContextVar(
    "after_initialisation", default=None
)


@contextmanager
def after_initialisation(action: Callable[[nn.Parameter], None]) -> Iterator[None]:
    """Call `action` with each parameter made inside the block as soon as it is initialised.

    ZeRO 3 partitions it then: no process ever holds more than one whole parameter.
    """
    token = _after_initialisation.set(action)
    try:
        yield
    finally:
        _after_initialisation.reset(token)


def _parameter(data: Tensor, facts: ParameterFacts, tp: TensorParallel) -> nn.Parameter:
    """A parameter with its facts, marked for gradient norms: slices are summed over the ranks."""
    parameter = nn.Parameter(data)
    is_slice = facts.split is not None and tp.size > 1
    marks = {"facts": vars(facts), "model_parallel": is_slice, "tensor_model_parallel": is_slice}
    for name, value in marks.items():
        setattr(parameter, name, value)
    action = _after_initialisation.get()
    if action is not None:
        action(parameter)
    return parameter


def per_head_parameter(value: float, heads: int, tp: TensorParallel) -> nn.Parameter:
    """One number per head, those of this rank; all start at `value`."""
    share = tp.slice_of(heads, "num_attention_heads")
    values = torch.full((share.stop - share.start,), value)
    return _parameter(values, ParameterFacts(split=0, fp32=True), tp)


def _draw(rows: int, columns: int, init: InitMethod, generator: torch.Generator) -> Tensor:
    with torch.no_grad():
        whole = torch.empty(rows, columns, dtype=torch.float32)
        return whole if whole.is_meta else init(whole, generator)


class _SplitLinear(nn.Module):
    """This rank's slice of a linear layer's weight, and a bias that starts at 0.

    `facts` are the weight's. `neox` is what GPT-NeoX calls the layer, where that is not our name.
    """

    def __init__(
        self, weight: Tensor, *, bias: bool, tp: TensorParallel, facts: ParameterFacts, neox: str
    ) -> None:
        super().__init__()
        self.tp = tp
        names = {part: f"{neox}.{part}" if neox else None for part in ("weight", "bias")}
        self.weight = _parameter(weight, replace(facts, neox=names["weight"]), tp)
        self.bias: nn.Parameter | None = None
        if bias:
            by_row = facts.split == 1  # whole on every rank
            own = ParameterFacts(after_sum=True) if by_row else replace(facts, vocabulary=False)
            self.bias = _parameter(torch.zeros(len(weight)), replace(own, neox=names["bias"]), tp)

    def own_flops(self, length: int) -> float:
        """Multiplications and additions of one token's forward pass."""
        return 2.0 * full_shape(self.weight).numel()


class ColumnParallelLinear(_SplitLinear):
    """y = x A^T + b with the outputs split over the ranks.

    `input_is_shared`: `copy_to_group` was called on the input, for several layers at once.
    """

    input_is_shared = False

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.input_is_shared else copy_to_group(x, self.tp)
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(_SplitLinear):
    """y = x A^T + b with the inputs split over the ranks; the bias is added once, after the sum."""

    input_is_split = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.input_is_split:
            x = scatter_to_group(x, self.tp)
        if self.tp.size == 1:
            return F.linear(x, self.weight, self.bias)
        y = reduce_from_group(F.linear(x, self.weight), self.tp)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class Projections:
    """Makes the linear layers of one block: each weight is drawn whole, then sliced."""

    init: InitMethod
    output_init: InitMethod
    generators: Callable[[str], torch.Generator]
    bias: bool
    tp: TensorParallel

    def column(
        self,
        name: str,
        input_size: int,
        output_size: int,
        *,
        bias: bool | None = None,
        parts: Sequence[int] = (),
        input_is_shared: bool = False,
        vocabulary: bool = False,
        neox: str = "",
    ) -> ColumnParallelLinear:
        """`parts` are the sizes of parts stacked in the output (two for gated activations; queries,
        keys and values of grouped heads); each is split, so that every rank has a slice of all."""
        full = _draw(output_size, input_size, self.init, self.generators(name))
        pieces = full.split(list(parts) or [output_size])
        shares = [piece[self.tp.slice_of(len(piece), "output size")] for piece in pieces]
        rows = sum(len(share) for share in shares)
        # on meta, torch.cat would import a second's worth of torch
        weight = full.new_empty(rows, input_size) if full.is_meta else torch.cat(shares)
        unit = math.gcd(*(len(piece) for piece in pieces))
        facts = ParameterFacts(
            split=0, parts=tuple(len(p) // unit for p in pieces), vocabulary=vocabulary
        )
        bias = self.bias if bias is None else bias
        linear = ColumnParallelLinear(weight, bias=bias, tp=self.tp, facts=facts, neox=neox)
        linear.input_is_shared = input_is_shared
        return linear

    def row(
        self,
        name: str,
        input_size: int,
        output_size: int,
        *,
        input_is_split: bool = True,
        vocabulary: bool = False,
        neox: str = "",
    ) -> RowParallelLinear:
        full = _draw(output_size, input_size, self.output_init, self.generators(name))
        weight = full[:, self.tp.slice_of(input_size, "input size")].clone()
        facts = ParameterFacts(split=1, vocabulary=vocabulary)
        linear = RowParallelLinear(weight, bias=self.bias, tp=self.tp, facts=facts, neox=neox)
        linear.input_is_split = input_is_split
        return linear


class VocabParallelEmbedding(nn.Module):
    """Token embeddings, each rank holding a range of the vocabulary."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_size: int,
        *,
        init: InitMethod,
        generator: torch.Generator,
        tp: TensorParallel = SERIAL,
    ) -> None:
        super().__init__()
        self.tp = tp
        share = tp.slice_of(num_embeddings, "padded vocabulary size")
        self.first_id, self.last_id = share.start, share.stop
        full = _draw(num_embeddings, embedding_size, init, generator)
        self.weight = _parameter(full[share].clone(), ParameterFacts(split=0, vocabulary=True), tp)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight)
        elsewhere = (tokens < self.first_id) | (tokens >= self.last_id)
        local = (tokens - self.first_id).masked_fill(elsewhere, 0)
        embedded = F.embedding(local, self.weight).masked_fill(elsewhere[..., None], 0.0)
        return reduce_from_group(embedded, self.tp)
