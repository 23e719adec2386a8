"""The `lm_eval` command with our model, without installing anything.

python -m megatron.evaluation.lm_eval_cli run --model kerple_neox --model_args pretrained=PATH ...
"""

from __future__ import annotations

from lm_eval.__main__ import cli_evaluate

from megatron.evaluation import lm_eval_hook


def main() -> None:
    """All arguments are lm-eval's own."""
    lm_eval_hook.watch()
    cli_evaluate()


if __name__ == "__main__":
    main()
