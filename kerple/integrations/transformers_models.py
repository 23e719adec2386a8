"""KERPLE in a transformers model: a kernel over distance replaces its own positions.

    from kerple import use_kerple

    model = use_kerple(AutoModelForCausalLM.from_pretrained("a_llama"), "kerple_log")
    model.save_pretrained("folder")
    model = AutoModelForCausalLM.from_pretrained("folder")   # where use_kerple was imported

Rotations and position vectors are removed, every layer's attention gets the bias of one kernel, and
training, padding, packed documents, windows, the cache and `generate` work as before. The model's
class and its `model_type` change, so that transformers without KERPLE refuses the saved folder
instead of computing without positions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)

from megatron.engines.dispatch import attention
from megatron.errors import EngineError
from megatron.model.position_names import kernel
from megatron.neox_arguments.allowed_code import is_allowed, is_import_path

NAME = "kerple"
FIXED_CACHE = (
    "use_kerple: a cache of fixed size (cache_implementation='static') is not supported; use the "
    "default cache"
)
ARCHITECTURES = (
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


def use_kerple(model: Any, pos_emb: str = "kerple_log", **keys: Any) -> Any:
    """Put the kernel `pos_emb` in the place of the model's positions; returns the same model.

    `keys` are those of `kerple.kernel` (rpe_num_buckets, seed, ...). Trained weights
    expect the removed positions: continue training.
    """
    ours = _CLASSES.get(type(model))
    if ours is not None:
        model.config.__class__ = ours.config_class
        model.config.kerple = {"pos_emb": pos_emb, **keys}
        _put_kernel(model, _made_kernel(model.config))
        model.__class__ = ours
        return model
    if type(model) in _CLASSES.values():
        raise EngineError(f"use_kerple: this {type(model).__name__} has a kernel already")
    raise EngineError(
        f"use_kerple: {type(model).__name__} is not known; it takes {', '.join(ARCHITECTURES)}. "
        "For another model, call kerple.attention in an attention function of your own."
    )


class _KernelInPlace:
    """The base class put before transformers' own: it makes the kernel and computes attention."""

    _keep_in_fp32_modules_strict = ("kerple_kernel",)

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]  # transformers' class
        name = config.kerple["pos_emb"]
        if is_import_path(name) and not is_allowed(name):
            raise EngineError(
                f"config.json: {name!r:.80} names a class to import; if it is yours, call "
                f"kerple.kernel({name!r:.80}, heads=1) once before you load this folder"
            )
        _put_kernel(self, _made_kernel(config))

    def set_attn_implementation(self, attn_implementation: Any, *_: Any, **__: Any) -> None:
        if attn_implementation != NAME:
            raise EngineError(
                f"attn_implementation {attn_implementation!r}: this model's positions are in "
                "KERPLE's attention; another one would compute without them"
            )


def _made_kernel(config: Any) -> nn.Module:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return kernel(config.kerple.get("pos_emb"), heads=heads, head_dim=head_dim, **_options(config))


def _options(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.kerple.items() if key != "pos_emb"}


def _put_kernel(model: Any, made: nn.Module) -> None:
    """Remove the model's own positions and connect each attention layer to the kernel."""
    made.to(next(model.parameters()).device)
    model.kerple_kernel = made
    for parent in list(model.modules()):
        for name, part in list(parent.named_children()):
            if hasattr(part, "inv_freq"):
                setattr(parent, name, NoRotation(2 * part.inv_freq.shape[-1]))
            elif name == "wpe":
                setattr(parent, name, NoPositionVectors())
        if hasattr(parent, "is_causal"):  # an attention layer
            vars(parent)["kerple_kernel"] = made  # not a submodule: the model owns it
    model.config._attn_implementation = NAME


class NoRotation(nn.Module):
    """In the place of a rotary embedding: cosines of 1 and sines of 0."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor, position_ids: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        shape = (*position_ids.shape, self.dim)
        return x.new_ones(shape), x.new_zeros(shape)


class NoPositionVectors(nn.Module):
    """In the place of GPT-2's table of position vectors."""

    def forward(self, position_ids: Tensor) -> Tensor:
        return torch.zeros((), device=position_ids.device)


class Hidden(NamedTuple):
    """What a query must not see beside the future; it takes the place of transformers' mask."""

    key_bias: Tensor | None  # [B, 1, keys]: -inf at padding
    first_key: Tensor | None  # [B, queries]: where the query's document begins

    def contiguous(self) -> Hidden:
        """`generate` calls it for caches of fixed size only."""
        raise EngineError(FIXED_CACHE)


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Hidden:
    """transformers' mask function. The queries must be the last positions of the keys."""
    if not isinstance(q_offset, int) or q_offset + q_length != kv_offset + kv_length:
        raise EngineError(FIXED_CACHE)
    key_bias = None
    if attention_mask is not None:
        hidden = ~attention_mask[:, None, -kv_length:].bool()
        key_bias = torch.zeros(hidden.shape, device=hidden.device).masked_fill(hidden, -torch.inf)
    starts = (
        _document_starts(batch_size, q_length, mask_function, device) if q_offset == 0 else None
    )
    return Hidden(key_bias, starts)


def _document_starts(
    batch: int, length: int, mask_function: Any, device: torch.device | None
) -> Tensor | None:
    """The first key that each query may see; None where no document ends before the last token.

    Documents are packed one after another: one begins where the token before is not visible.
    """
    if mask_function is None or mask_function is transformers.masking_utils.causal_mask_function:
        return None
    index = torch.arange(length, device=device)
    rows = torch.arange(batch, device=device)[:, None]
    previous = (index - 1).clamp(min=0)
    begins = ~mask_function(rows, torch.zeros_like(rows), index[None], previous[None])
    begins = begins.expand(batch, length) & (index > 0)
    return torch.where(begins, index, 0).cummax(1).values


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Hidden | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: [B, H, L, D] in, [B, L, H, D] out."""
    if attention_mask is not None and not isinstance(attention_mask, Hidden):
        raise EngineError("use_kerple: a mask of [batch, 1, queries, keys] is not supported")
    tables = module.kerple_kernel(key.shape[2])
    hidden = attention_mask or Hidden(None, None)
    out = attention(
        *(query, key, value, tables.bias, tables.weight),
        **hidden._asdict(),
        window=sliding_window,
        scale=scaling,
        dropout=dropout,
    )
    return out.transpose(1, 2).contiguous(), None


def _class_with_kernel(name: str) -> tuple[type, Any]:
    """The class of transformers and ours, registered so that AutoModelForCausalLM finds it."""
    plain = getattr(transformers, name)
    config: Any = type(
        f"Kerple{plain.config_class.__name__}",
        (plain.config_class,),
        {"model_type": f"kerple_{plain.config_class.model_type}", "__module__": __name__},
    )
    ours = type(
        f"Kerple{name}",
        (_KernelInPlace, plain),
        {"config_class": config, "__module__": __name__},
    )
    globals().update({config.__name__: config, ours.__name__: ours})  # for pickle
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModelForCausalLM.register(config, ours, exist_ok=True)
    return plain, ours


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)
_CLASSES: dict[type, Any] = dict(_class_with_kernel(name) for name in ARCHITECTURES)
