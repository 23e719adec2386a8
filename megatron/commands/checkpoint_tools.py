"""Inspect, convert and reshard checkpoints."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.atomic_files import check_folder_writable, read_json
from megatron.errors import CheckpointError
from megatron.launcher.environment import free_port
from megatron.machine import set_deepspeed_accelerator
from megatron.neox_arguments.catalogue import label_of
from megatron.neox_arguments.command_line import add_checkpoint_arguments
from megatron.terminal import PACKAGE, command_parser, print_next_command, shown_command

INSPECT = """Show what a checkpoint holds, or what differs between two.

tools/inspect_checkpoint.py RUN
tools/inspect_checkpoint.py RUN/global_step1000 OTHER_RUN --json
"""


MOST_DISTANCES = 1 << 24
"""Of tables that are computed for `--longest`; 64 MB a head."""


def _report(args: argparse.Namespace) -> dict[str, Any]:
    """The whole report as plain data."""
    set_deepspeed_accelerator()
    from megatron.checkpoints import read_checkpoint
    from megatron.checkpoints.inspection import compare, describe, kernel_of
    from megatron.checkpoints.sharding import split_name

    checkpoint = read_checkpoint(args.path, iteration=args.iteration)
    content: dict[str, Any] = {"checkpoint": describe(checkpoint)}
    if args.other is not None:
        other = read_checkpoint(args.other)
        content["other"] = describe(other)
        content["differences"] = list(compare(checkpoint, other))
        return content
    content["kernels"] = kernel_of(checkpoint, args.longest)
    if not args.no_weights:
        content["weights"] = [
            {
                "name": name,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "mean": float(tensor.float().mean()),
                "std": float(tensor.float().std(correction=0)),
            }
            for name, tensor in sorted(checkpoint.weights.items(), key=lambda w: split_name(w[0]))
        ]
    return content


def _as_text(content: dict[str, Any], longest: int) -> str:
    """The report for people."""
    lines = _facts(content["checkpoint"])
    if "other" in content:
        lines += ["", *_facts(content["other"]), "", "differences (first | second)"]
        lines += [f"  {d['name']}: {d['what']}" for d in content["differences"]] or ["  none"]
    for kernel in content.get("kernels", ()):
        lines += ["", *_kernel(kernel, longest)]
    if "weights" in content:
        lines += ["", "weights (layer index.name)"]
    for weight in content.get("weights", ()):
        shape = " x ".join(map(str, weight["shape"]))
        numbers = f"mean {weight['mean']: .2e}  std {weight['std']:.2e}"
        lines.append(f"  {weight['name']:<44}{shape:>16}  {weight['dtype']:<9}{numbers}")
    return "\n".join(lines)


def _facts(facts: dict[str, Any]) -> list[str]:
    lines = [f"{facts['path']}"]
    for key, value in facts.items():
        if key == "bytes":
            value = f"{value / 1e6:,.1f} MB"
        elif isinstance(value, int) and not isinstance(value, bool):
            value = f"{value:,}"
        elif isinstance(value, list):
            value = ", ".join(map(str, value)) or "none"
        if key != "path":
            lines.append(f"  {key.replace('_', ' '):<22}{value}")
    return lines


def _kernel(kernel: dict[str, Any], longest: int) -> list[str]:
    from megatron.evaluation.text_tables import text_table
    from megatron.model.outline import layer_ranges

    layers = kernel.get("layers", [] if kernel["layer"] is None else [kernel["layer"]])
    name = f"{label_of(kernel['pos_emb'])} " if "pos_emb" in kernel else ""
    where = f"{name}of {layer_ranges(layers)} (from 1)" if layers else "shared by all layers"
    columns = dict(kernel["values"])
    if lengths := kernel["effective_lengths"]:
        columns["effective length"] = [
            f"> {longest}" if length is None else length for length in lengths
        ]
    rows = [[head, *cells] for head, cells in enumerate(zip(*columns.values(), strict=True), 1)]
    table = text_table(["head", *columns], rows, style="plain")
    return [f"kernel, {where}", *(f"  {line}" for line in table.splitlines())]


def inspect_checkpoint(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("inspect_checkpoint.py", INSPECT)
    parser.add_argument("path", metavar="PATH", help="run directory, global_stepN or HF folder")
    parser.add_argument("other", metavar="OTHER", nargs="?", help="compare with this one")
    parser.add_argument("--no-weights", action="store_true", help="leave out the list of weights")
    parser.add_argument("--longest", type=int, default=20480, help="effective lengths up to this")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    add_checkpoint_arguments(parser)
    args = parser.parse_args(arguments)
    if not 0 <= args.longest <= MOST_DISTANCES:
        reason = "must not be negative" if args.longest < 0 else f"at most {MOST_DISTANCES:,}"
        parser.error(f"--longest {args.longest}: {reason}")
    content = _report(args)
    if args.json:
        from megatron.checkpoints.inspection import without_nonfinite

        print(json.dumps(without_nonfinite(content), indent=2, allow_nan=False))
    else:
        print(_as_text(content, args.longest))
    return 0


CONVERT = """Convert a checkpoint (ours, official KERPLE, GPT-NeoX, Hugging Face) to another format.

