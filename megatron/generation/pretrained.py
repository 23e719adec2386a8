"""`kerple.load_pretrained(PATH)`: a model from any checkpoint, with its identity."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from megatron.atomic_files import fingerprint
from megatron.checkpoints import (
    Checkpoint,
    CheckpointFiles,
    find_files,
    place_weights,
    read_checkpoint,
)
from megatron.checkpoints.reading import saved_args, with_tokenizer_of_folder
from megatron.checkpoints.saved_config import check_same_model, config_to_resume, tokenizer_of
from megatron.checkpoints.sharding import EMBEDDING
from megatron.checkpoints.universal import PARAMETERS
from megatron.errors import EvaluationError, GenerationError
from megatron.model import GPTModel
from megatron.mpu.parallel_layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    parameter_facts,
)
from megatron.neox_arguments import NeoXArgs, allowed_code

if TYPE_CHECKING:
    from megatron.model.cache import Cache
    from megatron.model.transformer import State
    from megatron.tokenizer import Tokenizer

DTYPES: dict[str, torch.dtype | Literal["int8"]] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": "int8",
}
INT8_ROWS = 16  # up to this many, torch's product with int8 is faster than unpacking to bf16


class PretrainedModel(GPTModel):
    """The decoder of a checkpoint, with its config, its tokenizer and generation."""

    _tokenizer_error: str | None = None

    def __init__(self, checkpoint: Checkpoint) -> None:
        # Training may use the fused softmax on dense scores, which do not fit in memory at longer
        # lengths; the other engines give the same numbers.
        super().__init__(checkpoint.spec.replace(scaled_upper_triang_masked_softmax_fusion=False))
        place_weights(self, checkpoint, checkpoint.spec)
        self.config: NeoXArgs = checkpoint.args
        self.iteration = checkpoint.iteration
        self.source: Path = checkpoint.files.directory
        self.kind = checkpoint.kind

    def forward(
        self, inputs: State, labels_BL: Tensor | None = None, *, cache: Cache | None = None
    ) -> Tensor:
        """As GPTModel's; wrong token ids are named (beyond the vocabulary, on a CPU alone)."""
        if isinstance(inputs, Tensor) and not torch.compiler.is_compiling():
            self._check_ids(inputs)
        return super().forward(inputs, labels_BL, cache=cache)

    def _check_ids(self, ids: Tensor) -> None:
        if ids.dtype not in (torch.int64, torch.int32):
            raise GenerationError(f"token ids are {ids.dtype}; give torch.long, [batch, length]")
        size = self.spec.padded_vocab_size
        if ids.device.type == "cpu" and ids.numel():
            low, high = (int(end) for end in ids.aminmax())
            if low < 0 or high >= size:
                wrong = low if low < 0 else high
                raise GenerationError(f"token id {wrong}: this model's are 0 to {size - 1}")

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the checkpoint's config; None (with a warning) if it cannot be built."""
        try:
            return tokenizer_of(self.config.tokenizer, self.source)
        except (ValueError, OSError, ImportError) as error:
            self._tokenizer_error = str(error)
            warnings.warn(f"{self.source}: no tokenizer: {error}", stacklevel=3)
            return None

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
            raise GenerationError(
                f"{self.source}: no tokenizer ({self._tokenizer_error}); give ids"
            )
        options.setdefault("stop_ids", (self.tokenizer.eod,))
        rows = [self.tokenizer.tokenize(str(text)) for text in texts]
        completions = generate(self, rows, max_new_tokens=max_new_tokens, **options)
        written = [self.tokenizer.detokenize(row) for row in completions]
        return written[0] if isinstance(prompts, str) else written


def load_pretrained(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | Literal["int8"] | None = torch.float32,
    iteration: int | None = None,
    config: NeoXArgs | Mapping[str, Any] | None = None,
    allow_kernel: str | Sequence[str] | None = None,
) -> PretrainedModel:
    """A model from any checkpoint, in evaluation mode.

    `path` is a run's directory (with `latest`), one `global_stepN` in it, or a Hugging Face folder.
    The format is detected: our checkpoints, the official KERPLE ones, GPT-NeoX's of both
    generations, any pipe- or model-parallel size. `iteration` picks a step; `config` is for
    checkpoints that contain none, and must describe the same model. `dtype=None` keeps the
    precision of the embedding's weights, `dtype="int8"` makes matrices of 8 bits, which are
    multiplied in bf16 on a CPU.
    A checkpoint with a user-defined kernel loads if its module is imported already, or with
    `allow_kernel="package.module:Class"`: otherwise no class that a checkpoint names is imported.
    """
    allowed_code.allow_kernel(allow_kernel)
    checkpoint = read_checkpoint(path, iteration=iteration, config=config)
    model = PretrainedModel(checkpoint)
    if dtype is None:
        dtype = checkpoint.weights[EMBEDDING].dtype
    if dtype == "int8":
        _use_int8(model, torch.device(device))
        dtype = torch.bfloat16
    exact = [(p, p.detach().clone()) for p in model.parameters() if parameter_facts(p).fp32]
    model.to(device=device, dtype=dtype)
    for parameter, values in exact:  # not rounded, whatever the precision of the others
        parameter.data = values.to(device)
    return model.eval()


