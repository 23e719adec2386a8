"""The model: sizes, norms, positions, attention, initialisation, dropout.

A key is declared here once. The model's builders (`ModelSpec`), the positional embeddings
(`PositionOptions`) and the Hugging Face config of an export (`KerpleNeoXConfig`) are derived from
these fields, so that a new key is one field here and the code that reads it. Further arguments of
`key(...)` state another name in a file, or that the key is not written there.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import model_validator

from megatron.neox_arguments.catalogue import canonical_method
from megatron.neox_arguments.layer_pattern import (
    positions_named,
    with_local_layers,
    with_whole_temperatures,
)
from megatron.neox_arguments.position_keys import (
    BiasScale,
    Constraint,
    KernelInit,
    PositionKeys,
)
from megatron.neox_arguments.values import (
    Changes,
    Fraction,
    Group,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    accepted,
    declared,
    facts_of,
    key,
)

Activation = Literal[
    "gelu",
    "geglu",
    "relu",
    "softsign",
    "swish",
    "mish",
    "silu",
    "swiglu",
    "reglu",
    "glu",
    "bilinear",
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
GATED_ACTIVATIONS = ("geglu", "swiglu", "reglu", "glu", "bilinear")


class RopeScaling(Group):
    """How rotary angles are stretched beyond the training length."""

    type: Literal[
        "linear", "ntk", "dynamic", "yarn", "longrope", "llama3", "proportional", "clipped"
    ] = key(
        ...,
        "linear (position interpolation), ntk (a larger base), dynamic (ntk by each sequence's "
        "length), yarn, longrope, llama3 or proportional: Hugging Face's rope_type; or clipped.",
    )
    factor: PositiveFloat | None = key(
        None,
        "Evaluation length divided by training length, e.g. 4.0. longrope: null means "
        "max_position_embeddings / original_max_position.",
    )
    original_max_position: PositiveInt | None = key(
        None, "Length the model was trained at; null means max_position_embeddings."
    )
    attention_factor: PositiveFloat | None = key(
        None, "yarn, longrope: factor on q and k; null means the method's own."
    )
    beta_fast: PositiveFloat | None = key(
        None,
        "yarn: dimensions with more turns than this over the original length are unchanged; null "
        "means 32.",
    )
    beta_slow: PositiveFloat | None = key(
        None, "yarn: dimensions with fewer turns than this are interpolated fully; null means 1."
    )
    mscale: PositiveFloat | None = key(None, "yarn: weight of ln(factor) in the factor on q and k.")
    mscale_all_dim: PositiveFloat | None = key(
        None, "yarn: the same in its divisor; used with mscale only."
    )
    truncate: bool | None = key(
        None, "yarn: round the ends of the ramp to whole dimensions; null means true."
    )
    short_factor: list[PositiveFloat] | None = key(
        None, "longrope: a divisor for each frequency, up to the original length."
    )
    long_factor: list[PositiveFloat] | None = key(
        None, "longrope: a divisor for each frequency, beyond the original length."
    )
    low_freq_factor: PositiveFloat | None = key(
        None, "llama3: frequencies with fewer turns over the original length are divided by factor."
    )
    high_freq_factor: PositiveFloat | None = key(
        None, "llama3: frequencies with more turns over the original length are unchanged."
    )
    clipped_pairs: PositiveInt | None = key(
        None, "clipped: how many of the slowest pairs fade; 20 of 64 in the authors' code."
    )


class AttentionTemperature(Group):
    """Inkling's factor of the scores of a query at position m, counted from 0."""

    floor: PositiveInt = key(..., "The factor is 1 up to this many tokens.")
    alpha: NonNegativeFloat = key(0.1, "Beyond them it is 1 + alpha * log((m + 1) / floor).")