tools/convert_checkpoint.py RUN DST --to hf
tools/convert_checkpoint.py RUN DST --to native --mp 2 --pp 1
tools/convert_checkpoint.py HF_FOLDER DST --to neox --dtype bf16
tools/convert_checkpoint.py RUN DST --to onnx --int8
"""

# What a conversion writes beside the files that its checksums.json lists.
CONVERSION = re.compile(
    r"global_step\d+|latest|checksums\.json|README\.md|(generation_)?config\.json|\w+_kerple\.py"
    r"|model[\w-]*\.safetensors(\.index\.json)?|(tokenizer|vocab|special_tokens)\w*\.(json|model)"
    r"|merges\.txt|model\.onnx(\.data)?"
)
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _convert_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("convert_checkpoint.py", CONVERT)
    parser.add_argument("source", metavar="SRC", help="run directory, global_stepN or HF folder")
    parser.add_argument("destination", metavar="DST", help="new directory")
    parser.add_argument("--to", required=True, choices=("native", "hf", "neox", "onnx"))
    parser.add_argument("--mp", type=int, help="model-parallel size (native and neox; default 1)")
    parser.add_argument(
        "--pp",
        type=int,
        help="pipe-parallel size (native and neox): 0 writes one file per rank, 1 or more one file "
        "per layer. Default: 0 for native, 1 for neox",
    )
    parser.add_argument(
        "--architecture",
        metavar="MODEL_TYPE",
        help="hf: transformers' class to write (llama, mistral, qwen2, ...), where several fit",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="precision of the weights; default: keep")
    parser.add_argument("--config", nargs="+", help="YAML files, where none was saved inside")
    parser.add_argument(
        "--with-kernel-source",
        action="store_true",
        help="hf: put the source of a pos_emb of your own into the folder, for others to run",
    )
    parser.add_argument("--int8", action="store_true", help="onnx: matrices as 8-bit numbers")
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it exists")
    add_checkpoint_arguments(parser)
    args = parser.parse_args(arguments)
    if args.to in ("hf", "onnx") and (args.mp is not None or args.pp is not None):
        parser.error(f"--mp and --pp are for native and neox; {args.to} is not split")
    if args.to == "onnx" and args.dtype not in (None, "fp32"):
        parser.error(f"--dtype {args.dtype}: an ONNX file is fp32, or has int8 matrices (--int8)")
    if args.int8 and args.to != "onnx":
        parser.error(f"--int8 is for onnx, not for {args.to}")
    if args.to != "hf" and args.architecture is not None:
        parser.error(f"--architecture is for hf; {args.to} has one form")
    if args.to != "hf" and args.with_kernel_source:
        parser.error(f"--with-kernel-source is for hf; {args.to} does not include source code")
    if args.mp is not None and args.mp < 1:
        parser.error(f"--mp {args.mp}: must be at least 1")
    if args.pp is not None and args.pp < 0:
        parser.error(f"--pp {args.pp}: must not be negative")
    return args


def _convert(args: argparse.Namespace) -> str:
    """Convert; returns the summary line."""
    set_deepspeed_accelerator()
    import torch

    from megatron.atomic_files import new_directory
    from megatron.checkpoints import read_checkpoint
    from megatron.checkpoints.writing import write_native, write_neox
    from megatron.neox_arguments import NeoXArgs

    dtype = getattr(torch, DTYPES[args.dtype]) if args.dtype else None
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

            write_hf(
                checkpoint,
                folder,
                dtype=dtype,
                with_kernel_source=args.with_kernel_source,
                architecture=args.architecture,
            )
        elif args.to == "onnx":
            from megatron.generation.onnx_model import export_onnx
            from megatron.generation.pretrained import PretrainedModel

            export_onnx(PretrainedModel(checkpoint).float().eval(), folder, int8=args.int8)
        else:
            write = write_native if args.to == "native" else write_neox
            pp = args.pp if args.pp is not None else int(args.to == "neox")
            write(checkpoint, folder, mp=args.mp or 1, pp=pp, dtype=dtype)
            tokenizer = checkpoint.files.directory / "tokenizer.json"
            if tokenizer.is_file():  # copy the tokenizer of a Hugging Face folder
                shutil.copyfile(tokenizer, folder / tokenizer.name)
    return (
        f"{args.source} ({checkpoint.kind}, step {checkpoint.iteration}, "
        f"{checkpoint.num_parameters:,} parameters) -> {args.destination} ({args.to})"
    )


def _is_of_a_conversion(folder: Path) -> Callable[[str], bool]:
    """Which names in `folder` --overwrite may replace."""
    from megatron.checkpoints.store import read_checksums

    try:
        listed = read_checksums(folder) or {}
    except CheckpointError:
        listed = {}
    return lambda name: name in listed or CONVERSION.fullmatch(name) is not None


def convert_checkpoint(arguments: Sequence[str] | None = None) -> int:
    args = _convert_options(arguments)
    print(_convert(args))
    if args.to == "hf":
        code = Path(args.destination, "modeling_kerple.py").is_file()
        trust = ", trust_remote_code=True" if code else ""
        loaded = f"AutoModelForCausalLM.from_pretrained({args.destination!r}{trust})"
        print_next_command(f'python -c "from transformers import AutoModelForCausalLM; {loaded}"')
    elif args.to == "onnx":
        file = Path(args.destination, "model.onnx")
        print_next_command(f"{shown_command('generate')} --onnx {file}")
    else:
        print_next_command(f"{shown_command('inspect_checkpoint')} {args.destination}")
    return 0


NEOX_TOOL = """Export a checkpoint to Hugging Face, with the flags of GPT-NeoX's tool of this name.

