"""KERPLE in an existing Hugging Face GPT-2: its learned positions out, a kernel in.

    python examples/kerple_in_gpt2.py [NAME_OR_FOLDER_OF_A_GPT2]

Without an argument a small, untrained GPT-2 is made, so that the example needs no download. A
pretrained GPT-2 must be fine-tuned afterwards: its weights expect the positions that are gone.
Llama, Mistral, Qwen2, Qwen3 and GPT-NeoX models work in the same way.
"""

from __future__ import annotations

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from kerple import use_kerple


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
    use_kerple(model, "kerple_log")
    tokens = torch.randint(model.config.vocab_size, (1, 4 * model.config.n_positions))
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    print(f"loss at 4 times n_positions: {loss.item():.3f}")
    print("gradient of r1 per head:", model.kerple_kernel.r1.grad.tolist())
    model.eval()
    print("generated:", model.generate(tokens[:, :8], max_new_tokens=8, do_sample=False).tolist())


if __name__ == "__main__":
    main()
