"""The same list of layers, handed to DeepSpeed's PipelineModule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from torch import Tensor, nn

from megatron.model.embedding import tied_logits
from megatron.model.layer_list import LayerFactory, keep
from megatron.model.spec import ModelSpec
from megatron.model.transformer import drop_tables
from megatron.mpu import SERIAL, ParallelState, TensorParallel, vocab_parallel_cross_entropy

Loss = Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]


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


def masked_mean(losses: Tensor, mask: Tensor) -> Tensor:
    """The mean loss of the tokens that count."""
    mask = mask.to(losses.dtype)
    return (losses * mask).sum() / mask.sum().clamp(min=1.0)


def pipeline_loss(vocab_tp: TensorParallel) -> Loss:
    """Loss of the last stage's logits against (labels, loss mask)."""

    def loss(logits: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        labels, mask = targets
        return masked_mean(vocab_parallel_cross_entropy(logits, labels, vocab_tp), mask)

    return loss


def layer_specs(spec: ModelSpec, tp: TensorParallel) -> list[Any]:
    """GPT-NeoX's list of layers as DeepSpeed layer specs."""
    from megatron.model.embedding import Embedding, FinalNorm, UntiedHead
    from megatron.model.transformer import PositionTables, TransformerLayer

    factory = LayerFactory(spec, tp, pipelined=True)
    tied = not spec.no_weight_tying
    first = (
        _TiedEmbedding(Embedding, factory.embedding)
        if tied
        else _Built(Embedding, factory.embedding)
    )
    last = (
        _TiedEmbedding(Embedding, factory.embedding, forward_fn=tied_logits)
        if tied
        else _Built(UntiedHead, factory.untied_head)
    )
    return [
        first,
        _Built(PositionTables, factory.position_tables) if factory.has_shared_tables else keep,
        *(
            _Built(TransformerLayer, partial(factory.transformer_layer, number))
            for number in range(spec.num_layers)
        ),
        drop_tables,
        _Built(FinalNorm, factory.final_norm),
        last,
    ]


def build_pipeline(
    spec: ModelSpec, parallel: ParallelState, partition_method: str = "type:transformer|mlp"
) -> PipelineModule:
    """This rank's stage of the model."""
    row_split_head = spec.no_weight_tying and spec.output_layer_parallelism == "row"
    interval = spec.checkpoint_num_layers if spec.checkpoint_activations else 0
    return PipelineModule(
        layer_specs(spec, parallel.tp),
        topology=parallel.topology,
        loss_fn=pipeline_loss(SERIAL if row_split_head else parallel.tp),
        partition_method=partition_method,
        activation_checkpoint_interval=interval,
        activation_checkpoint_func=non_reentrant_checkpoint,
        checkpointable_layers=["TransformerLayer"],
    )
