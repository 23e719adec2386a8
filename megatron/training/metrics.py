"""Where numbers go: JSON lines always, TensorBoard and wandb when asked."""

from __future__ import annotations

import contextlib
import json
import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron.atomic_files import atomic_writer
from megatron.errors import OutputError
from megatron.terminal import install_command, require

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

Values = dict[str, Any]


class Sink(Protocol):
    """Takes the numbers of a step."""

    def write(self, step: int, values: Values) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl: append-only while running; a resumed run first drops the lines it repeats."""

    def __init__(self, path: Path, start_step: int, *, finished: bool = False) -> None:
        """`finished`: the run has taken all its steps and will only evaluate once more."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._keep(path, start_step, finished)
            # Unbuffered: a line that found no space must not be tried again later, in the middle.
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
        except OSError as error:  # a full disk: the next checkpoint decides, not a line of numbers
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
    """JSON has no NaN and no infinity: null stands for both."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_repeated(line: bytes, step: int, finished: bool) -> bool:
    """Whether a run that goes on after `step` writes this line again; so are lines cut short."""
    try:
        values = json.loads(line)
        own = int(values["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return True
    evaluated = "valid_loss" in values or "test_loss" in values
    if own > step or step == 0 or not line.endswith(b"\n"):
        return True  # a run without a checkpoint writes everything again, step 0 too
    return finished and own == step and evaluated


def flatten(values: Values) -> dict[str, float]:
    """Numbers by name; lists and nested groups get a name per element."""
    flat: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update(flatten({f"{name}/{key}": item for key, item in value.items()}))
        elif isinstance(value, list):
            flat.update(flatten({f"{name}/{i}": item for i, item in enumerate(value)}))
        elif isinstance(value, int | float):
            flat[name] = float(value)
    return flat


class TensorBoard:
    """Event files for TensorBoard."""

    def __init__(self, directory: str, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(directory, purge_step=start_step + 1 if start_step else None)

    def write(self, step: int, values: Values) -> None:
        for name, value in flatten(values).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A wandb run; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, args: NeoXArgs, directory: Path) -> None:
        wandb: Any = require("wandb", "use_wandb: true")
        options = args.logging
        os.environ.setdefault("WANDB_BASE_URL", options.wandb_host)
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

    def write(self, step: int, values: Values) -> None:
        self._run.log(flatten(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Sinks:
    """All sinks of a run as one; empty on ranks that do not log."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks

    def write(self, step: int, values: Values) -> None:
        for sink in self._sinks:
            sink.write(step, values)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def build_sinks(args: NeoXArgs, directory: Path | None, start_step: int, *, main: bool) -> Sinks:
    """The sinks that the config asks for."""
    sinks: list[Sink] = []
    if main and directory is not None:
        finished = start_step >= (args.optimization.train_iters or 0)
        sinks.append(JsonLines(directory / "metrics.jsonl", start_step, finished=finished))
    if main and args.logging.tensorboard_dir:
        if find_spec("tensorboard") is None:
            print(
                "tensorboard_dir is set but tensorboard is not installed: no event files, all "
                f"numbers are in metrics.jsonl ({install_command('wandb')})",
                flush=True,
            )
        else:
            sinks.append(TensorBoard(args.logging.tensorboard_dir, start_step))
    if main and args.logging.use_wandb:
        sinks.append(WeightsAndBiases(args, directory or Path()))
    return Sinks(sinks)
