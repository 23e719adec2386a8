"""Start a command of this checkout's package, or say in one line what is not installed.

Imported first, before anything of the package. The checkout comes first on the path: a tool runs
the code beside it, whatever other version is installed.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if find_spec("pydantic") is None:
    sys.exit(
        f"error: KERPLE-NeoX is not installed for {sys.executable}: run `make install` once in the "
        "checkout, then `source .venv/bin/activate`."
    )

from megatron.commands import start as start
from megatron.terminal import Main, exit_with, run_command

# `import tools.X` works in a script started from any folder, as in the tests.
_package = ModuleType("tools")
_package.__path__ = [str(Path(__file__).parent)]
sys.modules.setdefault("tools", _package)


def answer(reason: str, command: str) -> NoReturn:
    """For a tool of GPT-NeoX's that is not here by that name: why, and what to run."""
    sys.exit(f"error: {Path(sys.argv[0]).name}: {reason}. Use: python {command}")


def start_main(main: Main) -> NoReturn:
    """`start` for a tool that is not a command of the package."""
    exit_with(lambda: run_command(main))
