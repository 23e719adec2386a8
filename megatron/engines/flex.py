"""The `flex` attention engine: torch's FlexAttention with our terms as score_mod and block_mask.

The fall-back on GPUs where the Triton engine has no kernels (ROCm, compute capability below 8.0,
XPU), and a baseline to compare speed and numbers with. On GPU it is compiled, needs O(length)
memory, and adds the gradients of tables with atomics: two runs may differ in the last bits. On CPU
it is dense, and torch computes no gradients.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megatron.engines.call import OPERANDS, Call, key_origin, sink_rows

# flex_attention is in torch since 2.5; its auxiliary outputs since 2.9
try:
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
except ImportError:  # pragma: no cover
    flex_attention = None  # type: ignore[assignment]

_KNOWN = ("q", "k", "v", "bias", "weight", "key_bias", "first_key", "sink", "seed")
_GPUS = ("cuda", "xpu")
_BLOCK = 128  # rows and columns of a block of the mask
_MIN_HEAD_DIM = 16


def why_not_flex(call: Call) -> str | None:
    """Why FlexAttention cannot run this call, with the fix; None if it can."""
    device, head_dim = call.q.device, call.q.shape[-1]
    unknown = [x for x in OPERANDS if x not in _KNOWN and getattr(call, x) is not None]
    if flex_attention is None:
        return f"torch {torch.__version__} has no FlexAttention; pip install 'torch>=2.9'"
    if unknown:
        return f"it has no {', '.join(unknown)}; use engine 'auto'"
    if call.dropout > 0.0:
        return f"it has no attention dropout (dropout={call.dropout}); use engine 'naive' or 'auto'"
    if device.type not in (*_GPUS, "cpu"):
        return f"it runs on GPU, the tensors are on {device}; use engine 'auto'"
    if device.type == "cpu":
        wants_gradients = torch.is_grad_enabled() and any(
            x.requires_grad for x in (call.q, call.k, call.v)
        )
        return _CPU_GRADIENTS if wants_gradients else None
    if call.q.dtype == torch.float64:
        return "it computes in fp32, the tensors are float64; use engine 'naive' or 'auto'"
    if head_dim < _MIN_HEAD_DIM:
        return f"head dim {head_dim} is below its {_MIN_HEAD_DIM}; use engine 'auto'"
    if torch.are_deterministic_algorithms_enabled():
        return "its gradients use atomics, and torch.use_deterministic_algorithms is on"
    return None


_CPU_GRADIENTS = "torch computes its gradients on GPU only; use engine 'auto' or 'tiled' on CPU"


def is_fall_back(device: torch.device) -> bool:
    """True for GPUs that the Triton engine has no kernels for."""
    if device.type != "cuda" or torch.version.hip is not None:
        return device.type in _GPUS
    return torch.cuda.get_device_capability(device) < (8, 0)


def flex_engine(call: Call) -> Tensor:
    """The engine's attention for a call that it can run (`why_not_flex`)."""
    run = flex_attention if call.q.device.type == "cpu" else _compiled()
    sink = sink_rows(call)
    out = run(
        *(call.q, call.k, call.v),
        score_mod=_score_of(call),
        block_mask=_block_mask(call),
        scale=call.scale,
        enable_gqa=call.heads_per_key_head > 1,
        return_aux=None if sink is None else AuxRequest(lse=True),
    )
    if sink is None:
        whole: Tensor = out
        return whole
    rows, aux = out
    # the keys' share of the softmax with the sink: e^lse / (e^lse + e^sink)
    share = torch.sigmoid(aux.lse.to(sink.dtype) - sink)[..., None]
    return (rows * share).to(rows.dtype)


@functools.cache
def _compiled() -> Any:
    """Uncompiled, FlexAttention stores all scores. Each new length is compiled again."""
    return torch.compile(flex_attention)


def _score_of(call: Call) -> Any:
    """(q.k) * scale, as FlexAttention has it, to our score; None where they are the same."""
    batch, heads, offset = call.q.shape[0], call.q.shape[1], call.offset
    bias, weight, key_bias, origin = call.bias, call.weight, call.key_bias, None
    if key_bias is not None:
        key_bias = key_bias.expand(batch, heads, -1).contiguous()
        origin = key_origin(key_bias, call.q_len)
    if bias is None and weight is None and key_bias is None:
        return None

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = torch.clamp(i + offset - j, min=0)
        if weight is not None:
            s = s * weight[h, distance]
        if bias is not None:
            s = s + bias[h, distance]
        if key_bias is not None and origin is not None:
            s = s + (key_bias[b, h, j] - origin[b, h, i])
        return s

    return score


def _block_mask(call: Call) -> BlockMask:
    """Causal, with offset, window and first keys; made of O((length / block)^2) numbers."""
    device, q_len, k_len, offset = call.q.device, call.q_len, call.k_len, call.offset
    own = torch.arange(offset, k_len, device=device)
    first = (own - call.reach + 1).clamp(min=0)[None]  # [1 or B, Lq]: the first key of each query
    if call.first_key is not None:
        first = torch.maximum(first, call.first_key)
    # first keys never fall: a block's first row has the earliest, its last row the latest
    top = torch.arange(0, q_len, _BLOCK, device=device)
    bottom = (top + _BLOCK - 1).clamp(max=q_len - 1)
    left = torch.arange(0, k_len, _BLOCK, device=device)
    right = left + _BLOCK - 1
    seen = (left <= own[bottom, None]) & (right >= first[:, top, None])
    whole = (right <= own[top, None]) & (left >= first[:, bottom, None])
    first = first.expand(call.q.shape[0], -1).contiguous()

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i + offset) & (j >= first[b, i])

    return BlockMask.from_kv_blocks(
        *_listed(seen & ~whole),
        *_listed(whole),
        BLOCK_SIZE=_BLOCK,
        mask_mod=mask,
        seq_lengths=(q_len, k_len),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[B, rows, columns] as counts and column numbers of the blocks, one head for all."""
    counts = blocks.sum(-1, dtype=torch.int32)
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return counts[:, None], order.to(torch.int32)[:, None]
