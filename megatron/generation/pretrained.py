"""`megatron.load_pretrained(PATH)`: any checkpoint, ready to use, on any device."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoints import Checkpoint, place_weights, read_checkpoint
from megatron.checkpoints.saved_config import tokenizer_of
from megatron.model.gpt import GPTModel
from megatron.neox_arguments import NeoXArgs, trust

__all__ = ["PretrainedModel", "load_pretrained"]


class PretrainedModel(GPTModel):
    """The decoder of a checkpoint, with its config, its tokenizer and generation."""

    config: NeoXArgs
    iteration: int
    source: Path
    kind: str
    _tokenizer: Any = None
    _tokenizer_error: str | None = None

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> PretrainedModel:
        """Build the model a checkpoint describes, and fill it."""
        # The softmax that training went through needs all scores at once; lengths beyond the
        # training's do not have the room, and the other engines give the same numbers.
        model = cls(checkpoint.spec.replace(scaled_upper_triang_masked_softmax_fusion=False))
        place_weights(model, checkpoint, checkpoint.spec)
        model.config = checkpoint.args
        model.iteration = checkpoint.iteration
        model.source = checkpoint.layout.directory
        model.kind = checkpoint.kind
        return model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the checkpoint's config; None (with a warning) if it cannot be built."""
        if self._tokenizer is None and self._tokenizer_error is None:
            try:
                self._tokenizer = tokenizer_of(self.config, self.source)
            except (ValueError, OSError, ImportError) as error:
                self._tokenizer_error = str(error)
                warnings.warn(f"{self.source}: no tokenizer: {error}", stacklevel=2)
        return self._tokenizer

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]] | Tensor,
        *,
        max_new_tokens: int = 64,
        **options: Any,
    ) -> Any:
        """Continue prompts: texts give texts, token ids give token ids (new tokens only).

        `temperature` (0: the most likely token), `top_k`, `top_p`, `stop_ids` and `seed` as in
        `megatron.generation.generate`; texts also stop at the end of a document.
        """
        from megatron.generation import generate

        texts = [prompts] if isinstance(prompts, str) else prompts
        if isinstance(texts, Tensor) or not all(isinstance(text, str) for text in texts):
            ids: Any = texts
            return generate(self, ids, max_new_tokens=max_new_tokens, **options)
        if self.tokenizer is None:
            raise ValueError(f"{self.source}: no tokenizer ({self._tokenizer_error}); give ids")
        options.setdefault("stop_ids", (self.tokenizer.eod,))
        rows = [self.tokenizer.tokenize(str(text)) for text in texts]
        completions = generate(self, rows, max_new_tokens=max_new_tokens, **options)
        written = [self.tokenizer.detokenize(row) for row in completions]
        return written[0] if isinstance(prompts, str) else written


def load_pretrained(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = torch.float32,
    iteration: int | None = None,
    config: NeoXArgs | Mapping[str, Any] | None = None,
    allow_kernel: str | Sequence[str] | None = None,
) -> PretrainedModel:
    """A model from any checkpoint, in evaluation mode.

    `path` is a run's directory (with `latest`), one `global_stepN` in it, or a Hugging Face folder.
    Read without any flag: our checkpoints, the official KERPLE ones, GPT-NeoX's of both
    generations, any pipe- or model-parallel size. `iteration` picks a step; `config` replaces
    the one saved inside. `dtype=None` keeps the precision of the embedding's weights.
    A checkpoint with a kernel of your own loads if its module is imported already, or with
    `allow_kernel="package.module:Class"`: what a checkpoint names is never imported by itself.
    """
    trust.allow_kernel(allow_kernel)
    checkpoint = read_checkpoint(path, iteration=iteration, config=config)
    model = PretrainedModel.from_checkpoint(checkpoint)
    if dtype is None:
        dtype = checkpoint.weights["0.word_embeddings.weight"].dtype
    kernels = [
        (positions, {name: value.clone() for name, value in positions.state_dict().items()})
        for positions in model.positional_embeddings()
    ]
    model.to(device=device, dtype=dtype)
    for positions, exact in kernels:  # whatever the precision, the kernel is not rounded
        positions.float().load_state_dict(exact)
    return model.eval()