class ModelArgs(Group):
    """Sizes, norms, positions, attention, initialisation and dropout."""

    changes: ClassVar[Changes] = "model"

    num_layers: PositiveInt = key(..., "Transformer layers.", hf="num_hidden_layers", hf_default=12)
    hidden_size: PositiveInt = key(
        ..., "Width of the residual stream; a multiple of num_attention_heads.", hf_default=768
    )
    num_attention_heads: PositiveInt = key(..., "Number of attention heads.", hf_default=12)
    num_kv_heads: PositiveInt | None = key(
        None,
        "Grouped-query attention: heads of keys and values, a divisor of "
        "num_attention_heads; each serves as many query heads in a row. null: one for each.",
        hf="num_key_value_heads",
    )
    kv_channels: PositiveInt | None = key(
        None,
        "Width of one attention head (Hugging Face's head_dim); null: hidden_size / "
        "num_attention_heads.",
        hf="head_dim",
        ours=True,
    )
    qk_norm: Literal["per_head", "all_heads"] | None = key(
        None,
        "An rmsnorm of queries and another of keys before rotary: over each head, with one weight "
        "for all (per_head, Qwen3), or over all heads of a token (all_heads, OLMo 2; needs "
        "model_parallel_size 1).",
        ours=True,
    )
    use_qk_layernorm: bool = key(
        False,
        "Norm of queries and keys before their product, with one weight for both, as GPT-NeoX: "
        "layernorm over all heads of a token at once, rmsnorm and scalenorm over each head. With "
        "num_kv_heads, keys are repeated for each query head before. Needs model_parallel_size 1.",
    )
    forget_gate: bool = key(
        False,
        "Forgetting Transformer: each head has a gate in (0, 1), a linear map of the "
        "layer's input, and a score decays by the gates of all tokens after its key. With any "
        "pos_emb, none included.",
        ours=True,
        layer=True,
    )
    attention_sinks: bool = key(
        False,
        "A learned logit per head in the denominator of the softmax, so that a head "
        "may attend to nothing.",
        ours=True,
        layer=True,
    )
    scalable_softmax: bool = key(
        False,
        "Scalable softmax (SSMax): queries times s log n for the n keys they see, s "
        "learned per head, so that attention stays sharp over more keys than in training.",
        ours=True,
        layer=True,
    )
    attention_temperature: AttentionTemperature | None = key(
        None,
        "A factor of all scores of the query at position m (of its document): "
        "1 + alpha * log(max(1, (m + 1) / floor)), as in Inkling; a sink is not scaled. "
        "{floor: 512, alpha: 0.1}; null: 1.",
        ours=True,
        layer=True,
        evaluate="free",
    )
    layer_pattern: list[dict[str, Any]] | None = key(
        None,
        "Keys that layers set otherwise than the model: a list of entries, each for `count` "
        "layers (1), repeated until num_layers, e.g. [{count: 5, sliding_window_width: 512}, "
        "{pos_emb: none}]. docs/positional_embeddings.md lists the keys.",
        ours=True,
    )
    intermediate_size: PositiveInt | None = key(
        None,
        "Width of the MLP; null means 4 x hidden_size. A gated activation (swiglu, "
        "geglu, reglu, glu, bilinear) is a third as wide, as in GPT-NeoX: two thirds of this are "
        "the outputs of the first projection, and half of them gate the others.",
        hf_default=3072,
    )
    mlp_multiple_of: PositiveInt = key(
        1,
        "Round the width of the MLP (after the thirds of gated ones) up to a multiple of this.",
        hf=None,
    )
    seq_length: PositiveInt = key(
        PositionKeys.seq_length,
        "Training sequence length in tokens.",
        hf="train_length",
        hf_default=512,
    )
    seq_length_val: PositiveInt | None = key(
        None,
        "Sequence length of the validation and test data; null means seq_length. "
        "May be longer than anything seen in training.",
        hf=None,
        changes="evaluation",
    )
    max_position_embeddings: PositiveInt | None = key(
        None,
        "Rows of the learned position table; null means seq_length. Only `learned` "
        "is limited by it: every other pos_emb may be evaluated at any length.",
        hf_default=512,
    )
    norm: Literal["layernorm", "rmsnorm", "scalenorm", "non_parametric_layernorm"] = key(
        "layernorm", "Normalisation layer; non_parametric_layernorm has no weights."
    )
    norm_placement: Literal["input", "output"] = key(
        "input",
        "Norm of a block's input, x + f(norm(x)), or of its output, x + norm(f(x)) (OLMo 2).",
        ours=True,
    )
    layernorm_epsilon: PositiveFloat = key(1.0e-5, "Epsilon of layernorm.", hf=None)
    rms_norm_epsilon: PositiveFloat = key(1.0e-8, "Epsilon of rmsnorm.", hf=None)
    scalenorm_epsilon: PositiveFloat = key(1.0e-8, "Epsilon of scalenorm.", hf=None)
    pos_emb: str = key(
        "learned",
        "Positional embedding: a registered name (learned, sinusoidal, rotary, rpe, "
        "alibi, none, kerple_log, kerple_power, ...), one of the official KERPLE fork's names "
        "(kerple_power_ap_, ...), or `module:ClassName` of your own.",
        hf_default="kerple_log",
        layer=True,
    )
    rpe_num_buckets: PositiveInt = key(
        PositionKeys.rpe_num_buckets, "T5 bias: number of distance buckets.", layer=True
    )
    rpe_max_distance: PositiveInt = key(
        PositionKeys.rpe_max_distance,
        "T5 bias: distances from here share the last bucket.",
        layer=True,
    )
    rotary_pct: Fraction = key(
        PositionKeys.rotary_pct, "Fraction of each head that is rotated.", layer=True
    )
    rotary_emb_base: PositiveFloat = key(
        PositionKeys.rotary_emb_base,
        "Base of the rotary frequencies.",
        hf="rotary_base",
        hf_default=10000.0,
        layer=True,
    )
    rope_scaling: RopeScaling | None = key(
        None,
        "Stretch rotary angles, e.g. {type: yarn, factor: 4.0, original_max_position: 2048}.",
        hf="rotary_scaling",
        ours=True,
        layer=True,
        evaluate="free",
    )
    rotary_angles: Fraction = key(
        0.0,
        "Beside a pos_emb that rotates nothing: q and k are rotated too, by this share of rotary's "
        "angles (rotary_pct, rotary_emb_base, rope_scaling); 0: not.",
        ours=True,
    )
    rotary_fade_iters: PositiveInt | None = key(
        None,
        "rotary_angles falls from 1 at step 0 to 0 at this step, so that a rotary model "
        "(load_positions: fresh) changes to pos_emb gradually; null: rotary_angles stays.",
        hf=None,
        ours=True,
    )
    inkling_features: PositiveInt = key(
        PositionKeys.inkling_features,
        "inkling and kerple_inkling: features of each query per head (R), at most 64.",
        ours=True,
        layer=True,
    )
    inkling_distances: PositiveInt = key(
        PositionKeys.inkling_distances,
        "inkling and kerple_inkling: distances that have features (E); those beyond have none, and "
        "a layer has no more than its window.",
        ours=True,
        layer=True,
    )
    fire_threshold: PositiveInt = key(
        PositionKeys.fire_threshold,
        "fire: the position (L, learned, starts here) up to which its bias is a table over "
        "distance; queries beyond are exact and slower. A seq_length above it trains slower.",
        ours=True,
        layer=True,
    )
    kerple_constraint: Constraint = key(
        PositionKeys.kerple_constraint,
        "How kernel parameters stay in their range: a straight-through clamp (what "
        "the official code amounts to), a projection after each step, or softplus.",
        ours=True,
    )
    kerple_bias_scale: BiasScale = key(
        PositionKeys.kerple_bias_scale,
        "Add the bias after q.k/sqrt(d) (post, as the official code) or divide it by "
        "sqrt(d) too (pre, as Eq. 1 of the paper).",
        ours=True,
        layer=True,
    )
    kerple_init: KernelInit = key(
        PositionKeys.kerple_init,
        "How a kernel starts: drawn as in the official code; flat, a bias near 0 at all distances; "
        "or fit, by the mean that rotary adds to the scores of the loaded model at each distance "
        "(needs load_positions: fresh).",
        hf=None,
        ours=True,
        changes="training",
        resume="free",
    )
    kerple_share: Literal["all", "per_layer"] = key(
        "all", "One kernel for all layers, or one per layer.", ours=True
    )
    kerple_legacy_bf16: bool = key(
        PositionKeys.kerple_legacy_bf16,
        "Compute distances and bias in bf16 as the official code does (coarse beyond "
        "256 tokens); for reproducing its numbers only.",
        ours=True,
        evaluate="free",
    )
    kerple_legacy_fp16: bool = key(
        PositionKeys.kerple_legacy_fp16,
        "Compute distances and bias in fp16 as forks that train in fp16 do (distances exact to "
        "2,048 only); for reproducing their numbers only. Not with kerple_legacy_bf16.",
        ours=True,
        evaluate="free",
    )
    attention_config: list[Any] | None = key(
        None,
        'Attention type per layer, e.g. [[["global", "local"], 6]]: `global` (or `flash`, the '
        "same attention), or `local` with the window sliding_window_width, which becomes a "
        "layer_pattern. Without `local`, sliding_window_width holds for all layers.",
        hf=None,
        changes="execution",
    )
    sliding_window_width: NonNegativeInt | None = key(
        None,
        "Attend to the query and to this many tokens before it, as GPT-NeoX; null: to all.",
        hf="attention_window",
        layer=True,
    )
    attention_engine: Literal["auto", "naive", "tiled", "triton", "flex"] = key(
        "auto",
        "Attention implementation; auto takes the fastest that supports the call.",
        hf=None,
        ours=True,
        changes="execution",
        evaluate="free",
    )
    attention_pruning: bool = key(
        True,
        "Let engines skip blocks that cannot change the result.",
        hf=None,
        ours=True,
        changes="execution",
        evaluate="free",
    )
    activation: Activation = key("gelu", "Activation of the MLP.", hf="hidden_act")
    gpt_j_residual: bool = key(
        False,
        "Attention and MLP in parallel: x + attn(ln1(x)) + mlp(ln2(x)).",
        hf="use_parallel_residual",
    )
    gpt_j_tied: bool = key(
        False,
        "With gpt_j_residual: one norm feeds both branches; without, no effect (as GPT-NeoX).",
        hf="share_parallel_norm",
    )
    no_weight_tying: bool = key(False, "The head has its own matrix, not the embedding's.", hf=None)
    output_layer_parallelism: Literal["column", "row"] = key(
        "column",
        "Split the head over the vocabulary (column) or over the hidden size (row, "
        "the official KERPLE fork's default).",
        hf=None,
        changes="execution",
    )
    make_vocab_size_divisible_by: PositiveInt = key(
        128,
        "Pad the vocabulary to a multiple of this times model_parallel_size.",
        hf=None,
        changes="execution",
    )
    use_bias_in_norms: bool = key(True, "Bias in norms.", hf="norm_bias")
    use_bias_in_attn_linear: bool = key(True, "Bias in attention projections.", hf="attention_bias")
    add_qkv_bias: bool = key(
        False,
        "Bias of queries, keys and values though use_bias_in_attn_linear is false (Qwen2).",
        ours=True,
    )
    use_bias_in_mlp: bool = key(True, "Bias in MLP projections.", hf="mlp_bias")
    init_method: InitMethod = key(
        "normal", "Initialisation of weights.", hf=None, changes="training", resume="free"
    )
    output_layer_init_method: InitMethod = key(
        "scaled_normal",
        "Initialisation of the projections back to the residual.",
        hf=None,
        changes="training",
        resume="free",
    )
    init_method_std: NonNegativeFloat = key(
        PositionKeys.init_method_std,
        "Standard deviation of normal initialisations.",
        hf="initializer_range",
        changes="training",
        resume="free",
    )
    attention_dropout: Fraction = key(0.0, "Dropout of attention weights.", changes="training")
    hidden_dropout: Fraction = key(0.0, "Dropout of both residual branches.", changes="training")
    apply_query_key_layer_scaling: bool = key(
        False,
        "The bias of layer l (alibi, rpe, kerple) is max(1, l) times its table, counted from 0, as "
        "in GPT-NeoX. q.k is unchanged: GPT-NeoX divides it to protect fp16, and ours is fp32.",
    )
    scale_tables_by_layer: bool = key(
        True,
        "Let apply_query_key_layer_scaling scale tables. false: the key has no effect, as in "
        "earlier versions of this library.",
        hf=None,
        ours=True,
    )
    attention_softmax_in_fp32: bool = accepted("our softmax is always fp32 inside.")
    use_cpu_initialization: bool = accepted("initial weights never depend on the device.")
    scaled_upper_triang_masked_softmax_fusion: bool = key(
        False,
        "Train through dense scores and the fused softmax that ALiBi and KERPLE share "
        "(`attention_engine: naive`), unless attention_config has `flash` or attention_engine "
        "names an engine. Evaluation and generation take the fastest engine: the same numbers.",
        hf=None,
        changes="execution",
    )
    scaled_masked_softmax_fusion: bool = accepted("our attention engines are always fused.")
    bias_gelu_fusion: bool = key(
        False,
        "Use the tanh approximation of GELU, which is what GPT-NeoX's fused kernel "
        "computes. Nothing is faster for it here.",
        hf=None,
    )
    bias_dropout_fusion: bool = accepted("there is no separate fused kernel to choose.")
    rope_fusion: bool = accepted("there is no separate fused kernel to choose.")
    layernorm_fusion: bool = accepted("a fused norm is used whenever one is installed.")

    @model_validator(mode="before")
    @classmethod
    def _equal_models_have_equal_keys(cls, values: Any) -> Any:
        """What null means is null, and a pattern has one form."""
        if not isinstance(values, dict):
            return values
        alpha = AttentionTemperature.model_fields["alpha"].default
        values = with_whole_temperatures(with_local_layers(values), {"alpha": alpha})
        named = [name for name in positions_named(values) if name is not None]
        values = {"pos_emb": named[0], **values} if named else dict(values)
        heads, width = values.get("num_attention_heads"), values.get("kv_channels")
        if heads is not None and values.get("num_kv_heads") == heads:
            values["num_kv_heads"] = None  # not grouped: its weights have another layout
        both_given = isinstance(heads, int) and isinstance(width, int)
        if both_given and heads * width == values.get("hidden_size"):
            values["kv_channels"] = None
        if values.get("max_position_embeddings") is None:
            default = cls.model_fields["seq_length"].default
            values["max_position_embeddings"] = values.get("seq_length") or default
        return values

    @property
    def methods(self) -> list[str]:
        """pos_emb, or that of each entry of layer_pattern."""
        named = positions_named({"layer_pattern": self.layer_pattern}) or [None]
        return [name or self.pos_emb for name in named]

    @property
    def method(self) -> str:
        """pos_emb; of a layer_pattern, those of its entries in order, each once, joined by `+`.

        Log lines, results and tables name the model's positions so.
        """
        return "+".join(dict.fromkeys(map(canonical_method, self.methods)))

    @property
    def engine_in_effect(self) -> str:
        """The engine for training: GPT-NeoX's key for its fused softmax chooses `naive`."""
        if self.attention_engine != "auto" or not self.scaled_upper_triang_masked_softmax_fusion:
            return self.attention_engine
        kinds = [kind for entry in self.attention_config or [] for kind in entry[0]]
        return "auto" if "flash" in kinds else "naive"

    def table_factor(self, layer: int) -> int:
        """What layer `layer`, counted from 0, multiplies its bias over distance with.

        GPT-NeoX divides q.k by this number and multiplies the scores with it after the bias was
        added, except in its flash attention.
        """
        if not (self.apply_query_key_layer_scaling and self.scale_tables_by_layer):
            return 1
        kinds: list[str] = []
        for names, repeat in self.attention_config or ():
            kinds += names * (self.num_layers if repeat == "all" else repeat)
        return 1 if kinds and kinds[layer] == "flash" else max(1, layer)

    def rotary_share(self, step: int) -> float:
        """rotary_angles of the model that a run has after this step."""
        if self.rotary_fade_iters is None:
            return self.rotary_angles
        return max(0.0, 1 - step / self.rotary_fade_iters)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

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


