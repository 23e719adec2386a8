"""Small random models at rest, for tests of reading and writing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoints import Checkpoint, CheckpointFiles
from megatron.checkpoints.writing import write_native
from megatron.model import GPTModel, ModelSpec
from megatron.neox_arguments import NeoXArgs

VOCABULARY = 64
SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "max_position_embeddings": 48,
    "tokenizer_type": "CharLevelTokenizer",
    "train_micro_batch_size_per_gpu": 1,
}


def small_args(**changes: Any) -> NeoXArgs:
    return NeoXArgs.from_dict({**SMALL, **changes})


def random_model(args: NeoXArgs, seed: int = 0) -> GPTModel:
    """A model in which every parameter matters: biases and norms are moved from 0 and 1 too."""
    model = GPTModel(ModelSpec.from_args(args, VOCABULARY))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def at_rest(model: GPTModel, args: NeoXArgs, iteration: int = 5) -> Checkpoint:
    weights = {
        name.removeprefix("sequential."): parameter.detach().clone()
        for name, parameter in model.named_parameters()
    }
    return Checkpoint(weights, args, CheckpointFiles(Path(), Path()), "native", iteration)


def saved_model(folder: Path, **changes: Any) -> GPTModel:
    """A random model, and our checkpoint of it in `folder`."""
    args = small_args(**changes)
    model = random_model(args)
    folder.mkdir(parents=True, exist_ok=True)
    write_native(at_rest(model, args), folder)
    return model


def tokens(length: int = 40, batch: int = 2) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def logits_of(model: Any, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        output = model(inputs)
    return output if isinstance(output, Tensor) else output.logits


def assert_equal_weights(first: Checkpoint, second: Checkpoint) -> None:
    assert first.weights.keys() == second.weights.keys()
    different = [n for n, t in first.weights.items() if not torch.equal(t, second.weights[n])]
    assert different == []
