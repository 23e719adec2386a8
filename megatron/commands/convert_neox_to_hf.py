"""Export a checkpoint to Hugging Face, with the flags of GPT-NeoX's tool of this name.

tools/ckpts/convert_neox_to_hf.py --input_dir RUN/global_step1000 --output_dir DST

The weights' own config is taken where one was saved; --config_file is for where none was. What is
exported is what the model is: transformers' GPTNeoXForCausalLM where that computes the same, else
KerpleNeoXForCausalLM with its modelling file.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron.commands import convert_checkpoint

PRECISIONS = ("auto", "fp16", "bf16", "fp32")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line of GPT-NeoX's tool."""
    parser = argparse.ArgumentParser(
        prog="convert_neox_to_hf.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--input_dir", required=True, help="a global_stepN, or a run")
    parser.add_argument("--config_file", help="YAML of the model, if none lies in the checkpoint")
    parser.add_argument("--output_dir", required=True, help="a new folder")
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="auto", help="auto keeps the checkpoint's"
    )
    parser.add_argument(
        "--architecture",
        choices=("neox",),
        default="neox",
        help="neox; the folder says which class it needs",
    )
    parser.add_argument(
        "--no_save_tokenizer", action="store_true", help="accepted; a tokenizer is small"
    )
    return parser.parse_args(arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Hand over to convert_checkpoint."""
    options = parse(argv)
    words = [options.input_dir, options.output_dir, "--to", "hf"]
    if options.precision != "auto":
        words += ["--dtype", options.precision]
    if options.config_file is not None:
        words += ["--config", options.config_file]
    return convert_checkpoint.main(words)
