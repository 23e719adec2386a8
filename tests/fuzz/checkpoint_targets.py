"""Checkpoints in every layout, and what lies beside them, for the fuzz harness."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoints import read_checkpoint
from megatron.checkpoints.hf.folder import write_hf
from megatron.checkpoints.inspection import kernel_of
from megatron.checkpoints.reading import TOKENIZER
from megatron.checkpoints.run_state import LAYOUT, read_layout
from megatron.checkpoints.store import CHECKSUMS, CheckpointStore, write_checksums
from megatron.checkpoints.universal import parameter_folders, read_progress, read_states
from megatron.checkpoints.writing import write_native, write_neox
from megatron.training.metrics import finished_at
from tests.checkpoints.small_models import at_rest, random_model, small_args
from tests.fixture_archives import unpacked
from tests.fuzz.target import Target


def _read_and_use(folder: Path) -> object:
    checkpoint = read_checkpoint(folder)
    kernel_of(checkpoint, longest=64)
    return _sums(checkpoint.weights), checkpoint.args.to_dict(), checkpoint.iteration


def _sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The content of tensors, to the bit."""
    return {
        name: zlib.crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        if tensor.numel()
        else 0
        for name, tensor in tensors.items()
    }


def _checkpoint(folder: Path, step: Path, *, sums: bool) -> Target:
    """All files of a checkpoint, with checksums made right again or taken away."""
    files = sorted(p for p in step.rglob("*") if p.is_file() and p.name != CHECKSUMS)
    if not sums:
        (step / CHECKSUMS).unlink(missing_ok=True)
    return Target(
        folder,
        files,
        lambda path: _read_and_use(folder),
        mend=(lambda path: write_checksums(step)) if sums else None,
        must_be_honest=sums,
    )


def native(folder: Path) -> Target:
    args = small_args(pos_emb="kerple_log")
    write_native(at_rest(random_model(args), args), folder)
    return _checkpoint(folder, folder / "global_step5", sums=True)


def layers(folder: Path) -> Target:
    args = small_args(pos_emb="rpe", no_weight_tying=True)
    write_native(at_rest(random_model(args), args), folder, mp=2, pp=1)
    return _checkpoint(folder, folder / "global_step5", sums=False)


def neox(folder: Path) -> Target:
    args = small_args(pos_emb="kerple_power")
    write_neox(at_rest(random_model(args), args), folder, mp=2)
    return _checkpoint(folder, folder / "global_step5", sums=True)


def official(folder: Path) -> Target:
    shutil.copytree(unpacked("official_kerple_power_mp2"), folder, dirs_exist_ok=True)
    return _checkpoint(folder, folder / "global_step7", sums=False)


def zero3(folder: Path) -> Target:
    """Three ranks' pieces of every parameter, as DeepSpeed's stage 3 lays them."""
    args = small_args(pos_emb="kerple_log", no_weight_tying=True)
    model = random_model(args)
    step = write_native(at_rest(model, args), folder)
    (step / "mp_rank_00_model_states.pt").unlink()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    ranks = 3
    for rank in range(ranks):
        pieces = []
        for values in parameters.values():
            share = -(-values.numel() // ranks)
            padded = torch.zeros(share * ranks)
            padded[: values.numel()] = values.flatten()
            pieces.append(padded[rank * share : (rank + 1) * share])
        optimizer = {"fp32_flat_groups": [torch.cat(pieces)], "partition_count": ranks}
        prefix = step / f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": optimizer}, f"{prefix}_optim_states.pt")
        shapes = [{name: values.shape for name, values in parameters.items()}]
        torch.save({"param_shapes": shapes, "module": {}}, f"{prefix}_model_states.pt")
    write_checksums(step)
    return _checkpoint(folder, step, sums=True)


def universal(folder: Path) -> Target:
    """One folder per parameter, as the reshard tool writes them."""
    args = small_args(pos_emb="kerple_log", no_weight_tying=True, num_layers=1)
    resting = at_rest(random_model(args), args)
    step = write_native(resting, folder)
    for name, weight in resting.weights.items():
        place = step / "zero" / name
        place.mkdir(parents=True)
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            torch.save({"param": weight, "cat_dim": 0}, place / f"{key}.pt")
        torch.save(torch.tensor(5.0), place / "step.pt")
    torch.save({"param_groups": []}, step / "zero" / "optimizer_state.pt")
    progress = {"iteration": 5, "consumed_samples": 20, "schedule": {"steps": 5}}
    progress |= {"skipped_steps": 0, "vocab_size": 64}
    (step / "universal.json").write_text(json.dumps({"format": 1, **progress}))
    write_checksums(step)

    def read(path: Path) -> object:
        model = _read_and_use(folder)
        CheckpointStore(folder).verify(5)  # as every resumed run does
        folders = parameter_folders(step)
        states = [_sums(read_states(place)) for place in folders.values()]
        return model, read_progress(step), states

    target = _checkpoint(folder, step, sums=True)
    target.read = read
    return target


def run_files(folder: Path) -> Target:
    """What lies beside the weights: latest, checksums, the manifest, the layout."""
    args = small_args(pos_emb="kerple_log")
    step = write_native(at_rest(random_model(args), args), folder)
    (folder / "manifest.json").write_text(
        json.dumps({"history": [{"reason": "finished", "at_step": 5}], "data": {}})
    )

    layout = {"world_size": 2, "model_parallel_size": 2, "train_batch_size": 4}
    (step / LAYOUT).write_text(json.dumps(layout))
    write_checksums(step)

    def read(path: Path) -> object:
        finished_at(folder)
        content = _read_and_use(folder)
        CheckpointStore(folder).verify(5)
        return content, read_layout(step)

    files = [folder / "latest", step / CHECKSUMS, folder / "manifest.json", step / LAYOUT]
    return Target(folder, files, read, text=True, must_be_honest=True)


def hugging_face(folder: Path) -> Target:
    args = small_args(pos_emb="kerple_log")
    write_hf(at_rest(random_model(args), args), folder)
    names = [*folder.glob("*.safetensors"), folder / "config.json", folder / TOKENIZER]
    summed = ("*.safetensors", "config.json", TOKENIZER)
    return Target(
        folder,
        [name for name in names if name.is_file()],
        lambda path: _read_and_use(folder),
        mend=lambda path: write_checksums(folder, only=summed),
        must_be_honest=True,
    )
