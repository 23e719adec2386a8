"""A Hugging Face folder, written with all it needs (tokenizer, card, code), and read."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, GenerationConfig, PretrainedConfig

from megatron.checkpoints.hf.architectures import ARCHITECTURES
from megatron.checkpoints.hf.companions import (
    EXPORTED_MODULES,
    OWN_KERNEL,
    model_card,
    standalone_source,
    tokenizer_settings,
    write_tokenizer,
)
from megatron.checkpoints.hf.configuration_kerple import KerpleNeoXConfig
from megatron.checkpoints.hf.hf_config import architecture_of, args_from_hf, hf_config
from megatron.checkpoints.hf.keys_kerple import written_out
from megatron.checkpoints.hf.safetensors_files import read_safetensors, write_safetensors
from megatron.checkpoints.hf.weight_names import WeightNames
from megatron.checkpoints.lazy_weights import LazyWeights, outlines
from megatron.checkpoints.reading import TOKENIZER, Checkpoint, CheckpointFiles
from megatron.checkpoints.safe_files import load_mapping, read_object
from megatron.checkpoints.saved_config import tokenizer_of
from megatron.checkpoints.sharding import EMBEDDING
from megatron.checkpoints.store import write_checksums
from megatron.checkpoints.writing import cast_weights
from megatron.errors import CheckpointError, KerpleError
from megatron.model import ModelSpec
from megatron.model.position_names import canonical_name, positional_embedding_class
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.catalogue import METHODS
from megatron.tokenizer import Tokenizer

MODEL_FILES = ("configuration_kerple.py", "scores_kerple.py", "modeling_kerple.py")
FORMULA_FILES = tuple(f"{name}.py" for name in EXPORTED_MODULES)
_AUTO_MAP = {
    "AutoConfig": "configuration_kerple.KerpleNeoXConfig",
    "AutoModel": "modeling_kerple.KerpleNeoXModel",
    "AutoModelForCausalLM": "modeling_kerple.KerpleNeoXForCausalLM",
}


def write_hf(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    with_kernel_source: bool = False,
    architecture: str | None = None,
) -> None:
    """Everything that `AutoModelForCausalLM.from_pretrained(folder)` needs.

    The class is transformers' own where one computes the model (`architecture` names one, if
    several do), else KerpleNeoXForCausalLM with its code. A user-defined `pos_emb` is
    included as source, if `with_kernel_source` allows it.
    """
    tokenizer, problem = _tokenizer(checkpoint)
    spec = checkpoint.spec
    eos = tokenizer.eod if tokenizer is not None else None
    own_kernel = with_kernel_source and canonical_name(spec.pos_emb) not in METHODS
    theirs = architecture_of(spec, architecture)
    config = hf_config(
        spec,
        iteration=checkpoint.iteration,
        eos=eos,
        own_kernel=own_kernel,
        architecture=theirs,
    )
    if tokenizer is not None:
        problem = write_tokenizer(tokenizer, folder)
    if problem:
        warnings.warn(f"the export has no tokenizer: {problem}", stacklevel=2)
    ours = isinstance(config, KerpleNeoXConfig)
    names, weights = WeightNames.of(spec, theirs), cast_weights(checkpoint, dtype)
    shapes = dict(names.all_parts(outlines(weights).items()))
    write_safetensors(folder, shapes, names.all_parts(weights.items()))
    _write_config(config, folder, outlines(weights)[EMBEDDING].dtype)
    GenerationConfig(bos_token_id=eos, eos_token_id=eos, pad_token_id=eos).save_pretrained(folder)
    if ours:
        _write_code(folder)
    if own_kernel:
        _write_own_kernel(folder, canonical_name(spec.pos_emb))
    (folder / "README.md").write_text(model_card(checkpoint, config, problem), encoding="utf-8")
    # Of what decides the numbers; texts and the tokenizer's settings may be edited.
    write_checksums(folder, only=("*.safetensors", "config.json", TOKENIZER, "*.py"))


def _write_code(folder: Path) -> None:
    """What the model computes, in one flat folder: transformers follows no other imports."""
    here = Path(__file__).parent
    for name in MODEL_FILES:
        source = (here / name).read_text(encoding="utf-8")
        flat = source.replace("from megatron.model.", "from .")
        (folder / name).write_text(flat, encoding="utf-8")
    for name in FORMULA_FILES:
        shutil.copyfile(here.parents[1] / "model" / name, folder / name)
    (folder / "keys_kerple.py").write_text(written_out(), encoding="utf-8")


def _write_own_kernel(folder: Path, pos_emb: str) -> None:
    """The user's class beside ours, imported by the model so that transformers copies it too."""
    cls = positional_embedding_class(pos_emb)
    (folder / OWN_KERNEL).write_text(standalone_source(cls, pos_emb), encoding="utf-8")
    model = folder / "modeling_kerple.py"
    line = f"from .{Path(OWN_KERNEL).stem} import {cls.__name__}  # noqa: E402, F401\n"
    model.write_text(model.read_text(encoding="utf-8") + "\n" + line, encoding="utf-8")


