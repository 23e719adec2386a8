"""What the attention engines are measured against, and how each is called.

A contender is a function without arguments that does all of the work: the table from the kernel's
parameters, the attention, and (for training) the gradients of q, k, v and the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kerple import attention, kernel
from megatron.model.position_base import TableEmbedding

Contender = Callable[[], Tensor]


class Inputs:
    """Random q, k, v of one size, [batch, heads, length, head_dim], and an output gradient."""

    def __init__(
        self,
        batch: int,
        heads: int,
        length: int,
        dim: int,
        *,
        train: bool,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        torch.manual_seed(0)
        shape = (batch, heads, length, dim)
        q, k, v = (torch.randn(shape).to(device, dtype) for _ in range(3))
        self.q, self.k, self.v = (x.requires_grad_(train) for x in (q, k, v))
        self.grad = torch.randn(shape).to(device, dtype) if train else None
        self.heads, self.length, self.dim = heads, length, dim

    def kernel(self, name: str) -> TableEmbedding:
        return kernel(name, heads=self.heads, head_dim=self.dim).to(self.q.device)

    def finish(self, out: Tensor, kernel: TableEmbedding | None = None) -> Tensor:
        """The backward pass, if this is training, and no trace of it for the next round."""
        if self.grad is not None:
            out.backward(self.grad)
            parameters = [] if kernel is None else list(kernel.parameters())
            for tensor in (self.q, self.k, self.v, *parameters):
                tensor.grad = None
        return out


def tiled(inputs: Inputs, name: str, *, pruning: bool = True, engine: str = "tiled") -> Contender:
    """Ours: the table of a positional embedding, then the engine."""
    kernel = inputs.kernel(name)

    def run() -> Tensor:
        with torch.set_grad_enabled(inputs.grad is not None):
            tables = kernel(inputs.length)
            out = attention(
                inputs.q,
                inputs.k,
                inputs.v,
                tables.bias,
                tables.weight,
                engine=engine,
                pruning=pruning,
            )
            return inputs.finish(out, kernel)

    return run


def with_terms(inputs: Inputs, term: str) -> Contender:
    """Ours with the log bias and one more term; "grouped" has a third of the key heads."""
    kernel = inputs.kernel("kerple_log")
    batch, heads, length, dim = inputs.q.shape
    train = inputs.grad is not None
    k, v = inputs.k, inputs.v
    terms: dict[str, Any] = {}
    if term == "key_bias":
        terms["key_bias"] = torch.rand(batch, heads, length).cumsum(-1).mul_(1e-3)
    elif term == "sink":
        terms["sink"] = torch.zeros(heads)
    elif term == "packed":  # eight documents
        eighth = length // 8
        first = torch.arange(length) // eighth * eighth
        terms["first_key"] = first.expand(batch, -1)
    elif term.startswith("features"):  # "features 16": so many, to a distance of 1,024
        terms |= inkling_features(inputs, int(term.split()[1]))
    elif term == "row_scale":
        terms["row_scale"] = 1 + torch.rand(1, 1, length)
    elif term == "grouped":
        k, v = (torch.randn(batch, heads // 3, length, dim) for _ in range(2))
    learned = [x.requires_grad_(train) for x in (k, v, *terms.values()) if x.is_floating_point()]

    def run() -> Tensor:
        with torch.set_grad_enabled(train):
            out = attention(inputs.q, k, v, kernel(length).bias, engine="tiled", **terms)
            inputs.finish(out, kernel)
            for tensor in learned:
                tensor.grad = None
            return out

    return run


FEATURES, EXTENT = 16, 1024  # Inkling's


def inkling_features(inputs: Inputs, count: int = FEATURES) -> dict[str, Tensor]:
    batch, heads, length, _ = inputs.q.shape
    return {
        "query_features": 0.3 * torch.randn(batch, heads, length, count),
        "distance_features": 0.3 * torch.randn(1, count, min(EXTENT, length)),
    }


def inkling_attention(inputs: Inputs, *, dense: bool) -> Contender:
    """Inkling's bias alone: transformers' own attention, which is dense, or ours."""
    from transformers.models.inkling import modeling_inkling as theirs

    features = inkling_features(inputs)
    factors: dict[str, Any] = {name: x.requires_grad_() for name, x in features.items()}
    query, table = factors["query_features"], factors["distance_features"]
    logits = theirs.InklingRelativeLogits(FEATURES, table.shape[-1])
    logits.proj = torch.nn.Parameter(table[0].detach())
    position = torch.arange(inputs.length)
    mask = torch.full((inputs.length, inputs.length), -math.inf).triu(1)
    layer = torch.nn.Module()
    layer.num_key_value_groups = 1  # type: ignore[assignment]
    scale = 1 / inputs.dim

    def run() -> Tensor:
        operands = (inputs.q, inputs.k, inputs.v)
        if dense:
            bias = logits(query.transpose(1, 2), position, position)
            out, _ = theirs.eager_attention_forward(
                layer, *operands, mask, scaling=scale, position_bias=bias
            )
            out = out.transpose(1, 2)
        else:
            out = attention(
                *operands,
                query_features=query,
                distance_features=table,
                scale=scale,
                engine="tiled",
            )
        inputs.finish(out)
        query.grad = table.grad = logits.proj.grad = None
        return out

    return run


def inkling_model(*, ours: bool) -> Any:
    """transformers' Inkling of six layers, one of them without a window, with its own attention
    or with ours; the same weights."""
    from transformers.models.inkling import InklingForCausalLM, InklingTextConfig

    from kerple.integrations.inkling import use_inkling_engine

    torch.manual_seed(0)
    heads, width, layers = 12, 64, 6
    config = InklingTextConfig(
        vocab_size=4096,
        hidden_size=heads * width,
        intermediate_size=4 * heads * width,
        num_hidden_layers=layers,
        mlp_layer_types=["dense"] * layers,
        layer_types=["hybrid_sliding"] * (layers - 1) + ["hybrid"],
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=width,
        swa_num_attention_heads=heads,
        swa_num_key_value_heads=heads,
        swa_head_dim=width,
        sliding_window_size=512,
        d_rel=FEATURES,
        rel_extent=EXTENT,
        logits_mup_width_multiplier=1.0,
        pad_token_id=0,
    )
    config._attn_implementation = "eager"
    model = InklingForCausalLM(config).train()
    return use_inkling_engine(model) if ours else model


def sdpa_causal(inputs: Inputs) -> Contender:
    """(c) torch's attention with no positional information: the line to reach."""

    def run() -> Tensor:
        with torch.set_grad_enabled(inputs.grad is not None):
            out = F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=True)
            return inputs.finish(out)

    return run


