"""The whole decoder in one process (or one tensor-parallel group): tokens in, logits or losses out.

Shape suffixes: B batch, L length, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.model.cache import Cache, LayerCache, row_starts
from megatron.model.embedding import Embedding, Head, TiedHead, full_logits
from megatron.model.layer_list import Function, Layer, LayerFactory, ModelSpec
from megatron.model.loss import DEFAULT_LOSS_CHUNK, head_losses, loss_chunk
from megatron.model.position_base import PositionalEmbedding, TableEmbedding, Tables
from megatron.model.reach import FALLING, HORIZON
from megatron.model.rotary_and_input_positions import RotaryEmbedding
from megatron.model.transformer import PositionTables, State, TransformerLayer, drop_tables
from megatron.mpu.collectives import SERIAL, WHOLE, SequenceParallel, TensorParallel

SMALL_WEIGHT = 4096  # numbers: a kernel's are compared by value, whoever writes them
_State = tuple[int, int, list[float] | None]
_BY_POSITION = ("input", "rotation")  # kinds that are told each token's position


class GPTModel(nn.Module):
    """The layers in sequence. State-dict names are GPT-NeoX's: `sequential.<index>.<name>`."""

    def __init__(
        self, spec: ModelSpec, tp: TensorParallel = SERIAL, sp: SequenceParallel = WHOLE
    ) -> None:
        super().__init__()
        self.spec = spec
        self.tp, self.sp = tp, sp
        self._found: tuple[list[_State], list[int | None]] | None = None
        self.sequential = nn.ModuleList()
        factory = LayerFactory(spec, tp, sp=sp)
        self._layer_specs = factory.layer_specs
        for layer in factory.layers():
            if not isinstance(layer, Layer):
                self.sequential.append(FunctionLayer(layer))
            elif layer.is_tied_head:
                self.sequential.append(TiedHead(self.embedding))
            else:
                self.sequential.append(layer.make())

    @property
    def embedding(self) -> Embedding:
        return cast(Embedding, self.sequential[0])

    @property
    def layers(self) -> list[TransformerLayer]:
        return [layer for layer in self.sequential if isinstance(layer, TransformerLayer)]

    @property
    def head(self) -> Head:
        return cast(Head, self.sequential[-1])

    @property
    def device(self) -> torch.device:
        return self.embedding.word_embeddings.weight.device

    def num_parameters(self) -> int:
        """Parameters on this rank."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(
        self, inputs: State, labels_BL: Tensor | None = None, *, cache: Cache | None = None
    ) -> Tensor:
        """Logits of the next token, [B, L, V]; with labels, their losses [B, L].

        Inputs are tokens [B, L], or with them where the document of each begins, [B, L]. Ranks that
        share sequences get all tokens and labels, and return what belongs to their own positions.
        """
        if labels_BL is not None:
            labels_BL = self.sp.own(labels_BL)
            chunk: int | None = DEFAULT_LOSS_CHUNK
            if torch.is_grad_enabled():
                chunk = loss_chunk(labels_BL.numel(), self.spec.padded_vocab_size)
            return self.token_losses(inputs, labels_BL, chunk)
        logits = self.head(self.hidden_states(inputs, cache))
        return full_logits(logits, self.head.vocab_tp)

    def hidden_states(self, inputs: State, cache: Cache | None = None) -> Tensor:
        """The input of the head."""
        offset = cache.length if cache is not None else 0
        rows = None
        if cache is not None and isinstance(inputs, Tensor):
            rows = row_starts(cache.starts, inputs.shape[1])
        state: State = self.embedding(inputs, offset, rows)
        owner = self.sequential[1]
        if isinstance(owner, PositionTables):
            state = owner(state, offset)
        state = self._run_layers(state, cache)
        return self.sequential[-2](drop_tables(state))

    def next_logits(
        self, tokens_BL: Tensor, cache: Cache | None = None, last_B: Tensor | None = None
    ) -> Tensor:
        """Of the token after the last one, [B, V]; those of 16,384 positions would not fit.

        `last` tells which token is each row's last one; what follows it is padding.
        """
        hidden = self.hidden_states(tokens_BL, cache)
        ends = hidden[:, -1] if last_B is None else hidden[torch.arange(len(last_B)), last_B]
        return full_logits(self.head(ends[:, None]), self.head.vocab_tp)[:, 0]

    def token_losses(
        self,
        inputs: State,
        labels_BL: Tensor,
        chunk: int | None = DEFAULT_LOSS_CHUNK,
        cache: Cache | None = None,
    ) -> Tensor:
        """The loss of each label, fp32 [B, L].

        Logits exist for `chunk` tokens at a time only (see loss.py); None takes all at once.
        """
        hidden = self.hidden_states(inputs, cache)
        return head_losses(self.head, hidden, labels_BL, self.head.vocab_tp, chunk)

    def new_cache(self, padding: int = 0) -> Cache:
        """An empty cache of keys and values.

        A layer with a window, or with a kernel beyond whose reach every weight is 0, keeps as many
        tokens, and `padding` more: so many at the end may be no row's own.
        """
        kept = []
        for layer, reach in zip(self.layers, self._known_reaches(), strict=True):
            bounds = [bound for bound in (layer.attention.window, reach) if bound is not None]
            kept.append(min(bounds) + padding if bounds else None)
        return Cache(kept)

    def _known_reaches(self) -> list[int | None]:
        """Those of the weights as they are: found once in inference, each time in training.

        Not noticed: a matrix written through `.data` between two caches. Numbers of heads are.
        """
        weights = list(self.parameters())
        if self.training or any(weight.is_inference() for weight in weights):
            return self._reaches()
        now = [(w.data_ptr(), w._version, _small_values(w)) for w in weights]
        if self._found is None or self._found[0] != now:
            self._found = now, self._reaches()
        return self._found[1]

    def train(self, mode: bool = True) -> GPTModel:
        self._found = None  # an optimizer may write weights without counting versions
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GPTModel:
        self._found = None
        return super()._apply(fn, recurse)

    def _reaches(self) -> list[int | None]:
        """How many of the nearest tokens each layer can see, whatever the text."""
        kernels = list(self.positional_embeddings())
        if not kernels or not all(type(kernel) in FALLING for kernel in kernels):
            return [None] * len(self.layers)
        word = self.embedding.word_embeddings.weight.new_empty(1, 1, self.spec.hidden_size)
        owner = self.sequential[1]
        far = owner(word, HORIZON - 1) if isinstance(owner, PositionTables) else word
        return [layer.reach(far, HORIZON) for layer in self.layers]

    def context_seen(self) -> int | None:
        """How many tokens before it a prediction depends on at most, wherever it stands.

        Windows add up over layers. None: on all, or on the token's place in the text.
        """
        for module in self.positional_embeddings():
            if module.kind not in ("tables", "none") and type(module) is not RotaryEmbedding:
                return None
        windows = [layer.attention.window for layer in self.layers]
        tempered = any(layer.attention.temperature is not None for layer in self.layers)
        if tempered or self.by_length or None in windows:
            return None
        return sum(window - 1 for window in windows if window is not None)

    @property
    def by_length(self) -> bool:
        """Whether positions depend on the length of the text at hand: it is read as a whole."""
        return any(getattr(module, "by_length", False) for module in self.positional_embeddings())

    @property
    def rows_may_differ(self) -> bool:
        """Whether the rows of a cache may be of different lengths."""
        own = [module for module in self.positional_embeddings() if module.kind in _BY_POSITION]
        takes = (inspect.signature(module.forward).parameters for module in own)
        return not self.by_length and all({"positions", "positions_BL"} & set(t) for t in takes)

    def positional_embeddings(self) -> Iterator[PositionalEmbedding]:
        """The modules that hold or make positions, each once."""
        for module in self.modules():
            if isinstance(module, PositionalEmbedding):
                yield module

    def positional_tables(self, length: int) -> Tables:
        """The tables over distance that the (first) layer adds and multiplies with."""
        for module in self.positional_embeddings():
            if isinstance(module, TableEmbedding):
                return module(length)
        return Tables()

    def set_window(self, window: int | None) -> None:
        """Let every layer see the last `window` distances; None: each its own window again."""
        for layer, spec in zip(self.layers, self._layer_specs, strict=True):
            layer.attention.window = window or spec.attention_window

    def _run_layers(self, state: State, cache: Cache | None) -> State:
        if self.training and self.spec.checkpoint_activations and torch.is_grad_enabled():
            return self._run_checkpointed(state)
        caches: list[LayerCache | None] = (
            list(cache.layers) if cache is not None else [None] * self.spec.num_layers
        )
        for layer, layer_cache in zip(self.layers, caches, strict=True):
            state = layer(state, layer_cache)
        return state

    def _run_checkpointed(self, state: State) -> State:
        """Activation checkpointing: keep activations every few layers, recompute the rest."""
        layers, step = self.layers, self.spec.checkpoint_num_layers
        for start in range(0, len(layers), step):
            group = nn.Sequential(*layers[start : start + step])
            state = cast(State, checkpoint(group, state, use_reentrant=False))
        return state


def _small_values(weight: Tensor) -> list[float] | None:
    if weight.is_meta or weight.numel() > SMALL_WEIGHT:
        return None
    values: list[float] = weight.flatten().tolist()
    return values


class FunctionLayer(nn.Module):
    """A plain function as a module, so that the list's indices stay GPT-NeoX's."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
