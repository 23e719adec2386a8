"""Metrics of a run: JSON lines always, TensorBoard and wandb if configured; its manifest."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from kerple import __version__
from megatron.atomic_files import atomic_writer, read_json, write_text
from megatron.checkpoints.run_state import saved_data
from megatron.checkpoints.store import CheckpointStore
from megatron.errors import CheckpointError, ConfigError, OutputError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.run_keys import DataArgs
from megatron.terminal import install_command, require
from megatron.training.trainer import Hook, Trainer

Values = dict[str, Any]


class Sink(Protocol):
    """Takes the numbers of a step."""

    def write(self, step: int, values: Values) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl: append-only while running; a resumed run first drops the lines it repeats."""

    def __init__(self, path: Path, start_step: int, *, finished: bool = False) -> None:
        """`finished`: no steps are left, the run only evaluates."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._keep(path, start_step, finished)
            # Unbuffered: after a full disk, a buffered line would be written in the wrong place.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise OutputError(
                f"{path}: cannot be written ({error.strerror}); move it away, or choose another "
                "`save`"
            ) from error
        self._complained = False

    def write(self, step: int, values: Values) -> None:
        try:
            line = json.dumps(_strict({"step": step, **values}), allow_nan=False)
            self._file.write(f"{line}\n".encode())
        except OSError as error:  # a full disk: the next checkpoint fails, not a line of metrics
            if not self._complained:
                print(f"warning: {self._file.name} cannot be written: {error}", flush=True)
            self._complained = True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.fsync(self._file.fileno())
        self._file.close()

    @staticmethod
    def _keep(path: Path, step: int, finished: bool) -> None:
        if not path.is_file():
            return
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if not _is_repeated(line, step, finished)]
        if len(kept) != len(lines):
            with atomic_writer(path) as file:
                file.writelines(kept)


def _strict(value: Any) -> Any:
    """NaN and infinity as null, since JSON has neither."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_repeated(line: bytes, step: int, finished: bool) -> bool:
    """Whether a run resumed after `step` writes this line again; true for truncated lines."""
    try:
        values = json.loads(line)
        own = int(values["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return True
    if not line.endswith(b"\n"):
        return True
    if finished:
        return own == step and ("valid_loss" in values or "test_loss" in values)
    return own > step or step == 0  # a run without a checkpoint writes everything again, 0 too


def flatten(values: Values) -> dict[str, float]:
    """Numbers by name; lists (of heads, counted from 1) and groups get a name per element."""
    flat: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update(flatten({f"{name}/{key}": item for key, item in value.items()}))
        elif isinstance(value, list):
            flat.update(flatten({f"{name}/{i}": item for i, item in enumerate(value, 1)}))
        elif isinstance(value, int | float):
            flat[name] = float(value)
    return flat


NEOX_NAMES = {
    "loss": "train/lm_loss",
    "lr": "train/learning_rate",
    "loss_scale": "train/loss_scale",
    "tokens_per_second": "runtime/tokens_per_sec",
    "step_seconds": "runtime/iteration_time",
    "valid_loss": "validation/lm_loss",
    "valid_ppl": "validation/lm_loss_ppl",
    "test_loss": "test/lm_loss",
    "test_ppl": "test/lm_loss_ppl",
}
"""Our name in metrics.jsonl -> GPT-NeoX's in TensorBoard and wandb; the others keep theirs."""


def for_loggers(values: Values) -> dict[str, float]:
    """Numbers under the names that GPT-NeoX's dashboards expect."""
    return {NEOX_NAMES.get(name, name): value for name, value in flatten(values).items()}


class TensorBoard:
    """Event files for TensorBoard."""

    def __init__(self, directory: str, start_step: int, *, finished: bool) -> None:
        from torch.utils.tensorboard import SummaryWriter

        repeats = start_step > 0 and not finished
        self._writer = SummaryWriter(directory, purge_step=start_step + 1 if repeats else None)

    def write(self, step: int, values: Values) -> None:
        for name, value in for_loggers(values).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A wandb run; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, args: NeoXArgs, directory: Path) -> None:
        wandb: Any = require("wandb", "use_wandb: true")
        options = args.logging
        os.environ.setdefault("WANDB_BASE_URL", options.wandb_host)
        try:
            self._run = wandb.init(
                project=options.wandb_project,
                group=options.wandb_group,
                entity=options.wandb_team,
                name=options.wandb_run_name,
                dir=str(directory),
                config=args.to_dict(),
                resume="allow",
                id=args.config_hash()[:16],
            )
        except wandb.Error as error:
            raise ConfigError(
                f"use_wandb: {' '.join(str(error).split()):.200}. Log in once with `wandb login`, "
                "or set WANDB_MODE=offline, or use_wandb: false."
            ) from error

    def write(self, step: int, values: Values) -> None:
        self._run.log(for_loggers(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Sinks(Hook):
    """All sinks of a run as one, closed when it ends; empty on ranks that do not log."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks

    def write(self, step: int, values: Values) -> None:
        for sink in self._sinks:
            sink.write(step, values)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def on_end(self, trainer: Trainer) -> None:
        self.close()

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        self.close()


def build_sinks(
    args: NeoXArgs, directory: Path | None, start_step: int, last_step: int, *, main: bool
) -> Sinks:
    """The sinks that the config asks for, on the rank that logs."""
    sinks: list[Sink] = []
    # An evaluation alone, maybe at another length, must not be added to an existing run's metrics.
    alone = last_step == 0 and directory is not None and CheckpointStore(directory).steps()
    if not main or alone:
        return Sinks(sinks)
    finished = start_step >= last_step
    if directory is not None:
        sinks.append(JsonLines(directory / "metrics.jsonl", start_step, finished=finished))
    if args.logging.tensorboard_dir:
        if find_spec("tensorboard") is None:
            print(
                "tensorboard_dir is set but tensorboard is not installed: no event files, all "
                f"numbers are in metrics.jsonl ({install_command('wandb')})",
                flush=True,
            )
        else:
            sinks.append(TensorBoard(args.logging.tensorboard_dir, start_step, finished=finished))
    if args.logging.use_wandb:
        sinks.append(WeightsAndBiases(args, directory or Path()))
    return Sinks(sinks)


# manifest.json: config, code version, data and start times of a run.

MANIFEST = "manifest.json"
FINISHED = "finished"
PACKAGES = ("torch", "deepspeed", "numpy", "tokenizers", "transformers", "triton", "lm_eval")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those packages that are installed."""
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def data_identity(data: DataArgs) -> dict[str, Any]:
    """Of every data file: its size, and a hash of the whole index and of samples of the tokens."""
    prefixes = [data.data_path] if data.data_path else []
    for group in (data.train_data_paths, data.valid_data_paths, data.test_data_paths):
        prefixes += list(group or [])
    for split in ("train", "valid", "test"):
        prefixes += data.label_paths(split)
    found: dict[str, Any] = {}
    for prefix in dict.fromkeys(map(str, prefixes)):
        index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        if index.is_file() and tokens.is_file():
            found[prefix] = {
                "idx_bytes": index.stat().st_size,
                "idx_sha256": _sha256(index, None),
                "bin_bytes": tokens.stat().st_size,
                "bin_sample_sha256": _sha256(tokens, 64),
            }
    return found


def _sha256(path: Path, blocks: int | None) -> str:
    """Of the whole file, or of `blocks` blocks of 64 KiB spread over it: the Pile takes hours."""
    size, block = path.stat().st_size, 1 << 16
    starts = list(range(0, size, block))
    if blocks is not None and len(starts) > blocks:
        starts = [starts[i * (len(starts) - 1) // (blocks - 1)] for i in range(blocks)]
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for start in starts:
            file.seek(start)
            digest.update(file.read(block))
    return digest.hexdigest()


def _history(directory: Path) -> list[dict[str, Any]]:
    history = (read_json(directory / MANIFEST) or {}).get("history")
    entries = history if isinstance(history, list) else []
    return [entry for entry in entries if isinstance(entry, dict)]


def finished_at(directory: Path) -> int | None:
    """The step recorded as the run's last; None if it has not finished."""
    history = _history(directory)
    if not history or history[-1].get("reason") != FINISHED:
        return None
    step = history[-1].get("at_step")
    return step if isinstance(step, int) else None


def recorded_data(checkpoint: Path) -> dict[str, Any] | None:
    """Sizes and hashes of the data that `checkpoint` was trained on, if it is recorded."""
    data = saved_data(checkpoint) or (read_json(checkpoint.parent / MANIFEST) or {}).get("data")
    return data if isinstance(data, dict) else None


def check_data(checkpoint: Path, data: DataArgs, allow_changed: Iterable[str]) -> list[str]:
    """Refuse to resume `checkpoint` with data whose content differs from its training data.

    The checkpoint records its data; for one of an earlier version the manifest beside it does.
    Returns warnings: without both, the data cannot be compared.
    """
    if {"data_path", "train_data_paths"} & set(allow_changed):
        return []
    path, recorded = checkpoint, saved_data(checkpoint)
    if recorded is None:
        path = checkpoint.parent / MANIFEST
        manifest = read_json(path) if path.exists() else {}
        if manifest is not None and "data" not in manifest:
            return [f"warning: {path} names no data: whether this data is the run's is not checked"]
        recorded = (manifest or {}).get("data")
    if not isinstance(recorded, dict):
        raise CheckpointError(
            f"{path}: is damaged, so that the data cannot be compared with the run's. Put a copy "
            "of it back; or add allow_changed: [data_path] to continue with the data as it is now."
        )
    now = data_identity(data)
    if len(now) != len(recorded):  # `check_agreement` compares their names
        return [f"warning: {path} names {len(recorded)} data files, the config {len(now)}"]
    pairs = zip(now.items(), recorded.values(), strict=True)
    changed = [prefix for (prefix, identity), before in pairs if identity != before]
    if changed:
        raise CheckpointError(
            f"{path}: was trained on other data than {', '.join(changed)} holds now (another size "
            "or hash). Use the same files; or start a new run with another `save`; or add "
            "allow_changed: [data_path]."
        )
    return []


class Manifest(Hook):
    """Written at every start and stop; the history of earlier starts is kept."""

    def __init__(
        self,
        directory: Path,
        args: NeoXArgs,
        parameters: int,
        world_size: int,
        data: dict[str, Any],
    ) -> None:
        self.path = directory / MANIFEST
        self.content: dict[str, Any] = {
            "kerple_neox": __version__,
            "config": args.to_dict(),
            "config_hash": args.config_hash(),
            "parameters": parameters,
            "seed": args.runtime.seed,
            "git_commit": _git("rev-parse", "HEAD"),
            "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
            "python": platform.python_version(),
            "packages": installed_versions(PACKAGES),
            "command": sys.argv[:1],
            "data": data,
            "world_size": world_size,
            "history": _history(directory),
        }

    def on_start(self, trainer: Trainer) -> None:
        self.content["history"].append({"started": time.time(), "from_step": trainer.step})
        self._write()

    def on_end(self, trainer: Trainer) -> None:
        self._stopped(trainer.step, trainer.stop_reason or FINISHED)

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        self._stopped(trainer.step, f"failed: {type(error).__name__}: {error}")

    def _stopped(self, step: int, reason: str) -> None:
        stopped = {"stopped": time.time(), "at_step": step, "reason": reason}
        self.content["history"][-1].update(stopped)
        self._write()

    def _write(self) -> None:
        write_text(self.path, json.dumps(self.content, indent=1), parents=True)
