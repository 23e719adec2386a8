"""What lies in a checkpoint directory: DeepSpeed's files, or Hugging Face's."""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from megatron.checkpoints.checksums import CHECKSUMS, problems_of, read_checksums
from megatron.checkpoints.store import TAG, CheckpointStore
from megatron.checkpoints.universal import PARAMETERS, is_universal
from megatron.errors import CheckpointError

__all__ = ["TOKENIZER", "Layout", "find_layout", "open_layout"]

TOKENIZER = "tokenizer.json"

# At most five digits: a name must not make us look for a billion others.
_LAYER = re.compile(r"^layer_(\d{1,5})-model_(\d{1,5})-model_states\.pt$")
_MP_RANK = re.compile(r"^mp_rank_(\d{1,5})_model_states\.pt$")
_ZERO = re.compile(r"zero_pp_rank_(\d{1,5})_mp_rank_(\d{1,5})_(optim|model)_states\.pt$")


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
        match = TAG.fullmatch(self.directory.name)
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
    def has_weights(self) -> bool:
        """Whether there is anything to read here."""
        return bool(self.layer_files or self.mp_files or self.zero_model_files)

    def files_to_read(self) -> list[Path]:
        """What weights and config come from: all of it is verified, optimizer states are not."""
        if self.is_hf:
            weights = [*self.directory.glob("*.safetensors")]
            weights = weights or [*self.directory.glob("pytorch_model*.bin")]
            return sorted([*weights, *self._summed_tokenizer(), self.directory / "config.json"])
        files = [*self.layer_files.values(), *self.mp_files.values()]
        if self.is_zero3:
            files += [*self.zero_model_files.values(), *self.zero_optimizer_files.values()]
        if self.is_universal:
            parameters = self.directory / PARAMETERS
            folders = [entry for entry in parameters.iterdir() if not entry.is_symlink()]
            files += [folder / "fp32.pt" for folder in folders if folder.is_dir()]
        return sorted([*files, *(self.directory / "configs").glob("*.y*ml")])

    def _summed_tokenizer(self) -> list[Path]:
        """Our conversions sum the tokenizer too; older ones did not, so it cannot be verified."""
        with contextlib.suppress(CheckpointError):  # an unreadable list is reported with the rest
            if TOKENIZER in (read_checksums(self.directory) or {}):
                return [self.directory / TOKENIZER]
        return []


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
    if layout.has_weights:
        return layout
    store = CheckpointStore(root)
    step = store.find(iteration)
    if step is None:
        raise CheckpointError(
            f"{root}: holds no checkpoint; expected `latest`, `global_stepN/`, or a Hugging Face "
            "config.json"
        )
    layout = _scan(store.path(step), root)
    if not layout.has_weights:
        raise CheckpointError(
            f"{layout.directory}: holds neither layer_LL-model_MM-model_states.pt nor "
            "mp_rank_MM_model_states.pt files"
        )
    return layout


def open_layout(path: str | Path, iteration: int | None = None) -> Layout:
    """The checkpoint at `path`, its weights and config proven to be what was written.

    Every command opens checkpoints here. Those of other programs have no checksums, which is said.
    """
    layout = find_layout(path, iteration)
    step = layout.step_in_name
    if step is not None:
        proven = CheckpointStore(layout.directory.parent).verify(step, layout.files_to_read())
    else:
        problems = problems_of(layout.directory, layout.files_to_read())
        if problems:
            raise CheckpointError(
                f"{layout.directory} is damaged: {'; '.join(problems)}. Convert or copy it again; "
                f"if you changed it yourself, delete {CHECKSUMS}."
            )
        proven = (layout.directory / CHECKSUMS).is_file()
    if not proven:
        warnings.warn(
            f"{layout.directory}: unverified, because it has no {CHECKSUMS} (another program's, or "
            "a conversion by an older version)",
            stacklevel=3,
        )
    return layout


def _is_hf(directory: Path) -> bool:
    config = directory / "config.json"
    if not config.is_file():
        return False
    try:
        content = json.loads(config.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{config}: is not valid JSON ({error})") from error
    return isinstance(content, dict) and "model_type" in content


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
