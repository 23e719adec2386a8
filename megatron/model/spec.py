"""All that is needed to build a model, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from megatron.model.mlp import default_intermediate_size
from megatron.model.positional_embeddings import PositionOptions

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs


@dataclass(frozen=True)
class ModelSpec:
    """The model part of a config, with the vocabulary's padded size. Field names are NeoX's."""

    padded_vocab_size: int
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    max_position_embeddings: int
    pos_emb: str = "learned"
    norm: str = "layernorm"
    layernorm_epsilon: float = 1e-5
    rms_norm_epsilon: float = 1e-8
    scalenorm_epsilon: float = 1e-8
    activation: str = "gelu"
    bias_gelu_fusion: bool = False
    intermediate_size: int | None = None
    gpt_j_residual: bool = False
    gpt_j_tied: bool = False
    no_weight_tying: bool = False
    output_layer_parallelism: str = "column"
    use_bias_in_norms: bool = True
    use_bias_in_attn_linear: bool = True
    use_bias_in_mlp: bool = True
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    init_method: str = "normal"
    output_layer_init_method: str = "scaled_normal"
    init_method_std: float = 0.02
    sliding_window_width: int | None = None
    attention_engine: str = "auto"
    attention_pruning: bool = True
    rpe_num_buckets: int = 32
    rpe_max_distance: int = 128
    rotary_pct: float = 1.0
    rotary_emb_base: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    kerple_constraint: str = "ste"
    kerple_bias_scale: str = "post"
    kerple_share: str = "all"
    kerple_legacy_bf16: bool = False
    checkpoint_activations: bool = False
    checkpoint_num_layers: int = 1
    seed: int = 1234

    @classmethod
    def from_args(cls, args: NeoXArgs, padded_vocab_size: int) -> ModelSpec:
        """The model that a config describes."""
        flat = args.to_dict()
        known = {field.name for field in fields(cls)} - {"padded_vocab_size"}
        values = {key: flat[key] for key in known if flat.get(key) is not None}
        return cls(padded_vocab_size=padded_vocab_size, **values)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def feed_forward_size(self) -> int:
        return self.intermediate_size or default_intermediate_size(
            self.hidden_size, self.activation
        )

    @property
    def activation_name(self) -> str:
        """GPT-NeoX's fused GELU is the tanh approximation: its flag chooses the function."""
        tanh = self.activation == "gelu" and self.bias_gelu_fusion
        return "gelu_tanh" if tanh else self.activation

    def position_options(
        self, *, tp_rank: int, tp_size: int, layer: int | None = None
    ) -> PositionOptions:
        """What a positional embedding may need of this model."""
        return PositionOptions(
            num_heads=self.num_attention_heads,
            head_dim=self.head_dim,
            hidden_size=self.hidden_size,
            max_position_embeddings=self.max_position_embeddings,
            rpe_num_buckets=self.rpe_num_buckets,
            rpe_max_distance=self.rpe_max_distance,
            rotary_pct=self.rotary_pct,
            rotary_emb_base=self.rotary_emb_base,
            rope_scaling=self.rope_scaling,
            constraint=self.kerple_constraint,
            bias_scale=self.kerple_bias_scale,
            legacy_bf16=self.kerple_legacy_bf16,
            init_std=self.init_method_std,
            seed=self.seed,
            tp_rank=tp_rank,
            tp_size=tp_size,
            layer=layer,
        )
