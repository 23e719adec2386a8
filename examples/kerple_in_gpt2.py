"""KERPLE in an existing Hugging Face GPT-2: its learned positions out, a kernel in.

    python examples/kerple_in_gpt2.py [NAME_OR_FOLDER_OF_A_GPT2]

Without an argument a small, untrained GPT-2 is made, so that the example needs no download. A
pretrained GPT-2 must be fine-tuned afterwards: its weights expect the positions that are gone.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel

from kerple import attention, kernel


class NoPositions(nn.Module):
    """Stands where GPT-2 looks up its position vectors."""

    def forward(self, position_ids: Tensor) -> Tensor:
        return torch.zeros((), device=position_ids.device)


def add_kerple(model: GPT2LMHeadModel, pos_emb: str = "kerple_log") -> GPT2LMHeadModel:
    """The ten lines: a kernel shared by all layers, used by every attention of this model."""
    heads, width = model.config.n_head, model.config.n_embd
    model.kernel = kernel(pos_emb, heads=heads, head_dim=width // heads)
    model.transformer.wpe = NoPositions()

    def kerple_attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, dropout: float = 0.0, **__: Any
    ) -> tuple[Tensor, None]:
        tables = model.kernel(k.shape[2])
        out = attention(q, k, v, tables.bias, tables.weight, dropout=dropout)
        return out.transpose(1, 2), None

    AttentionInterface.register(f"kerple_{id(model)}", kerple_attention)
    model.set_attn_implementation(f"kerple_{id(model)}")
    return model


def main() -> None:
    torch.manual_seed(0)
    if len(sys.argv) > 1:
        model = GPT2LMHeadModel.from_pretrained(sys.argv[1])
    else:
        small = GPT2Config(
            vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model = GPT2LMHeadModel(small)
    add_kerple(model)
    tokens = torch.randint(model.config.vocab_size, (1, 4 * model.config.n_positions))
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    print(f"loss at 4 times n_positions: {loss.item():.3f}")
    print("gradient of r1 per head:", model.kernel.r1.grad.tolist())
    model.eval()
    print("generated:", model.generate(tokens[:, :8], max_new_tokens=8, do_sample=False).tolist())


if __name__ == "__main__":
    main()