class Int8Linear(nn.Module):
    """A linear layer whose weights are 8 bits and a factor for each output; computes in bf16."""

    scales: Tensor

    def __init__(self, linear: ColumnParallelLinear | RowParallelLinear) -> None:
        super().__init__()
        whole = linear.weight.detach().float()
        scales = (whole.abs().amax(1) / 127).clamp(min=1e-30).bfloat16()
        rounded = (whole / scales.float()[:, None]).round().clamp(-127, 127)
        self.weight = nn.Parameter(rounded.to(torch.int8), requires_grad=False)
        self.register_buffer("scales", scales)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        if len(rows) <= INT8_ROWS:
            out = torch._weight_int8pack_mm(rows, self.weight, self.scales)
        else:
            out = rows @ self.weight.to(x.dtype).T * self.scales
        out = out.unflatten(0, x.shape[:-1])
        return out if self.bias is None else out + self.bias


def _use_int8(model: GPTModel, device: torch.device) -> None:
    if device.type != "cpu":
        raise GenerationError(f"int8 weights: computed on a CPU alone, not on {device}; use bf16")
    for parent in list(model.modules()):
        for name, part in parent.named_children():
            if isinstance(part, ColumnParallelLinear | RowParallelLinear):
                setattr(parent, name, Int8Linear(part))


# The checkpoint that evaluation and generation use, its tokenizer and its identity.


class SelectedCheckpoint:
    """The checkpoint that `load` (or `save`) and `iteration` select.

    The model is loaded at the first use of `model`.
    """

    def __init__(self, args: NeoXArgs, device: str) -> None:
        args = with_tokenizer_of_folder(args)
        load, save = args.checkpoint.load, args.checkpoint.save
        place = save if load in (None, "auto") else load
        if place is None:
            raise EvaluationError("no checkpoint: set load (or save) to a run's directory")
        self._args, self._device = args, device
        self._files = find_files(place, args.checkpoint.iteration)
        self.place = place
        self.checkpoint = self._files.directory
        self.iteration = self._files.step_in_name or 0
        self.identity = _identity(self._files)
        self._given = config_to_resume(args, self.checkpoint)
        if not self._files.is_hf:
            saved, native = saved_args(self._files, args)
            check_same_model(saved, self._given, self.checkpoint, native)

    @cached_property
    def model(self) -> PretrainedModel:
        """In evaluation mode, with the settings that the config may change after training."""
        given = self._given
        name = given.evaluation.inference_dtype
        if name is None and not self._device.startswith("cpu"):
            name = given.optimization.precision
        return load_pretrained(
            self.place,
            device=self._device,
            dtype=DTYPES[name or "fp32"],
            iteration=given.checkpoint.iteration,
            config=given,
        )

    @property
    def config_hash(self) -> str:
        """Of the config saved with the weights."""
        saved = self.model.config if self._files.is_hf else saved_args(self._files, self._args)[0]
        return saved.config_hash()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, checked against the model's vocabulary."""
        tokenizer = cast("Tokenizer", tokenizer_of(self._args.tokenizer, self.checkpoint))
        check_vocabulary(tokenizer, self.model.spec.padded_vocab_size)
        return tokenizer


def check_vocabulary(tokenizer: Tokenizer, model_vocabulary: int) -> None:
    """Refuse a tokenizer that has ids the model has no embedding for."""
    if tokenizer.vocab_size > model_vocabulary:
        raise EvaluationError(
            f"tokenizer mismatch: {tokenizer.name} has {tokenizer.vocab_size} tokens, the model "
            f"only {model_vocabulary}; set tokenizer_type, vocab_file and merge_file to the ones "
            "the model was trained with"
        )


def _identity(files: CheckpointFiles) -> str:
    """Changes whenever the weights may have: names, sizes and times of the weight files."""
    place = files.directory
    weights = [
        path
        for path in place.iterdir()
        if path.suffix in (".pt", ".bin", ".safetensors") and "optim_states" not in path.name
    ]
    if files.is_universal:
        weights += (place / PARAMETERS).glob("*/fp32.pt")
    return fingerprint(
        [
            (str(path.relative_to(place)), path.stat().st_size, path.stat().st_mtime_ns)
            for path in sorted(weights)
        ]
    )
