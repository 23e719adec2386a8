"""A Hugging Face folder as a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file as load_safetensors
from torch import Tensor
from transformers import GPTNeoXConfig, PretrainedConfig

from megatron.checkpoints.checkpoint import EMBEDDING, Checkpoint
from megatron.checkpoints.errors import CheckpointError
from megatron.checkpoints.layout import Layout
from megatron.checkpoints.safe_load import load_file
from megatron.hf.configs import args_from_hf
from megatron.hf.configuration_kerple import KerpleNeoXConfig
from megatron.hf.names import from_hf_names
from megatron.hf.tokenizer_files import tokenizer_settings

__all__ = ["read_hf_checkpoint"]

_CONFIGS: dict[str, Any] = {"kerple_neox": KerpleNeoXConfig, "gpt_neox": GPTNeoXConfig}


def read_hf_checkpoint(layout: Layout) -> Checkpoint:
    """Weights and config of a folder written by our converter or by `save_pretrained`."""
    folder = layout.directory
    config = _read_config(folder)
    args = args_from_hf(config, folder).replace(**tokenizer_settings(folder))
    weights = from_hf_names(
        _read_weights(folder), args.model.num_layers, tied=not args.model.no_weight_tying
    )
    if EMBEDDING not in weights:
        raise CheckpointError(f"{folder}: holds no gpt_neox.embed_in.weight")
    return Checkpoint(weights, args, layout, "hf", int(getattr(config, "iteration", 0)))


def _read_config(folder: Path) -> PretrainedConfig:
    values = json.loads((folder / "config.json").read_text("utf-8"))
    cls = _CONFIGS.get(values["model_type"])
    if cls is None:
        raise CheckpointError(
            f"{folder / 'config.json'}: model_type {values['model_type']!r} is not one that can be "
            f"converted; there are {', '.join(_CONFIGS)}"
        )
    return cls.from_dict(values)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    pickled = [] if files else sorted(folder.glob("pytorch_model*.bin"))
    if not files and not pickled:
        raise CheckpointError(f"{folder}: holds neither *.safetensors nor pytorch_model*.bin")
    _check_index(folder, {path.name for path in (*files, *pickled)})
    weights: dict[str, Tensor] = {}
    for path in files:
        try:
            weights |= load_safetensors(path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); copy it again") from error
    for path in pickled:
        weights |= load_file(path)
    return weights


def _check_index(folder: Path, present: set[str]) -> None:
    for index in folder.glob("*.index.json"):
        named = set(json.loads(index.read_text("utf-8")).get("weight_map", {}).values())
        if missing := sorted(named - present):
            raise CheckpointError(f"{folder}: incomplete, missing {', '.join(missing)}")
