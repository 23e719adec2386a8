"""Where DeepSpeed keeps the optimizer's numbers, and with ZeRO 3 the weights.

That every number of an engine is read and set is held by test_universal.py, layout by layout.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kerple
from megatron.checkpoints.store import write_checksums
from megatron.errors import CheckpointError
from tests.checkpoints.small_models import logits_of, saved_model, tokens


def test_partitions_of_zero_stage_3_are_joined(tmp_path: Path) -> None:
    """Each parameter lies in equal pieces on the ranks; odd sizes are padded on the last."""
    model = saved_model(tmp_path, pos_emb="kerple_log", no_weight_tying=True)
    step = tmp_path / "global_step5"
    (step / "mp_rank_00_model_states.pt").unlink()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    names = list(parameters)
    groups = [names[::2], names[1::2]]  # parameter groups: with and without weight decay
    ranks = 3
    for rank in range(ranks):
        flat = []
        for group in groups:
            pieces = []
            for name in group:
                values = parameters[name].flatten()
                share = -(-values.numel() // ranks)
                padded = torch.cat((values, torch.full((share * ranks - values.numel(),), 9.0)))
                pieces.append(padded[rank * share : (rank + 1) * share])
            flat.append(torch.cat(pieces))
        prefix = step / f"zero_pp_rank_{rank}_mp_rank_00"
        optimizer = {"fp32_flat_groups": flat, "partition_count": ranks}
        torch.save({"optimizer_state_dict": optimizer}, f"{prefix}_optim_states.pt")
        shapes = [{name: parameters[name].shape for name in group} for group in groups]
        torch.save({"param_shapes": shapes, "module": {}}, f"{prefix}_model_states.pt")
    write_checksums(step)
    loaded = kerple.load_pretrained(tmp_path)
    assert torch.equal(logits_of(loaded, tokens()), logits_of(model, tokens()))
    (step / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    write_checksums(step)
    with pytest.raises(CheckpointError, match="2 of 3 optimizer files"):
        kerple.load_pretrained(tmp_path)
