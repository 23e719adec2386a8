"""The small model that the tests of this room vary."""

from __future__ import annotations

from megatron.model import ModelSpec

SPEC = ModelSpec(
    padded_vocab_size=96,
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=64,
    max_position_embeddings=64,
    pos_emb="kerple_log",
)