tools/ckpts/convert_neox_to_hf.py --input_dir RUN/global_step1000 --output_dir DST

The weights' own config is taken where one was saved; --config_file is for where none was. What is
exported is what the model is: transformers' own class where one computes the same (GPT-NeoX, GPT-2,
Llama, Mistral, Qwen2, Qwen3, OLMo 2), else KerpleNeoXForCausalLM with its modelling file.
"""


def neox_to_hf(argv: Sequence[str] | None = None) -> int:
    """convert_checkpoint with GPT-NeoX's flags."""
    parser = command_parser("convert_neox_to_hf.py", NEOX_TOOL)
    parser.add_argument("--input_dir", required=True, help="a global_stepN, or a run")
    parser.add_argument("--config_file", help="YAML of the model, if none lies in the checkpoint")
    parser.add_argument("--output_dir", required=True, help="a new folder")
    parser.add_argument(
        "--precision", choices=("auto", *DTYPES), default="auto", help="auto keeps the checkpoint's"
    )
    parser.add_argument(
        "--architecture",
        choices=["neox", "llama", "mistral"],
        default="neox",
        help="accepted; the export has the class that computes the model, and says if another",
    )
    parser.add_argument("--vocab-is-hf-tokenizer", action="store_true", help="accepted, unused")
    parser.add_argument("--no_save_tokenizer", action="store_true", help="accepted, unused")
    parser.add_argument(
        "--pad-token-id", type=int, choices=[-1], help="of reward models, which are not exported"
    )
    options = parser.parse_args(argv)
    words = [options.input_dir, options.output_dir, "--to", "hf"]
    if options.precision != "auto":
        words += ["--dtype", options.precision]
    if options.config_file is not None:
        words += ["--config", options.config_file]
    code = convert_checkpoint(words)
    found = read_json(Path(options.output_dir, "config.json")) or {}
    if options.architecture != "neox" and found.get("model_type") != options.architecture:
        print(
            f"--architecture {options.architecture}: the export is a {found.get('model_type')} "
            "model, whose class computes this model",
            file=sys.stderr,
        )
    return code


HF_TOOL = """Convert a Hugging Face folder to GPT-NeoX's files, with the flags of its tools.

tools/ckpts/convert_hf_llama_to_neox.py --model HF_FOLDER --model_path DST [--tp N]
tools/ckpts/convert_hf_to_sequential.py --hf-model-name HF_FOLDER --output-dir DST

Nothing is downloaded: the model is a folder on this machine.
"""


