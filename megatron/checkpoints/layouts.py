"""What lies in a checkpoint directory: DeepSpeed's files, or Hugging Face's."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from megatron.checkpoints.universal import is_universal
from megatron.errors import CheckpointError

__all__ = ["Layout", "find_layout"]

_LAYER = re.compile(r"^layer_(\d+)-model_(\d+)-model_states\.pt$")
_MP_RANK = re.compile(r"^mp_rank_(\d+)_model_states\.pt$")
_ZERO = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_(optim|model)_states\.pt$")
_STEP = re.compile(r"^global_step(\d+)$")


@dataclass(frozen=True)
class Layout:
    """The files of one checkpoint, by model-parallel rank."""

    directory: Path
    root: Path
    """Where `latest` is, or the directory itself."""
    is_hf: bool = False
    layer_files: dict[tuple[int, int], Path] = field(default_factory=dict)
    """(layer index, model-parallel rank) -> file; written with pipe_parallel_size >= 1."""
    mp_files: dict[int, Path] = field(default_factory=dict)
    zero_model_files: dict[tuple[int, int], Path] = field(default_factory=dict)
    """(data-parallel rank, model-parallel rank) -> file; ZeRO stage 3 only."""
    zero_optimizer_files: dict[tuple[int, int], Path] = field(default_factory=dict)

    @property
    def mp_size(self) -> int:
        """How many model-parallel shards there are."""
        ranks = {rank for _, rank in self.layer_files} or set(self.mp_files)
        ranks |= {rank for _, rank in self.zero_model_files}
        return max(ranks, default=-1) + 1

    @property
    def step_in_name(self) -> int | None:
        """N of `global_stepN`."""
        match = _STEP.match(self.directory.name)
        return int(match[1]) if match else None

    @property
    def is_zero3(self) -> bool:
        """Whether the parameters are spread over the data-parallel ranks."""
        return bool(self.zero_model_files)

    @property
    def is_universal(self) -> bool:
        """Whether every parameter lies whole in a folder of its own."""
        return is_universal(self.directory)

    @property
    def has_optimizer(self) -> bool:
        """Whether training states for resuming are there."""
        return bool(self.zero_optimizer_files) or self.is_universal


def find_layout(path: str | Path, iteration: int | None = None) -> Layout:
    """The checkpoint at `path`: a run's directory, one `global_stepN`, or a Hugging Face folder."""
    root = Path(path)
    if not root.exists():
        raise CheckpointError(f"{root}: no such checkpoint directory")
    if not root.is_dir():
        raise CheckpointError(f"{root}: is a file; give the directory that holds the checkpoint")
    if _is_hf(root):
        return Layout(root, root, is_hf=True)
    layout = _scan(root, root)
    if layout.layer_files or layout.mp_files or layout.zero_model_files:
        return layout
    directory = _step_directory(root, iteration)
    layout = _scan(directory, root)
    if not (layout.layer_files or layout.mp_files or layout.zero_model_files):
        raise CheckpointError(
            f"{directory}: holds neither layer_LL-model_MM-model_states.pt nor "
            "mp_rank_MM_model_states.pt files"
        )
    return layout


def _is_hf(directory: Path) -> bool:
    config = directory / "config.json"
    if not config.is_file():
        return False
    try:
        content = json.loads(config.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{config}: is not valid JSON ({error})") from error
    return isinstance(content, dict) and "model_type" in content


def _step_directory(root: Path, iteration: int | None) -> Path:
    steps = sorted(
        int(match[1])
        for entry in root.iterdir()
        if entry.is_dir() and (match := _STEP.match(entry.name))
    )
    available = f"available: {', '.join(f'global_step{n}' for n in steps) or 'none'}"
    if iteration is not None:
        chosen = root / f"global_step{iteration}"
        if not chosen.is_dir():
            raise CheckpointError(f"{root}: has no global_step{iteration} ({available})")
        return chosen
    latest = root / "latest"
    if latest.is_file():
        tag = latest.read_text("utf-8", errors="replace").strip()
        chosen = root / tag
        if not tag or "/" in tag or not chosen.is_dir():
            raise CheckpointError(
                f"{latest}: names {tag[:80]!r}, which is not there ({available}); give an "
                "iteration, or correct the file"
            )
        return chosen
    if not steps:
        raise CheckpointError(
            f"{root}: holds no checkpoint; expected `latest`, `global_stepN/`, or a Hugging Face "
            "config.json"
        )
    return root / f"global_step{steps[-1]}"


def _scan(directory: Path, root: Path) -> Layout:
    layout = Layout(directory, root)
    for entry in sorted(directory.iterdir()):
        if match := _LAYER.match(entry.name):
            layout.layer_files[int(match[1]), int(match[2])] = entry
        elif match := _MP_RANK.match(entry.name):
            layout.mp_files[int(match[1])] = entry
        elif match := _ZERO.search(entry.name):
            files = layout.zero_optimizer_files if match[3] == "optim" else layout.zero_model_files
            files[int(match[1]), int(match[2])] = entry
    _check_complete(layout)
    return layout


def _check_complete(layout: Layout) -> None:
    missing = [
        f"layer_{layer:02d}-model_{rank:02d}-model_states.pt"
        for layer in {layer for layer, _ in layout.layer_files}
        for rank in range(layout.mp_size)
        if (layer, rank) not in layout.layer_files
    ]
    if not layout.layer_files and not layout.is_zero3:
        missing = [
            f"mp_rank_{rank:02d}_model_states.pt"
            for rank in range(layout.mp_size)
            if rank not in layout.mp_files
        ]
    if missing:
        raise CheckpointError(
            f"{layout.directory}: incomplete, missing {', '.join(sorted(missing))}; "
            "copy the whole directory again"
        )
