"""Writing a Hugging Face folder: weights, config, tokenizer, generation config, card, code."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from transformers import GenerationConfig, PretrainedConfig

from megatron.checkpoints.checkpoint import Checkpoint
from megatron.checkpoints.writing import cast_weights
from megatron.hf.configs import hf_config
from megatron.hf.configuration_kerple import KerpleNeoXConfig
from megatron.hf.model_card import model_card
from megatron.hf.names import to_hf_names
from megatron.hf.tokenizer_files import write_tokenizer
from megatron.pretrained import tokenizer_of
from megatron.tokenizer import Tokenizer

__all__ = ["MODEL_FILES", "write_hf"]

MODEL_FILES = (
    "configuration_kerple.py",
    "positions_kerple.py",
    "scores_kerple.py",
    "modeling_kerple.py",
)
_AUTO_MAP = {
    "AutoConfig": "configuration_kerple.KerpleNeoXConfig",
    "AutoModel": "modeling_kerple.KerpleNeoXModel",
    "AutoModelForCausalLM": "modeling_kerple.KerpleNeoXForCausalLM",
}


def write_hf(checkpoint: Checkpoint, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Everything that `AutoModelForCausalLM.from_pretrained(folder)` needs."""
    tokenizer, problem = _tokenizer(checkpoint)
    spec = checkpoint.spec
    eos = tokenizer.eod if tokenizer is not None else None
    config = hf_config(spec, checkpoint.args, iteration=checkpoint.iteration, eos=eos)
    if tokenizer is not None:
        problem = write_tokenizer(tokenizer, folder, max_length=int(1e30))
    if problem:
        warnings.warn(f"the export has no tokenizer: {problem}", stacklevel=2)
    ours = isinstance(config, KerpleNeoXConfig)
    weights = to_hf_names(
        cast_weights(checkpoint.weights, dtype),
        spec.num_layers,
        head="lm_head.weight" if ours else "embed_out.weight",
    )
    save_torch_state_dict(weights, folder, metadata={"format": "pt"})
    stored = weights["gpt_neox.embed_in.weight"].dtype
    _write_config(config, folder, stored)
    GenerationConfig(bos_token_id=eos, eos_token_id=eos, pad_token_id=eos).save_pretrained(folder)
    if ours:
        for name in MODEL_FILES:
            shutil.copyfile(Path(__file__).with_name(name), folder / name)
    (folder / "README.md").write_text(model_card(checkpoint, config, problem), encoding="utf-8")


def _tokenizer(checkpoint: Checkpoint) -> tuple[Tokenizer | None, str | None]:
    try:
        tokenizer = tokenizer_of(checkpoint.args, checkpoint.layout.directory)
    except (ValueError, OSError, ImportError) as error:
        return None, str(error)
    if tokenizer.eod >= checkpoint.padded_vocab_size:
        return None, (
            f"{tokenizer.name} has ids up to {tokenizer.vocab_size - 1}, the model knows "
            f"{checkpoint.padded_vocab_size}"
        )
    return tokenizer, None


def _write_config(config: PretrainedConfig, folder: Path, dtype: torch.dtype) -> None:
    ours = isinstance(config, KerpleNeoXConfig)
    values: dict[str, Any] = config.to_dict()
    values["architectures"] = ["KerpleNeoXForCausalLM" if ours else "GPTNeoXForCausalLM"]
    values["dtype"] = str(dtype).removeprefix("torch.")
    if ours:
        values["auto_map"] = _AUTO_MAP
    text = json.dumps(values, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
