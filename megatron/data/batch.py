"""From a batch of text to model inputs, labels and the mask of counted positions."""

from __future__ import annotations

import torch

__all__ = ["get_labels_and_mask"]


def get_labels_and_mask(
    text: torch.Tensor, eod: int, eod_mask_loss: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [B, L], labels [B, L] and loss mask [B, L] (fp32) from text [B, L + 1].

    With ``eod_mask_loss`` positions whose input is the end of a document do not count, because
    the next document cannot be foreseen.
    """
    tokens = text[:, :-1].contiguous()
    labels = text[:, 1:].contiguous()
    loss_mask = torch.ones(tokens.shape, dtype=torch.float32, device=text.device)
    if eod_mask_loss:
        loss_mask[tokens == eod] = 0.0
    return tokens, labels, loss_mask
