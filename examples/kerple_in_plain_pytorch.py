"""KERPLE in an attention layer of your own: a kernel, its table, one function.

    python examples/kerple_in_plain_pytorch.py

The table has one number per head and distance, so memory grows with the length, not its square.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from kerple import attention, kernel


class KerpleAttention(nn.Module):
    """Causal self-attention; the lines marked with # KERPLE are what you add to yours."""

    def __init__(self, width: int, heads: int, pos_emb: str = "kerple_log") -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.kernel = kernel(pos_emb, heads=heads, head_dim=width // heads)  # KERPLE

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, self.heads, -1).transpose(1, 2)
        q, k, v = split.chunk(3, dim=-1)
        tables = self.kernel(length)  # KERPLE: [heads, length] each, differentiable
        y = attention(q, k, v, tables.bias, tables.weight)  # KERPLE
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def main() -> None:
    """Learn the bytes of this very file in short pieces, then read it at eight times the length."""
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    embed, layer, head = nn.Embedding(256, 64), KerpleAttention(64, 4), nn.Linear(64, 256)
    model = nn.ModuleList([embed, layer, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss_at(length: int, batch: int) -> Tensor:
        starts = torch.randint(len(text) - length, (batch, 1))
        pieces = text[starts + torch.arange(length + 1)]
        x = embed(pieces[:, :-1])
        logits = head(x + layer(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())

    for step in range(61):
        loss = loss_at(64, batch=16)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    with torch.no_grad():
        print(f"at 8 times the length: loss {loss_at(512, batch=4).item():.3f}")
    r1 = layer.kernel.kernel_values()["r1"].tolist()
    print("r1 per head:", [round(value, 3) for value in r1])


if __name__ == "__main__":
    main()