def padded_vocab_size(vocab_size: int, divisible_by: int, model_parallel_size: int) -> int:
    """NeoX's padding: the next multiple of both, so that every rank's share is a round number."""
    multiple = divisible_by * model_parallel_size
    return -(-vocab_size // multiple) * multiple


class HFKey(NamedTuple):
    """A model key in a Hugging Face config of ours."""

    key: str
    name: str
    default: Any


def hugging_face_keys() -> tuple[HFKey, ...]:
    """Every model key that a Hugging Face config carries, in the order of declaration."""
    described = [(own, field, facts_of(field)) for own, field in ModelArgs.model_fields.items()]
    return tuple(
        HFKey(own, facts.get("hf", own), facts.get("hf_default", field.default))
        for own, field, facts in described
        if facts.get("hf", own) is not None
    )


LAYER_KEYS: tuple[str, ...] = tuple(declared("layer", ModelArgs))
"""Keys that an entry of layer_pattern may set."""

POSITION_OPTIONS: tuple[str, ...] = tuple(
    name for name in LAYER_KEYS if hasattr(PositionKeys, name)
)
"""Those of them that a positional embedding reads: layers with the same values share a kernel."""

KEYS_OF_OURS: frozenset[str] = frozenset(declared("ours", ModelArgs))
"""Model keys that neither GPT-NeoX nor the official KERPLE code knows."""

SCORE_TERMS = tuple(
    entry.key
    for entry in hugging_face_keys()
    if entry.key in KEYS_OF_OURS and not entry.key.startswith(("kerple_", "inkling_", "fire_"))
)
"""Those of them that change what any method computes: further terms of the scores."""
