"""manifest.json: what this run is, and when it ran."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron import __version__
from megatron.atomic_files import write_text
from megatron.errors import CheckpointError

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

NAME = "manifest.json"
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


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _data_identity(args: NeoXArgs) -> dict[str, Any]:
    """Of every data file: its size, and a hash of the whole index and of samples of the tokens."""
    data = args.data
    prefixes = [data.data_path] if data.data_path else []
    for group in (data.train_data_paths, data.valid_data_paths, data.test_data_paths):
        prefixes += list(group or [])
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


def _read(directory: Path) -> dict[str, Any]:
    """The manifest of a run; {} if there is none, or none that can be read."""
    try:
        content = json.loads((directory / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _history(directory: Path) -> list[dict[str, Any]]:
    history = _read(directory).get("history")
    entries = history if isinstance(history, list) else []
    return [entry for entry in entries if isinstance(entry, dict)]


def finished_at(directory: Path) -> int | None:
    """The step at which the run there said that it had finished; None: it has not."""
    history = _history(directory)
    if not history or history[-1].get("reason") != FINISHED:
        return None
    step = history[-1].get("at_step")
    return step if isinstance(step, int) else None


def check_data(directory: Path, args: NeoXArgs) -> None:
    """Refuse to go on with other data than the run in `directory` recorded, wherever it lies."""
    recorded = _read(directory).get("data")
    allowed = {"data_path", "train_data_paths"} & set(args.checkpoint.allow_changed or ())
    if not isinstance(recorded, dict) or not recorded or allowed:
        return
    now = _data_identity(args)
    if len(now) == len(recorded):
        pairs = zip(now.items(), recorded.values(), strict=True)
        changed = [prefix for (prefix, identity), before in pairs if identity != before]
    else:
        changed = []  # compared by their names
    if changed:
        raise CheckpointError(
            f"{directory}: was trained on other data than {', '.join(changed)} holds now (another "
            "size or hash than in manifest.json). Use the same files; or start a new run with "
            "another `save`; or add allow_changed: [data_path]."
        )


class Manifest:
    """Written at every start and stop; the history of earlier starts is kept."""

    def __init__(self, directory: Path, args: NeoXArgs, parameters: int, world_size: int) -> None:
        self.path = directory / NAME
        self.content: dict[str, Any] = {
            "kerple_neox": __version__,
            "config": args.to_dict(),
            "config_hash": args.config_hash(),
            "parameters": parameters,
            "seed": args.runtime.seed,
            "git_commit": _git("rev-parse", "HEAD"),
            "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
            "python": platform.python_version(),
            "packages": _versions(),
            "command": sys.argv[:1],
            "data": _data_identity(args),
            "world_size": world_size,
            "history": _history(directory),
        }

    def started(self, step: int) -> None:
        self.content["history"].append({"started": time.time(), "from_step": step})
        self._write()

    def stopped(self, step: int, reason: str) -> None:
        self.content["history"][-1].update(
            {"stopped": time.time(), "at_step": step, "reason": reason}
        )
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, json.dumps(self.content, indent=1))