def _tokenizer(checkpoint: Checkpoint) -> tuple[Tokenizer | None, str | None]:
    try:
        tokenizer = tokenizer_of(checkpoint.args.tokenizer, checkpoint.files.directory)
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
    values["architectures"] = [
        "KerpleNeoXForCausalLM" if ours else ARCHITECTURES[config.model_type].causal_lm
    ]
    values["dtype"] = str(dtype).removeprefix("torch.")
    if ours:
        values["auto_map"] = _AUTO_MAP
    text = json.dumps(values, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


# A Hugging Face folder as a checkpoint.


def read_hf_checkpoint(files: CheckpointFiles) -> Checkpoint:
    """Weights and config of a folder written by our converter or by `save_pretrained`."""
    folder = files.directory
    config, args = read_config(folder)
    args = args.replace(**tokenizer_settings(folder))
    theirs = _read_weights(files)
    names = WeightNames.of(ModelSpec.from_args(args, 1), ARCHITECTURES.get(config.model_type))
    try:
        found = names.to_ours(theirs)
        shapes = outlines(theirs)
        weights = LazyWeights(
            {name: names.whole(name, [shapes[p] for p in parts]) for name, parts in found.items()},
            lambda name: names.whole(name, [theirs[part] for part in found[name]]),
        )
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    if EMBEDDING not in weights:
        raise CheckpointError(f"{folder}: holds no {names.to_theirs(EMBEDDING)[1][0]}")
    iteration = getattr(config, "iteration", 0)
    return Checkpoint(weights, args, files, "hf", iteration if isinstance(iteration, int) else 0)


def read_config(folder: Path) -> tuple[PretrainedConfig, NeoXArgs]:
    """config.json as transformers reads it, and as ours."""
    file = folder / "config.json"
    values = read_object(file)
    kind, ours = str(values.get("model_type")), KerpleNeoXConfig.model_type
    if kind != ours and kind not in ARCHITECTURES:
        raise CheckpointError(
            f"{file}: model_type {values.get('model_type')!r:.80} is not one that can be "
            f"converted; there are {', '.join([ours, *ARCHITECTURES])}"
        )
    cls: Any = KerpleNeoXConfig if kind == ours else CONFIG_MAPPING[kind]
    try:
        config = cls.from_dict(values)
        return config, args_from_hf(config, folder)
    except KerpleError as error:
        raise CheckpointError(f"{file}: {error}") from error
    except Exception as error:  # transformers' own checks raise any type
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{file}: is not a config of {cls.model_type} ({type(error).__name__}: {reason})"
        ) from error


def _read_weights(files: CheckpointFiles) -> Mapping[str, Tensor]:
    folder, found = files.directory, files.hf_weights
    if not found:
        raise CheckpointError(f"{folder}: holds neither *.safetensors nor pytorch_model*.bin")
    for index in folder.glob(f"*{found[0].suffix}.index.json"):
        table = read_object(index).get("weight_map", {})
        named = {str(name) for name in table.values()} if isinstance(table, dict) else set()
        if missing := sorted(named - {path.name for path in found}):
            raise CheckpointError(f"{folder}: incomplete, missing {', '.join(missing)}")
    if found[0].suffix == ".safetensors":
        return read_safetensors(found)
    return {name: tensor for path in found for name, tensor in load_mapping(path).items()}