def hf_to_neox(argv: Sequence[str] | None = None) -> int:
    """convert_checkpoint with the flags of GPT-NeoX's two importers."""
    parser = command_parser("convert_hf_llama_to_neox.py", HF_TOOL)
    parser.add_argument("--model", "--hf-model-name", "--hf_model_name", required=True)
    parser.add_argument("--model_path", "--output-dir", "--output_dir", required=True)
    parser.add_argument("--tp", type=int, default=1, help="model-parallel size")
    parser.add_argument("--pp", type=int, help="0: one file per rank, 1: one per layer (default)")
    parser.add_argument("--config", nargs="*", help="YAML files, which must describe the model")
    parser.add_argument("--test", action="store_true", help="accepted, unused")
    for flag in ("--revision", "--cache-dir", "--ckpt-tmp-dir"):
        parser.add_argument(flag, help="of the download; accepted, unused")
    parser.add_argument("--download-only", action="store_true", help="refused")
    options = parser.parse_args(argv)
    if options.download_only:
        parser.error("--download-only: nothing is downloaded; use Hugging Face's own tool")
    words = [options.model, options.model_path, "--to", "neox", "--mp", str(options.tp)]
    words += ["--pp", str(1 if options.pp is None else options.pp)]
    return convert_checkpoint(words + (["--config", *options.config] if options.config else []))


RESHARD = """Make a universal checkpoint of a run: any (dp, mp, pp, ZeRO, precision) resumes it.

    python tools/reshard_checkpoint.py RUN_DIRECTORY NEW_DIRECTORY [--iteration N]

then train with `load: NEW_DIRECTORY` and the layout of your choice, optimizer included. The files
are those of DeepSpeed's Universal Checkpointing. The old layout's ranks are started here, on this
machine's CPU: it needs memory for the whole model with its optimizer.
"""


def _plan(source: Path, target: Path, iteration: int | None) -> tuple[int, int]:
    """The step to convert and how many processes its layout has."""
    set_deepspeed_accelerator()
    from megatron.checkpoints.run_state import read_layout
    from megatron.checkpoints.store import CheckpointStore
    from megatron.checkpoints.universal import is_universal

    store = CheckpointStore(source)
    step = store.find(iteration)
    if step is None:
        raise CheckpointError(f"{source}: no global_step* checkpoint there")
    if is_universal(store.path(step)):
        raise CheckpointError(f"{store.path(step)} is universal already: set `load: {source}`")
    if target.resolve() == source.resolve():
        raise CheckpointError(f"{target}: choose a directory other than the source")
    taken = CheckpointStore(target).path(step)
    if taken.exists() and not is_universal(taken):
        raise CheckpointError(f"{taken}: is the checkpoint of a run; choose a new directory")
    try:
        world_size = int(read_layout(store.path(step))["world_size"])
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; only checkpoints that train.py wrote can be resharded. For weights alone "
            "use tools/convert_checkpoint.py"
        ) from error
    check_folder_writable(target, "NEW_DIRECTORY")
    return step, world_size


def _run_ranks(
    source: Path, target: Path, step: int, world_size: int, kernels: Sequence[str]
) -> int:
    """All ranks of the old layout; the first exit code that is not 0."""
    shared = {
        **{k: v for k, v in os.environ.items() if not k.startswith("SLURM_")},
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "DS_ACCELERATOR": "cpu",
        # The ranks must find the package that this process found.
        "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    command = [sys.executable, "-m", "megatron.training.resharding"]
    command += [str(source.resolve()), str(target.resolve()), str(step), *kernels]
    ranks = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(world_size)
    ]
    try:
        codes = [rank.wait() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return next((code for code in codes if code), 0)


def reshard_checkpoint(argv: Sequence[str] | None = None) -> int:
    parser = command_parser("reshard_checkpoint.py", RESHARD)
    parser.add_argument("source", type=Path, help="run directory with global_step* folders")
    parser.add_argument("target", type=Path, help="new directory for the universal checkpoint")
    add_checkpoint_arguments(parser)
    options = parser.parse_args(argv)
    step, world_size = _plan(options.source, options.target, options.iteration)
    print(f"reading step {step} with {world_size} process(es) ...", flush=True)
    code = _run_ranks(options.source, options.target, step, world_size, options.allow_kernel)
    if code == 0:
        from megatron.checkpoints.store import CheckpointStore

        print(f"wrote {CheckpointStore(options.target).path(step)}: set `load: {options.target}`")
    return code
