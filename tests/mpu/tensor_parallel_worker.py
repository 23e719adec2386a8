"""Run in two processes by test_parallel_layers.py: split models against whole ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.model import GPTModel, ModelSpec
from megatron.mpu.collectives import TensorParallel
from tests.model import small_spec

SPEC = small_spec.SPEC.replace(no_weight_tying=True)
VARIANTS = {
    "column head": SPEC,
    "row head": SPEC.replace(output_layer_parallelism="row"),
    "tied": SPEC.replace(no_weight_tying=False),
    "gated": SPEC.replace(activation="geglu", mlp_multiple_of=4),
    "parallel residual": SPEC.replace(gpt_j_residual=True, norm="rmsnorm"),
    "two tables": SPEC.replace(pos_emb="kerple_bias_wht"),
    "buckets": SPEC.replace(pos_emb="rpe"),
    "slopes": SPEC.replace(pos_emb="alibi", num_attention_heads=2),
    "rotary": SPEC.replace(pos_emb="rotary"),
    "grouped heads": SPEC.replace(num_kv_heads=2),
    "qwen3": SPEC.replace(
        pos_emb="rotary",
        norm="rmsnorm",
        qk_norm="per_head",
        num_kv_heads=2,
        kv_channels=24,
        use_bias_in_attn_linear=False,
        add_qkv_bias=True,
    ),
    "score terms": SPEC.replace(
        pos_emb="none", forget_gate=True, attention_sinks=True, scalable_softmax=True
    ),
    "query features": SPEC.replace(pos_emb="kerple_inkling", inkling_distances=9),
    "scaled rows": SPEC.replace(pos_emb="bam_ssmax", forget_gate=True, attention_sinks=True),
    "bias by rows": SPEC.replace(pos_emb="fire", fire_threshold=9),
    "gates of tokens": SPEC.replace(pos_emb="cable", forget_gate=True),
}


def differences(spec: ModelSpec, tp: TensorParallel) -> dict[str, float]:
    """How far logits, losses and gradients of the split model are from the whole one's."""
    text = torch.randint(96, (2, 33), generator=torch.Generator().manual_seed(0))
    whole, split = GPTModel(spec), GPTModel(spec, tp)
    with torch.no_grad():
        logits = float((whole(text) - split(text)).abs().max())
    losses = []
    for model in (whole, split):
        loss = model(text[:, :-1], text[:, 1:])
        loss.mean().backward()
        losses.append(loss.detach())
    name = "input_layernorm" if spec.qk_norm is None else "attention.k_norm"
    replicated = f"sequential.2.{name}." + ("scale" if spec.norm == "rmsnorm" else "weight")
    gradients = [dict(model.named_parameters())[replicated].grad for model in (whole, split)]
    assert gradients[0] is not None and gradients[1] is not None
    return {
        "logits": logits,
        "losses": float((losses[0] - losses[1]).abs().max()),
        "gradient": float((gradients[0] - gradients[1]).abs().max()),
    }


def main() -> None:
    dist.init_process_group("gloo")
    tp = TensorParallel(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    found = {name: differences(spec, tp) for name, spec in VARIANTS.items()}
    if tp.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
