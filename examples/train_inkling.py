"""Train a tiny Inkling of transformers on a CPU, with its attention computed by our engine.

    python examples/train_inkling.py [STEPS]

transformers makes Inkling's bias for every pair of tokens. Here its two factors go to
`kerple.attention`, which needs O(length) memory. The text is made up: each token follows from the
one eight places before it, so that the model has to look back to learn it.
"""

from __future__ import annotations

import sys

import torch
from transformers.models.inkling import InklingForCausalLM, InklingTextConfig

from kerple.integrations.inkling import use_inkling_engine

LENGTH, BACK, VOCABULARY, LAYERS = 128, 8, 32, 2


def tiny_inkling() -> InklingForCausalLM:
    """Two layers, the first with a window; untrained."""
    config = InklingTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        mlp_layer_types=["dense"] * LAYERS,
        layer_types=["hybrid_sliding", "hybrid"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
        sliding_window_size=32,
        d_rel=8,
        rel_extent=64,
        logits_mup_width_multiplier=1.0,
        pad_token_id=0,
        attn_implementation="eager",
    )
    return InklingForCausalLM(config)


def texts(count: int) -> torch.Tensor:
    """Eight random tokens, then each is three more than the one eight places before it."""
    tokens = torch.randint(1, VOCABULARY, (count, LENGTH))
    for place in range(BACK, LENGTH):
        tokens[:, place] = (tokens[:, place - BACK] + 3) % VOCABULARY
    return tokens


def main() -> None:
    torch.manual_seed(0)
    model = use_inkling_engine(tiny_inkling()).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    for step in range(steps):
        tokens = texts(8)
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:3}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