def _dense_log_bias(kernel: TableEmbedding, length: int) -> Tensor:
    """The log kernel on every pair of positions, [heads, length, length]."""
    values = kernel.kernel_values()
    position = torch.arange(length, dtype=torch.float32)
    distance = (position[:, None] - position[None, :]).abs()
    r1, r2 = values["r1"][:, None, None], values["r2"][:, None, None]
    return -r1 * torch.log1p(r2 * distance)


def dense_forward(inputs: Inputs) -> Contender:
    """(a) the dense path of the official code: scores, bias, mask and softmax as full matrices."""
    kernel = inputs.kernel("kerple_log")
    hidden = torch.ones(inputs.length, inputs.length, dtype=torch.bool).triu(1)

    def run() -> Tensor:
        scores = inputs.q @ inputs.k.transpose(-2, -1) / math.sqrt(inputs.dim)
        scores = scores + _dense_log_bias(kernel, inputs.length)
        probs = torch.softmax(scores.masked_fill(hidden, -10000.0), dim=-1)
        return inputs.finish(probs @ inputs.v, kernel)

    return run


def sdpa_dense_bias(inputs: Inputs) -> Contender:
    """(b) torch's attention with the learned bias as a dense mask."""
    kernel = inputs.kernel("kerple_log")
    hidden = torch.ones(inputs.length, inputs.length, dtype=torch.bool).triu(1)

    def run() -> Tensor:
        bias = _dense_log_bias(kernel, inputs.length).masked_fill(hidden, -math.inf)
        out = F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, attn_mask=bias[None])
        return inputs.finish(out, kernel)

    return run


def flex_forward(inputs: Inputs) -> Contender:
    """(d) FlexAttention, compiled; raises where torch.compile cannot work."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length, train = inputs.length, inputs.grad is not None
    table = inputs.kernel("kerple_log")(length).bias.detach().requires_grad_(train)

    def add_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + table[h, torch.clamp(i - j, min=0)]

    device = str(inputs.q.device)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)  # dynamic sizes fail to compile

    def run() -> Tensor:
        with torch.set_grad_enabled(train):
            out = compiled(inputs.q, inputs.k, inputs.v, score_mod=add_bias, block_mask=mask)
            table.grad = None
            return inputs.finish(out)

    run()
    return run
