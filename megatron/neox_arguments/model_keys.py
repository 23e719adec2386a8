"""The model: sizes, norms, positions, attention, initialisation, dropout.

A key is declared here once. The model's builders (`ModelSpec`), the positional embeddings
(`PositionOptions`) and the Hugging Face config of an export (`KerpleNeoXConfig`) are derived from
these fields, so that a new key is one field here and the code that reads it. `about(...)` says
where a key is called otherwise, or does not go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from megatron.neox_arguments.values import (
    NO_EFFECT,
    Fraction,
    Group,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    about,
    facts_of,
)

Activation = Literal[
    "gelu", "geglu", "relu", "softsign", "swish", "mish", "silu", "swiglu", "reglu"
]
InitMethod = Literal[
    "normal",
    "scaled_normal",
    "orthogonal",
    "scaled_orthogonal",
    "xavier_uniform",
    "xavier_normal",
    "wang_init",
    "small_init",
]
GATED_ACTIVATIONS = ("geglu", "swiglu", "reglu")


class RopeScaling(Group):
    """How rotary angles are stretched beyond the training length."""

    type: Literal["linear", "ntk", "yarn"] = Field(
        description="linear (position interpolation), ntk (a larger base) or yarn."
    )
    factor: PositiveFloat = Field(
        description="Evaluation length divided by training length, e.g. 4.0."
    )
    original_max_position: PositiveInt | None = Field(
        None, description="Length the model was trained at; null means max_position_embeddings."
    )


class ModelArgs(Group):
    """Sizes, norms, positions, attention, initialisation and dropout."""

    num_layers: PositiveInt = Field(
        description="Number of transformer layers.",
        json_schema_extra=about(hf="num_hidden_layers", hf_default=12),
    )
    hidden_size: PositiveInt = Field(
        description="Width of the residual stream; a multiple of num_attention_heads.",
        json_schema_extra=about(hf_default=768),
    )
    num_attention_heads: PositiveInt = Field(
        description="Number of attention heads.",
        json_schema_extra=about(hf_default=12),
    )
    num_kv_heads: PositiveInt | None = Field(
        None,
        description="Grouped-query attention: heads of keys and values, a divisor of "
        "num_attention_heads; each serves as many query heads in a row. null: one for each.",
        json_schema_extra=about(hf="num_key_value_heads"),
    )
    use_qk_layernorm: bool = Field(
        False,
        description="Layernorm of queries and keys before they meet, over all heads of a token at "
        "once and with one weight for both, as GPT-NeoX. Needs norm: layernorm, "
        "model_parallel_size 1 and no num_kv_heads.",
    )
    forget_gate: bool = Field(
        False,
        description="Forgetting Transformer: each head has a gate in (0, 1), a linear map of the "
        "layer's input, and a score decays by the gates of all tokens after its key. With any "
        "pos_emb, none included.",
        json_schema_extra=about(ours=True),
    )
    attention_sinks: bool = Field(
        False,
        description="A learned logit per head in the denominator of the softmax, so that a head "
        "may attend to nothing.",
        json_schema_extra=about(ours=True),
    )
    scalable_softmax: bool = Field(
        False,
        description="Scalable softmax (SSMax): queries times s log n for the n keys they see, s "
        "learned per head, so that attention stays sharp over more keys than in training.",
        json_schema_extra=about(ours=True),
    )
    intermediate_size: PositiveInt | None = Field(
        None,
        description="Width of the MLP; null means 4 x hidden_size. A gated activation (swiglu, "
        "geglu, reglu) is a third as wide, as in GPT-NeoX: two thirds of this are the outputs of "
        "the first projection, and half of them gate the others.",
        json_schema_extra=about(hf_default=3072),
    )
    mlp_multiple_of: PositiveInt = Field(
        1,
        description="Round the width of the MLP (after the thirds of gated ones) up to a multiple "
        "of this.",
        json_schema_extra=about(hf=None),
    )
    seq_length: PositiveInt = Field(
        2048,
        description="Training sequence length in tokens.",
        json_schema_extra=about(hf="train_length", hf_default=512),
    )
    seq_length_val: PositiveInt | None = Field(
        None,
        description="Sequence length of the validation and test data; null means seq_length. "
        "May be longer than anything seen in training.",
        json_schema_extra=about(hf=None),
    )
    max_position_embeddings: PositiveInt | None = Field(
        None,
        description="Rows of the learned position table; null means seq_length. Only `learned` "
        "is limited by it: every other pos_emb may be evaluated at any length.",
        json_schema_extra=about(hf_default=512),
    )
    norm: Literal["layernorm", "rmsnorm", "scalenorm"] = Field(
        "layernorm", description="Normalisation layer."
    )
    layernorm_epsilon: PositiveFloat = Field(
        1.0e-5,
        description="Epsilon of layernorm.",
        json_schema_extra=about(hf=None),
    )
    rms_norm_epsilon: PositiveFloat = Field(
        1.0e-8,
        description="Epsilon of rmsnorm.",
        json_schema_extra=about(hf=None),
    )
    scalenorm_epsilon: PositiveFloat = Field(
        1.0e-8,
        description="Epsilon of scalenorm.",
        json_schema_extra=about(hf=None),
    )
    pos_emb: str = Field(
        "learned",
        description="Positional embedding: a registered name (learned, sinusoidal, rotary, rpe, "
        "alibi, none, kerple_log, kerple_power, ...), one of the official KERPLE fork's names "
        "(kerple_power_ap_, ...), or `module:ClassName` of your own.",
        json_schema_extra=about(hf_default="kerple_log"),
    )
    rpe_num_buckets: PositiveInt = Field(32, description="T5 bias: number of distance buckets.")
    rpe_max_distance: PositiveInt = Field(
        128, description="T5 bias: distances from here on share the last bucket."
    )
    rotary_pct: Fraction = Field(1.0, description="Fraction of each head that is rotated.")
    rotary_emb_base: PositiveFloat = Field(
        10000,
        description="Base of the rotary frequencies.",
        json_schema_extra=about(hf="rotary_base", hf_default=10000.0),
    )
    rope_scaling: RopeScaling | None = Field(
        None,
        description="Stretch rotary angles: {type: linear|ntk|yarn, factor: 4.0, "
        "original_max_position: 2048}.",
        json_schema_extra=about(hf="rotary_scaling", ours=True),
    )
    kerple_constraint: Literal["ste", "project", "softplus"] = Field(
        "ste",
        description="How kernel parameters stay in their range: a straight-through clamp (what "
        "the official code amounts to), a projection after each step, or softplus.",
        json_schema_extra=about(ours=True),
    )
    kerple_bias_scale: Literal["post", "pre"] = Field(
        "post",
        description="Add the bias after q.k/sqrt(d) (post, as the official code) or divide it by "
        "sqrt(d) too (pre, as Eq. 1 of the paper).",
        json_schema_extra=about(ours=True),
    )
    kerple_share: Literal["all", "per_layer"] = Field(
        "all",
        description="One kernel for all layers, or one per layer.",
        json_schema_extra=about(ours=True),
    )
    kerple_legacy_bf16: bool = Field(
        False,
        description="Compute distances and bias in bf16 as the official code does (coarse beyond "
        "256 tokens); for reproducing its numbers only.",
        json_schema_extra=about(ours=True),
    )
    attention_config: list[Any] | None = Field(
        None,
        description='Attention type per layer, e.g. [[["global"], 12]]. Only `global` (or `flash`, '
        "the same attention) is implemented; use sliding_window_width for a window.",
        json_schema_extra=about(hf=None),
    )
    sliding_window_width: NonNegativeInt | None = Field(
        None,
        description="Attend to the query and to this many tokens before it, as GPT-NeoX; null: "
        "to all.",
        json_schema_extra=about(hf="attention_window"),
    )
    attention_engine: Literal["auto", "naive", "tiled", "triton"] = Field(
        "auto",
        description="Attention implementation; auto takes the fastest that fits.",
        json_schema_extra=about(hf=None, ours=True),
    )
    attention_pruning: bool = Field(
        True,
        description="Let engines skip blocks that cannot change the result.",
        json_schema_extra=about(hf=None, ours=True),
    )
    activation: Activation = Field(
        "gelu",
        description="Activation of the MLP.",
        json_schema_extra=about(hf="hidden_act"),
    )
    gpt_j_residual: bool = Field(
        False,
        description="Attention and MLP in parallel: x + attn(ln1(x)) + mlp(ln2(x)).",
        json_schema_extra=about(hf="use_parallel_residual"),
    )
    gpt_j_tied: bool = Field(
        False,
        description="With gpt_j_residual: one norm feeds both branches.",
        json_schema_extra=about(hf="share_parallel_norm"),
    )
    no_weight_tying: bool = Field(
        False,
        description="Give the head its own matrix instead of the embedding's.",
        json_schema_extra=about(hf=None),
    )
    output_layer_parallelism: Literal["column", "row"] = Field(
        "column",
        description="Split the head over the vocabulary (column) or over the hidden size (row, "
        "the official KERPLE fork's default).",
        json_schema_extra=about(hf=None),
    )
    make_vocab_size_divisible_by: PositiveInt = Field(
        128,
        description="Pad the vocabulary to a multiple of this times model_parallel_size.",
        json_schema_extra=about(hf=None),
    )
    use_bias_in_norms: bool = Field(
        True,
        description="Bias in norms.",
        json_schema_extra=about(hf="norm_bias"),
    )
    use_bias_in_attn_linear: bool = Field(
        True,
        description="Bias in attention projections.",
        json_schema_extra=about(hf="attention_bias"),
    )
    use_bias_in_mlp: bool = Field(
        True,
        description="Bias in MLP projections.",
        json_schema_extra=about(hf="mlp_bias"),
    )
    init_method: InitMethod = Field(
        "normal",
        description="Initialisation of weights.",
        json_schema_extra=about(hf=None),
    )
    output_layer_init_method: InitMethod = Field(
        "scaled_normal",
        description="Initialisation of the projections back to the residual.",
        json_schema_extra=about(hf=None),
    )
    init_method_std: NonNegativeFloat = Field(
        0.02,
        description="Standard deviation of normal initialisations.",
        json_schema_extra=about(hf="initializer_range"),
    )
    attention_dropout: Fraction = Field(0.0, description="Dropout of attention weights.")
    hidden_dropout: Fraction = Field(0.0, description="Dropout of both residual branches.")
    apply_query_key_layer_scaling: bool = Field(
        False,
        description="Accepted for old files: it only guards fp16 softmax, and ours is fp32.",
        json_schema_extra=NO_EFFECT,
    )
    attention_softmax_in_fp32: bool = Field(
        False,
        description="Accepted for old files: our softmax is always fp32 inside.",
        json_schema_extra=NO_EFFECT,
    )
    use_cpu_initialization: bool = Field(
        False,
        description="Accepted for old files: initial weights never depend on the device.",
        json_schema_extra=NO_EFFECT,
    )
    scaled_upper_triang_masked_softmax_fusion: bool = Field(
        False,
        description="Train through dense scores and the fused softmax that ALiBi and KERPLE share "
        "(`attention_engine: naive`), unless attention_config asks for `flash` or attention_engine "
        "names an engine. Evaluation and generation take the fastest engine: the same numbers.",
        json_schema_extra=about(hf=None),
    )
    scaled_masked_softmax_fusion: bool = Field(
        False,
        description="Accepted for old files: our attention engines are always fused.",
        json_schema_extra=NO_EFFECT,
    )
    bias_gelu_fusion: bool = Field(
        False,
        description="Use the tanh approximation of GELU, which is what GPT-NeoX's fused kernel "
        "computes. Nothing is faster for it here.",
        json_schema_extra=about(hf=None),
    )
    bias_dropout_fusion: bool = Field(
        False,
        description="Accepted for old files: there is no separate fused kernel to choose.",
        json_schema_extra=NO_EFFECT,
    )
    rope_fusion: bool = Field(
        False,
        description="Accepted for old files: there is no separate fused kernel to choose.",
        json_schema_extra=NO_EFFECT,
    )
    layernorm_fusion: bool = Field(
        False,
        description="Accepted for old files: a fused norm is used whenever one is installed.",
        json_schema_extra=NO_EFFECT,
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_position_rows(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("max_position_embeddings") is None:
            default = cls.model_fields["seq_length"].default
            return {**values, "max_position_embeddings": values.get("seq_length") or default}
        return values

    @model_validator(mode="before")
    @classmethod
    def _drop_groups_of_one(cls, values: Any) -> Any:
        """As many key heads as query heads is plain attention, whose weights lie otherwise."""
        if not isinstance(values, dict) or values.get("num_kv_heads") is None:
            return values
        if values["num_kv_heads"] != values.get("num_attention_heads"):
            return values
        return {key: value for key, value in values.items() if key != "num_kv_heads"}

    @property
    def engine_in_effect(self) -> str:
        """The engine that training asks for: GPT-NeoX's key for its fused softmax chooses ours."""
        if self.attention_engine != "auto" or not self.scaled_upper_triang_masked_softmax_fusion:
            return self.attention_engine
        kinds = [kind for entry in self.attention_config or [] for kind in entry[0]]
        return "auto" if "flash" in kinds else "naive"

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_kv_heads or self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Inputs of the MLP's second projection, by GPT-NeoX's rule."""
        size, multiple = self.intermediate_size or 4 * self.hidden_size, self.mlp_multiple_of
        if self.activation in GATED_ACTIVATIONS:
            return -(-(size * 2 // 3) // (2 * multiple)) * multiple
        return -(-size // multiple) * multiple

    @property
    def attention_window(self) -> int | None:
        """Keys that a query sees at most, its own included; None: all."""
        return None if self.sliding_window_width is None else self.sliding_window_width + 1

    @property
    def activation_name(self) -> str:
        """GPT-NeoX's fused GELU is the tanh approximation: its flag chooses the function."""
        tanh = self.activation == "gelu" and self.bias_gelu_fusion
        return "gelu_tanh" if tanh else self.activation

    @property
    def position_rows(self) -> int:
        """max_position_embeddings with its default filled in."""
        return self.max_position_embeddings or self.seq_length

    @property
    def validation_length(self) -> int:
        """seq_length_val with its default filled in."""
        return self.seq_length_val or self.seq_length


def intermediate_size_for(width: int, activation: str) -> int:
    """The `intermediate_size` (with mlp_multiple_of 1) that makes an MLP `width` wide."""
    return 3 * width if activation in GATED_ACTIVATIONS else width


@dataclass(frozen=True)
class HFKey:
    """A model key in a Hugging Face config of ours."""

    key: str
    name: str
    default: Any


def hugging_face_keys() -> tuple[HFKey, ...]:
    """Every model key that a Hugging Face config carries, in the order of declaration."""
    keys = []
    for key, field in ModelArgs.model_fields.items():
        facts = facts_of(field)
        name = facts.get("hf", key)
        if name is not None:
            keys.append(HFKey(key, name, facts.get("hf_default", field.default)))
    return tuple(keys)


SCORE_TERMS = ("forget_gate", "attention_sinks", "scalable_softmax")
"""Model keys that give a layer's heads more to learn about their scores."""

KEYS_OF_OURS: frozenset[str] = frozenset(
    key for key, field in ModelArgs.model_fields.items() if facts_of(field).get("ours")
)
"""Model keys that neither GPT-NeoX nor the official KERPLE code knows."""
