"""Start a command of the package, or say in one line that the package is not installed.

Imported first, before anything of the package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NoReturn

if find_spec("megatron") is None:
    sys.exit(
        f"error: KERPLE-NeoX is not installed for {sys.executable}: run `make install` once in the "
        "checkout, then `source .venv/bin/activate`."
    )

# A script's neighbours by the name that tests know them by, whatever folder it was started from.
_package = ModuleType("tools")
_package.__path__ = [str(Path(__file__).parent)]
sys.modules.setdefault("tools", _package)


def start(name: str) -> NoReturn:
    """Run the command `name` with this process's arguments, and end with its exit code."""
    from megatron.commands import run

    sys.exit(run(name, sys.argv[1:]))


def start_main(main: Callable[[Sequence[str] | None], int | None]) -> NoReturn:
    """The same for a tool that is no command of the package."""
    from megatron.terminal import run_command

    sys.exit(run_command(main))
