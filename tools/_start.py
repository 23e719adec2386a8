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


_CONVERT = "tools/convert_checkpoint.py"
_CHAT = "tools/datasets/preprocess_data.py --chat-template FILE with its other flags"
ANSWERS = {
    "convert_neox_to_mamba_ssm": (
        "Mamba is not implemented here",
        f"{_CONVERT} RUN NEW_FOLDER --to hf for transformers",
    ),
    "convert_raw_llama_weights_to_neox": (
        "weights in Meta's own files are not read, those in a Hugging Face folder are",
        f"{_CONVERT} HF_FOLDER NEW_FOLDER --to neox",
    ),
    "merge20b": (
        "one command changes the number of model-parallel ranks",
        f"{_CONVERT} RUN NEW_FOLDER --to neox --mp 1",
    ),
    "upload": (
        "nothing is uploaded from here; the folder of --to hf can be, by Hugging Face's own tool",
        f"{_CONVERT} RUN NEW_FOLDER --to hf",
    ),
    "preprocess_data_with_chat_template": (
        "a flag of the tool for text does it, and writes the same two files",
        _CHAT,
    ),
    "preprocess_data_with_mask": ("label masks are made of conversations by a template", _CHAT),
}
"""A tool of GPT-NeoX's that is not here by that name: why, and what to run."""


def answer() -> NoReturn:
    """For the tool that was started."""
    reason, command = ANSWERS[Path(sys.argv[0]).stem]
    sys.exit(f"error: {Path(sys.argv[0]).name}: {reason}. Use: python {command}")


def start_main(main: Main) -> NoReturn:
    """`start` for a tool that is not a command of the package."""
    exit_with(lambda: run_command(main))
