"""A model as an ONNX file with a cache, and such a file as a model that `complete` can run.

    input_ids [batch, length]                                -> logits [batch, length, vocabulary]
    past_key_values.N.key, .value [batch, key heads, past, D] -> present.N.key, .value, all tokens

The names are Optimum's. A past of length 0 begins a text. Tables over distance are computed inside
the graph from the kernels' parameters, so that every length works. The file holds the dense
scores [batch, heads, length, past + length]: read a long prompt in pieces.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron.checkpoints.hf.companions import write_tokenizer
from megatron.errors import GenerationError
from megatron.terminal import require

if TYPE_CHECKING:
    from megatron.generation.pretrained import PretrainedModel
    from megatron.model import GPTModel

FILE = "model.onnx"
LARGEST = 1_900_000_000  # bytes of weights in one protocol buffer; more go to a file beside it


class _TensorLayerCache:
    """One layer's cache as tensors that the graph is given and returns."""

    gate_sum = starts = None

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    kept = length

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.keys, self.values = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)
        return self.keys, self.values


class _TensorCache:
    starts = None

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        self.layers = [_TensorLayerCache(keys, values) for keys, values in pairs]

    @property
    def length(self) -> int:
        return self.layers[0].length


class _WithCache(nn.Module):
    """The model as a function of tensors only."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, past: list[Tensor]) -> tuple[Tensor, ...]:
        cache = _TensorCache(past)
        logits = self.model(input_ids, cache=cache)
        return (logits, *(each for layer in cache.layers for each in (layer.keys, layer.values)))


def _names(kind: str, layers: int) -> list[str]:
    return [f"{kind}.{layer}.{part}" for layer in range(layers) for part in ("key", "value")]


def export_onnx(model: PretrainedModel, folder: Path, *, int8: bool = False) -> None:
    """Write model.onnx, and the tokenizer beside it."""
    write_onnx(model, folder / FILE, int8=int8)
    if model.tokenizer is not None and (problem := write_tokenizer(model.tokenizer, folder)):
        warnings.warn(f"the export has no tokenizer: {problem}", stacklevel=2)


def write_onnx(model: GPTModel, path: Path, *, int8: bool = False) -> None:
    """The model as a file; with int8, its matrices are 8-bit numbers."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package, "--to onnx")
    for attention in (layer.attention for layer in model.layers):
        if attention.forget_gate is not None or attention.terms is not None:
            name = "forget_gate" if attention.forget_gate is not None else model.spec.pos_emb
            raise GenerationError(
                f"{name}: a score that depends on the text is not in an ONNX file"
            )
    if any(getattr(module, "by_length", False) for module in model.positional_embeddings()):
        raise GenerationError("rope_scaling: types dynamic and longrope are not in an ONNX file")
    for layer in model.layers:
        layer.attention.engine, layer.attention.pruning = "naive", False
    layers, head_dim = model.spec.num_layers, model.layers[0].attention.head_dim
    # No size may be 1, which torch would take for a constant; more tokens than any window, so
    # that the graph has the window's mask.
    seen = 5 + max(layer.attention.window or 0 for layer in model.layers)
    past = [torch.zeros(2, model.spec.kv_heads, seen, head_dim) for _ in range(2 * layers)]
    free = torch.export.Dim.DYNAMIC
    shapes = {"input_ids": {0: free, 1: free}, "past": [{0: free, 2: free}] * len(past)}
    with _quiet(), torch.no_grad():
        program: Any = torch.onnx.export(
            _WithCache(model),
            (torch.zeros(2, 7, dtype=torch.int64), past),
            input_names=["input_ids", *_names("past_key_values", layers)],
            output_names=["logits", *_names("present", layers)],
            dynamic_shapes=shapes,
            dynamo=True,
            verbose=False,
        )
    size = sum(parameter.nbytes for parameter in model.parameters())
    program.save(path, external_data=size > LARGEST)
    if int8:
        quantize(path)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's progress and its warnings about packages that are not needed."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
    log.setLevel(level)


def quantize(path: Path) -> None:
    """Make its matrices 8-bit numbers, by ONNX Runtime's own quantizer."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    whole = path.rename(path.with_name("whole.onnx"))
    quantize_dynamic(whole, path, weight_type=QuantType.QInt8)
    whole.unlink()


# A file in ONNX Runtime.


class OnnxCache:
    """Keys and values of the tokens seen, as the session returned them."""

    def __init__(self, past: dict[str, Any]) -> None:
        self.past = past
        self.length = 0

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        self.past = {name: array[rows.numpy()] for name, array in self.past.items()}


class OnnxModel:
    """The model of an ONNX file, for `megatron.generation.complete`."""

    device = torch.device("cpu")
    by_length = rows_may_differ = False

    def __init__(self, path: Path) -> None:
        require("onnxruntime", "--onnx")
        import onnxruntime

        if not path.is_file():
            raise GenerationError(
                f"--onnx {path}: no such file; convert_checkpoint --to onnx writes one"
            )
        try:
            self.session = onnxruntime.InferenceSession(str(path))
        except Exception as error:  # ONNX Runtime has no base class of its own errors
            raise GenerationError(f"--onnx {path}: not an ONNX model ({error!s:.200})") from error
        shapes = {each.name: each.shape for each in self.session.get_inputs()}
        self.past = {name: shape for name, shape in shapes.items() if name.startswith("past_key")}
        if "input_ids" not in shapes or not self.past:
            raise GenerationError(f"--onnx {path}: no inputs input_ids and past_key_values.0.key")

    def new_cache(self, padding: int = 0) -> OnnxCache:
        """An empty past; its batch is that of the first tokens."""
        return OnnxCache({})

    def next_logits(
        self, tokens_BL: Tensor, cache: OnnxCache | None = None, last_B: Tensor | None = None
    ) -> Tensor:
        """Of the token after the last one, [batch, vocabulary]."""
        import numpy

        cache = cache or self.new_cache()
        batch = tokens_BL.shape[0]
        past = cache.past or {
            name: numpy.zeros((batch, shape[1], 0, shape[3]), numpy.float32)
            for name, shape in self.past.items()
        }
        logits, *present = self.session.run(None, {"input_ids": tokens_BL.numpy(), **past})
        cache.past = dict(zip(self.past, present, strict=True))
        cache.length += tokens_BL.shape[1]
        last = -1 if last_B is None else last_B.numpy()
        return torch.from_numpy(logits[numpy.arange(batch), last])
