"""KERPLE-NeoX decoder for Hugging Face transformers.

An export holds this file, those beside it and the formulas of `megatron/model/`, all in one folder:
they need torch and transformers, nothing else.

Shape suffixes: B batch, H heads, Q queries, K keys, D head dimension.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from megatron.model.content_positions import Fire, LayerTerms, ScoreTerms
from megatron.model.layer_formulas import (
    GATED,
    PER_HEAD,
    RMSNorm,
    ScaleNorm,
    activation_named,
    build_norm,
    gate_sums,
    kernel_groups,
    log_gates,
    norm_sizes,
    normed_heads,
    pattern_places,
    per_head_starts,
    sharpened,
    temperatures,
)
from megatron.model.position_base import POSITIONAL_EMBEDDINGS, PositionOptions
from megatron.model.positional_embeddings import TableEmbedding
from megatron.model.rotary_and_input_positions import (
    RotaryEmbedding,
    XPos,
    cos_and_sin,
    rotate,
    sinusoids,
)

from .configuration_kerple import KerpleNeoXConfig
from .keys_kerple import POSITION_OPTIONS
from .scores_kerple import (
    Scores,
    absolute_positions,
    allowed_keys,
    append_gates_to_keys,
    attend,
    attend_in_blocks,
    cache_capacity,
    content_bias,
    fits_at_once,
    scaled_rows,
    split_gates_from_keys,
)


def make_norm(config: KerpleNeoXConfig, shape: tuple[int, ...] | None = None) -> nn.Module:
    size = config.hidden_size if shape is None else shape
    return build_norm(config.norm, size, config.norm_eps, config.norm_bias)


def layer_configs(config: KerpleNeoXConfig) -> list[KerpleNeoXConfig]:
    """The config as each layer has it: with the keys of its entry in layer_pattern."""
    if config.layer_pattern is None:
        return [config] * config.num_hidden_layers
    configs = []
    for entry in config.layer_pattern:
        own = copy(config)
        for key, value in entry.items():
            if key == "sliding_window_width":  # without the query itself
                own.attention_window = None if value is None else value + 1
            elif key != "count":
                setattr(own, key, value)
        configs.append(own)
    return [configs[i] for i in pattern_places(config.layer_pattern, config.num_hidden_layers)]


def has_tables(config: KerpleNeoXConfig) -> bool:
    return issubclass(POSITIONAL_EMBEDDINGS[config.pos_emb], TableEmbedding)


def make_tables(config: KerpleNeoXConfig, layer: int | None) -> TableEmbedding:
    tables = POSITIONAL_EMBEDDINGS[config.pos_emb](PositionOptions(config, layer=layer))
    assert isinstance(tables, TableEmbedding)
    return tables


def make_rotary(config: KerpleNeoXConfig) -> RotaryEmbedding | None:
    """The method itself, or rotary beside another one."""
    turns = {"rotary": RotaryEmbedding, "xpos": XPos}
    if config.pos_emb in turns:
        return turns[config.pos_emb](PositionOptions(config))
    share = config.rotary_angles
    return RotaryEmbedding(PositionOptions(config), share) if share else None


def make_terms(config: KerpleNeoXConfig, layer: int) -> LayerTerms | None:
    """What a layer computes from its input about its scores; None for most methods."""
    terms = POSITIONAL_EMBEDDINGS[config.pos_emb].layer_terms
    return None if terms is None else terms(PositionOptions(config, layer=layer))


class Attention(nn.Module):
    sinks: nn.Parameter | None
    softmax_scale: nn.Parameter | None

    def __init__(
        self, config: KerpleNeoXConfig, layer_idx: int, layer_config: KerpleNeoXConfig
    ) -> None:
        super().__init__()
        self.config, self.layer_idx, self.layer_config = config, layer_idx, layer_config
        size, bias = config.hidden_size, config.attention_bias
        heads = config.num_attention_heads
        self.groups = heads // (config.num_key_value_heads or heads)
        width = heads * config.head_dim
        self.query_key_value = nn.Linear(
            size, width + 2 * width // self.groups, bias=bias or config.add_qkv_bias
        )
        self.dense = nn.Linear(width, size, bias=bias)
        sizes = norm_sizes(config)
        self.q_norm = None if sizes is None else RMSNorm(sizes[0], config.norm_eps)
        self.k_norm = None if sizes is None else RMSNorm(sizes[1], config.norm_eps)
        self.qk_layernorm: nn.Module | None = None
        if config.use_qk_layernorm:
            self.qk_layernorm = make_norm(config, (heads, config.head_dim))
        self.forget_gate = nn.Linear(size, heads) if layer_config.forget_gate else None
        self.terms = make_terms(layer_config, layer_idx)
        for name, start in per_head_starts(layer_config).items():
            number = None if start is None else nn.Parameter(torch.full((heads,), start))
            self.register_parameter(name, number)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [B, H, Q, D]; the last two may have fewer heads."""
        head_dim, qkv = self.config.head_dim, self.query_key_value(x)
        if self.groups == 1:
            q, k, v = qkv.unflatten(-1, (-1, 3 * head_dim)).chunk(3, dim=-1)
        else:
            size = qkv.shape[-1] // (self.groups + 2)
            parts = qkv.split([self.groups * size, size, size], dim=-1)
            q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in parts)
        if self.qk_layernorm is not None:
            if self.groups > 1:  # the norm has a weight for each query head
                k, v = (part.repeat_interleave(self.groups, dim=2) for part in (k, v))
            q, k = self.qk_layernorm(q), self.qk_layernorm(k)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = normed_heads(self.q_norm, q), normed_heads(self.k_norm, k)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def cached(
        self, k: Tensor, v: Tensor, gates: Tensor | None, cache: Any, q_index: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and gates of all tokens so far."""
        where = {"cache_position": q_index}  # for transformers 5.0; later ones count
        if gates is None:
            return (*cache.update(k, v, self.layer_idx, where), None)
        both, v = cache.update(append_gates_to_keys(k, gates), v, self.layer_idx, where)
        k, all_gates = split_gates_from_keys(both, self.config.head_dim)
        return k, v, all_gates.index_copy(2, q_index, gates)  # the newest carry gradients

    def forward(
        self, x: Tensor, bias: Tensor | None, weight: Tensor | None, cos: Tensor | None,
        sin: Tensor | None, scores: Scores, past_key_values: Any, output_attentions: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        q, k, v = self.heads(x)
        if cos is not None and sin is not None:
            q, k = rotate(q, cos[0], sin[0]), rotate(k, cos[1], sin[1])
        if self.softmax_scale is not None:
            q = sharpened(q, self.softmax_scale, scores.keys_seen())
        terms = ScoreTerms()
        if self.terms is not None:
            terms = self.terms(x, scores.keys, scores.keys_seen())
        gates, row_scale = terms.log_gates, terms.row_scale
        if self.layer_config.attention_temperature is not None:
            temperature = temperatures(
                scores.positions + 1, **self.layer_config.attention_temperature
            )
            row_scale = temperature if row_scale is None else temperature * row_scale
        if row_scale is not None:
            q = (q * row_scale[..., None]).to(q.dtype)
        if self.forget_gate is not None:
            forgotten = log_gates(self.forget_gate(x))
            gates = forgotten if gates is None else gates + forgotten
        if past_key_values is not None:
            k, v, gates = self.cached(k, v, gates, past_key_values, scores.q_index)
        sums = None if gates is None else gate_sums(gates)
        if k.shape[1] < q.shape[1]:
            k, v = (part.repeat_interleave(self.groups, dim=1) for part in (k, v))
        eager = output_attentions or self.config._attn_implementation == "eager"
        dropout = self.config.attention_dropout if self.training else 0.0
        run = partial(attend, dropout=dropout, eager=eager, sinks=self.sinks)
        added = partial(content_bias, scores, sums, *terms[:2], terms.row_bias)
        if bias is not None:
            more = added()
            bias = scaled_rows(bias if more is None else bias + more, row_scale, 0, None)
            out, probabilities = run(q, k, v, bias, weight)
        else:
            out, probabilities = attend_in_blocks(
                run, q, k, v, scores, added, row_scale, output_attentions
            )
        return self.dense(out.transpose(1, 2).flatten(2)), probabilities


class MLP(nn.Module):
    def __init__(self, config: KerpleNeoXConfig) -> None:
        super().__init__()
        self.activation = activation_named(config.hidden_act)
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        parts = 2 if config.hidden_act in GATED else 1
        self.dense_h_to_4h = nn.Linear(size, parts * inner, bias=bias)
        self.dense_4h_to_h = nn.Linear(inner, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(self.activation(self.dense_h_to_4h(x)))


class Layer(GradientCheckpointingLayer):
    def __init__(
        self, config: KerpleNeoXConfig, layer_idx: int, layer_config: KerpleNeoXConfig
    ) -> None:
        super().__init__()
        of_output = config.norm_placement == "output"
        self.input_layernorm = None if of_output else make_norm(config)
        self.post_feedforward_layernorm = make_norm(config) if of_output else None
        self.attention = Attention(config, layer_idx, layer_config)
        shared = config.use_parallel_residual and config.share_parallel_norm
        self.post_attention_layernorm = None if shared else make_norm(config)
        self.mlp = MLP(config)
        per_layer = config.kerple_share == "per_layer" and has_tables(layer_config)
        self.positions = make_tables(layer_config, layer_idx) if per_layer else None
        self.parallel, self.dropout = config.use_parallel_residual, config.hidden_dropout
        scaled = config.apply_query_key_layer_scaling  # layer l's bias is l times the table
        self.table_factor = max(1, layer_idx) if scaled else 1

    def forward(
        self, x: Tensor, bias: Tensor | None, weight: Tensor | None, cos: Tensor | None,
        sin: Tensor | None, scores: Scores, past_key_values: Any, output_attentions: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        if self.positions is not None or self.table_factor > 1:
            own = scores.tables if self.positions is None else self.positions(scores.keys)
            scaled = None if own[0] is None else self.table_factor * own[0]
            scores = scores.replaced(tables=(scaled, own[1]))
            bias, weight = scores.dense() if fits_at_once(x, scores) else (None, None)
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        attended, probabilities = self.attention(
            normed, bias, weight, cos, sin, scores, past_key_values, output_attentions
        )
        norm, last = self.post_attention_layernorm, self.post_feedforward_layernorm
        if norm is not None and last is not None:  # norms of outputs
            x = x + F.dropout(norm(attended), self.dropout, self.training)
            return x + F.dropout(last(self.mlp(x)), self.dropout, self.training), probabilities
        attended = F.dropout(attended, self.dropout, self.training)
        if not self.parallel:
            x = x + attended
        out = self.mlp(normed if norm is None else norm(x))
        out = x + F.dropout(out, self.dropout, self.training)
        return (out + attended if self.parallel else out), probabilities


class KerpleNeoXPreTrainedModel(PreTrainedModel):
    config_class = KerpleNeoXConfig
    base_model_prefix = "gpt_neox"
    supports_gradient_checkpointing = True
    _input_embed_layer = "embed_in"
    _no_split_modules = ["Layer"]  # noqa: RUF012 - transformers wants lists here
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = [  # noqa: RUF012
        *("positions", "distance_features", "row_scale", *Fire.shared, *Fire.of_heads, *PER_HEAD)
    ]
    _supports_sdpa = True

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # matrices, embeddings and torch's norms
        if isinstance(module, RMSNorm):
            nn.init.ones_(module.scale)
        elif isinstance(module, ScaleNorm):
            nn.init.ones_(module.g)
        elif isinstance(module, TableEmbedding | LayerTerms):
            _start(module, module.initial_values())
        elif isinstance(module, Attention):
            starts = per_head_starts(module.layer_config).items()
            _start(module, {name: torch.tensor(v) for name, v in starts if v is not None})


def _start(module: nn.Module, values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        parameter = module.get_parameter(name)
        if not getattr(parameter, "_is_hf_initialized", False):
            parameter.data.copy_(value)


class KerpleNeoXModel(KerpleNeoXPreTrainedModel):
    """The decoder without its head."""

    def __init__(self, config: KerpleNeoXConfig) -> None:
        super().__init__(config)
        self.embed_in = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.pos_emb == "learned"
        self.embed_positions: nn.Embedding | None = (
            nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        )
        own = self._own = layer_configs(config)
        shared = config.kerple_share == "all"
        with_tables = {i: c for i, c in enumerate(own) if shared and has_tables(c)}
        self._kernels = kernel_groups(with_tables, POSITION_OPTIONS)
        made = [
            make_tables(own[used[0]], used[0] if place else None)
            for place, used in enumerate(self._kernels)
        ]
        # one kernel is `positions`, several are `positions.0`, `positions.1`, ...
        self.positions = nn.ModuleList(made) if len(made) > 1 else made[0] if made else None
        rotary = {id(c): make_rotary(c) for c in own}
        self._rotary = [rotary[id(c)] for c in own]
        self.layers = nn.ModuleList(Layer(config, i, c) for i, c in enumerate(own))
        self.final_layer_norm = make_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        x = self.embed_in(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache if use_cache is None else use_cache
        recomputes = self.gradient_checkpointing and self.training  # and would cache twice
        if use_cache and past_key_values is None and not recomputes:
            past_key_values = DynamicCache()
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        position_ids = absolute_positions(position_ids, attention_mask, past, x)
        x = F.dropout(
            self._with_positions(x, position_ids), self.config.hidden_dropout, self.training
        )
        geometry = self._geometry(x, past, past_key_values, attention_mask, position_ids)
        views = self._views(x, geometry)
        want_attentions = bool(
            self.config.output_attentions if output_attentions is None else output_attentions
        )
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden_states: list[Any] = [x]
        attentions: list[Any] = []
        for number, layer in enumerate(self.layers):
            # each tensor is a separate argument, so that activation checkpoints pass its gradient
            x, probabilities = layer(x, *views[number], past_key_values, want_attentions)
            hidden_states.append(x)
            attentions.append(probabilities)
        x = self.final_layer_norm(x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values,
            hidden_states=(*hidden_states[:-1], x) if output_hidden_states else None,
            attentions=tuple(attentions) if want_attentions else None,
        )

    def _views(self, x: Tensor, geometry: Scores) -> list[tuple[Any, ...]]:
        """For each layer: bias, weight, cos, sin, scores. Layers of one kind share theirs."""
        numbers = {layer: place for place, used in enumerate(self._kernels) for layer in used}
        kernels = self.positions if isinstance(self.positions, nn.ModuleList) else [self.positions]
        tables = [(None, None) if k is None else k(geometry.keys) for k in kernels]
        made: dict[Any, Any] = {}
        views = []
        for number, layer_config in enumerate(self._own):
            place = numbers.get(number)
            key = (place, layer_config.attention_window)
            if key not in made:
                used = (None, None) if place is None else tables[place]
                scores = geometry.replaced(tables=used, window=layer_config.attention_window)
                in_layer = self.layers[number].positions is not None
                at_once = not in_layer and fits_at_once(x, scores)
                made[key] = scores, *(scores.dense() if at_once else (None, None))
            rotary = self._rotary[number]
            if id(rotary) not in made:
                made[id(rotary)] = self._angles(rotary, geometry.positions)
            scores, bias, weight = made[key]
            views.append((bias, weight, *made[id(rotary)], scores))
        return views

    def _angles(
        self, rotary: RotaryEmbedding | None, position_ids: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        if rotary is None:
            return None, None
        angles = cos_and_sin(position_ids, *rotary.frequencies(position_ids))
        cos, sin = (part.unsqueeze(1).expand(2, -1, -1, -1, -1) for part in angles)  # of q and k
        if isinstance(rotary, XPos):
            factors = rotary.factors(position_ids[:, None], self.dtype)
            cos, sin = cos * factors, sin * factors
        return cos, sin

    def _with_positions(self, x: Tensor, position_ids: Tensor) -> Tensor:
        if self.config.pos_emb == "sinusoidal":
            return x + sinusoids(position_ids, self.config.hidden_size).to(x.dtype)
        if self.embed_positions is None:
            return x
        rows = self.embed_positions.num_embeddings
        if position_ids.max() >= rows:
            raise ValueError(
                f"position {int(position_ids.max())}: this model has learned positions for {rows} "
                "tokens (max_position_embeddings) and none beyond; shorten the input"
            )
        return x + self.embed_positions(position_ids)

    def _geometry(
        self, x: Tensor, past: int | Tensor, cache: Any, mask: Tensor | None, positions: Tensor
    ) -> Scores:
        keys = cache_capacity(cache) or int(past) + x.shape[1]
        by_head = any(
            own.forget_gate
            or own.attention_sinks
            or POSITIONAL_EMBEDDINGS[own.pos_emb].layer_terms is not None
            for own in self._own
        )
        heads = self.config.num_attention_heads if by_head else 1
        return Scores(
            (None, None), past, x.shape[1], keys, None, allowed_keys(mask, keys), x.device, heads,
            positions,
        )  # fmt: skip


class KerpleNeoXForCausalLM(KerpleNeoXPreTrainedModel, GenerationMixin):
    """The decoder with its head."""

    _tied_weights_keys = {"lm_head.weight": "gpt_neox.embed_in.weight"}  # noqa: RUF012

    def __init__(self, config: KerpleNeoXConfig) -> None:
        super().__init__(config)
        self.gpt_neox = KerpleNeoXModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        outputs = self.gpt_neox(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        last = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, last])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
