"""Convert a checkpoint: ours, official KERPLE, GPT-NeoX or Hugging Face, any to any.

tools/convert_checkpoint.py RUN DST --to hf
tools/convert_checkpoint.py RUN DST --to native --mp 2 --pp 1
tools/convert_checkpoint.py HF_FOLDER DST --to neox --dtype bf16
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.errors import CheckpointError
from megatron.terminal import say_next, shown_command

# What a conversion writes beside the files that its checksums.json lists.
CONVERSION = re.compile(
    r"global_step\d+|latest|checksums\.json|README\.md|(generation_)?config\.json|\w+_kerple\.py"
    r"|model[\w-]*\.safetensors(\.index\.json)?|(tokenizer|vocab|special_tokens)\w*\.(json|model)"
    r"|merges\.txt"
)
DTYPES = ("fp32", "bf16", "fp16")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    from megatron.neox_arguments.command_line import add_allow_kernel_argument

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="SRC", help="run directory, global_stepN or HF folder")
    parser.add_argument("destination", metavar="DST", help="new directory")
    parser.add_argument("--to", required=True, choices=("native", "hf", "neox"))
    parser.add_argument("--mp", type=int, help="model-parallel size (native and neox; default 1)")
    parser.add_argument(
        "--pp",
        type=int,
        help="pipe-parallel size (native and neox): 0 writes one file per rank, 1 or more one file "
        "per layer. Default: 0 for native, 1 for neox",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="precision of the weights; default: keep")
    parser.add_argument("--iteration", type=int, help="which global_stepN; default: latest")
    parser.add_argument("--config", nargs="*", help="YAML files, where none was saved inside")
    parser.add_argument(
        "--with-kernel-source",
        action="store_true",
        help="hf: put the source of a pos_emb of your own into the folder, for others to run",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it exists")
    add_allow_kernel_argument(parser)
    args = parser.parse_args(arguments)
    if args.to == "hf" and (args.mp or args.pp):
        parser.error("--mp and --pp are for native and neox; Hugging Face folders are not split")
    if args.mp is not None and args.mp < 1:
        parser.error(f"--mp {args.mp}: must be at least 1")
    if args.pp is not None and args.pp < 0:
        parser.error(f"--pp {args.pp}: must not be negative")
    return args


def convert(args: argparse.Namespace) -> str:
    """Do it; returns what to say."""
    from megatron.machine import settle_accelerator

    settle_accelerator()
    import torch

    from megatron.atomic_files import new_directory
    from megatron.checkpoints import read_checkpoint
    from megatron.checkpoints.writing import write_native, write_neox
    from megatron.neox_arguments import NeoXArgs

    dtype = dict(zip(DTYPES, (torch.float32, torch.bfloat16, torch.float16), strict=True)).get(
        args.dtype
    )
    config = NeoXArgs.from_files(args.config) if args.config else None
    checkpoint = read_checkpoint(args.source, iteration=args.iteration, config=config)
    with new_directory(
        args.destination,
        overwrite=args.overwrite,
        replaceable=_is_of_a_conversion(Path(args.destination)),
        sources=[args.source, *(args.config or ())],
    ) as folder:
        if args.to == "hf":
            from megatron.checkpoints.hf.folder import write_hf

            write_hf(checkpoint, folder, dtype=dtype, with_kernel_source=args.with_kernel_source)
        else:
            write = write_native if args.to == "native" else write_neox
            pp = args.pp if args.pp is not None else int(args.to == "neox")
            write(checkpoint, folder, mp=args.mp or 1, pp=pp, dtype=dtype)
            _copy_tokenizer(checkpoint.layout.directory, folder)
    return (
        f"{args.source} ({checkpoint.kind}, step {checkpoint.iteration}, "
        f"{checkpoint.num_parameters:,} parameters) -> {args.destination} ({args.to})"
    )


def _is_of_a_conversion(folder: Path) -> Callable[[str], bool]:
    """Which names in `folder` --overwrite may replace."""
    from megatron.checkpoints.checksums import read_checksums

    try:
        listed = read_checksums(folder) or {}
    except CheckpointError:
        listed = {}
    return lambda name: name in listed or CONVERSION.fullmatch(name) is not None


def _copy_tokenizer(source: Path, folder: Path) -> None:
    """A Hugging Face folder's tokenizer travels with its weights."""
    if (source / "tokenizer.json").is_file():
        shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    print(convert(args))
    if args.to == "hf":
        loaded = (
            f"AutoModelForCausalLM.from_pretrained({args.destination!r}, trust_remote_code=True)"
        )
        say_next(f'python -c "from transformers import AutoModelForCausalLM; {loaded}"')
    else:
        say_next(f"{shown_command('inspect_checkpoint')} {args.destination}")
    return 0


NEOX_TOOL = """Export a checkpoint to Hugging Face, with the flags of GPT-NeoX's tool of this name.

tools/ckpts/convert_neox_to_hf.py --input_dir RUN/global_step1000 --output_dir DST

The weights' own config is taken where one was saved; --config_file is for where none was. What is
exported is what the model is: transformers' GPTNeoXForCausalLM where that computes the same, else
KerpleNeoXForCausalLM with its modelling file.
"""


def neox_to_hf(argv: Sequence[str] | None = None) -> int:
    """GPT-NeoX's command line, handed over."""
    parser = argparse.ArgumentParser(
        prog="convert_neox_to_hf.py",
        description=NEOX_TOOL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--input_dir", required=True, help="a global_stepN, or a run")
    parser.add_argument("--config_file", help="YAML of the model, if none lies in the checkpoint")
    parser.add_argument("--output_dir", required=True, help="a new folder")
    parser.add_argument(
        "--precision", choices=("auto", *DTYPES), default="auto", help="auto keeps the checkpoint's"
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
    options = parser.parse_args(argv)
    words = [options.input_dir, options.output_dir, "--to", "hf"]
    if options.precision != "auto":
        words += ["--dtype", options.precision]
    if options.config_file is not None:
        words += ["--config", options.config_file]
    return main(words)
