"""The `lm_eval` command with our model: all arguments are lm-eval's own.

    kerple lm_eval run --model kerple_neox --model_args pretrained=PATH --tasks TASK
    python -m megatron.evaluation.lm_eval_cli run ...

lm-eval 0.4.13 finds models in a table of its own package and asks neither entry points nor
`--include_path` for others, so our name is added to its registry before its command runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron.terminal import require, run_command

MODEL = "kerple_neox"
TARGET = "megatron.evaluation.lm_eval_adapter:KerpleNeoXLM"


def register() -> None:
    """Add our model to lm-eval's registry, as a reference followed only if it is asked for."""
    require("lm_eval.models", "the lm_eval command")
    from lm_eval.api.registry import model_registry

    if MODEL not in model_registry:
        model_registry.register(MODEL, target=TARGET)


def main(argv: Sequence[str] | None = None) -> int:
    """lm-eval's command line."""
    register()
    from lm_eval.__main__ import cli_evaluate

    if argv is not None:
        sys.argv = ["lm_eval", *argv]
    cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
