"""At the start all ranks compare their config, code and data, and check that they share `save`.

A rank with other data would train without an error, and one that writes to a directory of its own
leaves checkpoints without its part of the model.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import time
import uuid
from pathlib import Path

import torch.distributed as dist

from megatron.errors import ConfigError
from megatron.mpu.collectives import gather_objects
from megatron.neox_arguments.run_keys import DataArgs
from megatron.terminal import PACKAGE
from megatron.training.metrics import data_identity

TOKEN = ".job_token"  # noqa: S105 - a file's name
PATIENCE = 10.0  # seconds until a network file system shows a new file

Facts = dict[str, str]


def check_ranks_agree(config_hash: str, data: DataArgs, save: Path | None) -> None:
    """Raise, on all ranks, what differs from rank 0, with the hosts and ranks it differs on."""
    if dist.get_world_size() == 1:
        return
    gathered = gather_objects((socket.gethostname(), facts_of(config_hash, data)))
    problems = differences(gathered) + _unseen(save)
    if problems:
        raise ConfigError("; ".join(problems))


def facts_of(config_hash: str, data: DataArgs) -> Facts:
    """What must be the same on every rank, by name."""
    code = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        code.update(path.read_bytes())
    files = {f"data {prefix}": str(found) for prefix, found in data_identity(data).items()}
    return {"the config": config_hash, f"the code in {PACKAGE}": code.hexdigest(), **files}


def differences(gathered: list[tuple[str, Facts]]) -> list[str]:
    """One line for each fact that some rank has otherwise than rank 0, or has not at all."""
    first_host, first = gathered[0]
    names = dict.fromkeys(name for _, facts in gathered for name in facts)
    lines = []
    for name in names:
        others = [
            f"rank {rank} on {host}"
            for rank, (host, facts) in enumerate(gathered)
            if facts.get(name) != first.get(name)
        ]
        if others:
            shown = ", ".join(others[:4]) + (f" and {len(others) - 4} more" if others[4:] else "")
            lines.append(
                f"{name} on {shown} is not that of rank 0 on {first_host}. Give all hosts the same."
            )
    return lines


def _unseen(directory: Path | None) -> list[str]:
    """Rank 0 writes a token into `save`, and every rank must read it there."""
    if directory is None:
        return []
    token = [uuid.uuid4().hex]
    dist.broadcast_object_list(token, src=0)
    file = directory / TOKEN
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError):  # then it does not read it either
            directory.mkdir(parents=True, exist_ok=True)
            file.write_text(token[0], encoding="utf-8")
    dist.barrier()
    seen = gather_objects((socket.gethostname(), _reads(file, token[0])))
    if dist.get_rank() == 0:
        file.unlink(missing_ok=True)
    blind = [f"rank {rank} on {host}" for rank, (host, good) in enumerate(seen) if not good]
    if not blind:
        return []
    return [
        f"save = {directory}: what rank 0 on {seen[0][0]} writes there is not seen by "
        f"{', '.join(blind[:4])} ({len(blind)} in all). Every host must share that directory."
    ]


def _reads(file: Path, token: str) -> bool:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            if file.read_text(encoding="utf-8") == token:
                return True
        except OSError:
            pass
        time.sleep(0.1)
    return False
