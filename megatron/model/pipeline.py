"""The same list of layers, handed to DeepSpeed's PipelineModule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from torch import Tensor, nn

from megatron.model.embedding import Embedding, UntiedHead, tied_logits
from megatron.model.layer_list import Layer, LayerFactory
from megatron.model.loss import head_losses, loss_chunk, masked_mean
from megatron.model.spec import ModelSpec
from megatron.mpu import SERIAL, ParallelState, TensorParallel


class _Built(LayerSpec):
    """A layer made by a factory method; DeepSpeed looks at `typename` to deal out the layers."""

    def __init__(self, typename: type[nn.Module], make: Callable[[], nn.Module]) -> None:
        super().__init__(typename)
        self.make = make

    def build(self, log: bool = False) -> nn.Module:
        return self.make()


class _TiedEmbedding(TiedLayerSpec):
    """The embedding, once as the first layer and once as the head."""

    def __init__(
        self,
        typename: type[nn.Module],
        make: Callable[[], nn.Module],
        forward_fn: Callable[..., Tensor] | None = None,
    ) -> None:
        super().__init__(
            "embedding",
            typename,
            forward_fn=forward_fn,
            tied_weight_attr="word_embeddings.weight",
        )
        self.make = make

    def build(self, log: bool = False) -> nn.Module:
        return self.make()


class PipelineLoss:
    """The last stage's loss against (labels, loss mask); it applies the head itself."""

    def __init__(self, vocab_tp: TensorParallel) -> None:
        self.vocab_tp = vocab_tp
        self.logits_of: Callable[[Tensor], Tensor] | None = None
        self.vocabulary = 0

    def apply_head_of(self, module: PipelineModule, spec: ModelSpec) -> None:
        """Find the head among this stage's layers; other stages have none."""
        self.vocabulary = spec.padded_vocab_size
        if not spec.no_weight_tying:
            embedding = module.tied_modules["embedding"] if module.tied_modules else None
            self.logits_of = None if embedding is None else partial(tied_logits, embedding)
        for layer in module.modules():
            if isinstance(layer, UntiedHead):
                self.logits_of = layer.logits

    def __call__(self, hidden: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        labels, mask = targets
        assert self.logits_of is not None
        chunk = loss_chunk(labels.numel(), self.vocabulary)
        losses = head_losses(self.logits_of, hidden, labels, self.vocab_tp, chunk)
        return masked_mean(losses, mask)


def _hidden_only(embedding: nn.Module, x: Tensor) -> Tensor:
    """A tied head as a layer: the loss makes the logits."""
    return x


def layer_specs(spec: ModelSpec, tp: TensorParallel) -> list[Any]:
    """The list of layers as DeepSpeed's layer specs."""
    tied = not spec.no_weight_tying
    specs: list[Any] = []
    for layer in LayerFactory(spec, tp, pipelined=True).layers():
        if not isinstance(layer, Layer):
            specs.append(layer)
        elif layer.is_tied_head:
            specs.append(_TiedEmbedding(layer.kind, layer.make, forward_fn=_hidden_only))
        elif layer.kind is Embedding and tied:
            specs.append(_TiedEmbedding(layer.kind, layer.make))
        else:
            specs.append(_Built(layer.kind, layer.make))
    return specs


def build_pipeline(
    spec: ModelSpec, parallel: ParallelState, partition_method: str = "type:transformer|mlp"
) -> PipelineModule:
    """This rank's stage of the model."""
    row_split_head = spec.no_weight_tying and spec.output_layer_parallelism == "row"
    interval = spec.checkpoint_num_layers if spec.checkpoint_activations else 0
    loss = PipelineLoss(SERIAL if row_split_head else parallel.tp)
    module = PipelineModule(
        layer_specs(spec, parallel.tp),
        topology=parallel.topology,
        loss_fn=loss,
        partition_method=partition_method,
        activation_checkpoint_interval=interval,
        activation_checkpoint_func=non_reentrant_checkpoint,
        checkpointable_layers=["TransformerLayer"],
    )
    loss.apply_head_of(module, spec)
    return module
