"""`kerple extend`: replace a trained rotary model's positions, by a config and its training."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from megatron.atomic_files import check_writable, write_text
from megatron.commands.model_scripts import deepy, explained
from megatron.errors import ConfigError
from megatron.neox_arguments import OWNER, NeoXArgs
from megatron.neox_arguments.command_line import add_checkpoint_arguments, add_set_argument
from megatron.neox_arguments.model_keys import ModelArgs
from megatron.neox_arguments.position_keys import KernelInit, require_positive
from megatron.neox_arguments.yaml_files import read_text
from megatron.terminal import command_parser

EXTEND = """Replace the positions of a trained model (a run, a GPT-NeoX checkpoint, a Hugging Face
folder) and continue training: NAME.yml is written, then trained into runs/NAME. The same command
again resumes the run.

kerple extend runs/mine --to kerple_log
kerple extend pythia-160m --to kerple_log --steps 2000 --set data_path=data/text_document
kerple extend runs/mine --to kerple_log --init flat --fade 500 --dry-run
kerple extend runs/mine --to kerple_log --window 512   every other layer keeps rotary, in a window

Method, keys and results: docs/extend_a_rope_model.md.
"""
RATE = 1.0e-4  # of a checkpoint whose config tells none
KERNEL_RATES = 2.5  # what the kernel's learning rates sum to, as at 5% of the suite rope_to_kerple
LARGEST_RATE = 0.1  # of the kernel, the suite's
_KEPT = ("model", "data", "tokenizer", "optimization")
_OF_THE_PAST = frozenset(
    {"rope_scaling", "rotary_angles", "rotary_fade_iters", "lr_decay_iters", "lr_decay_fraction",
     "train_epochs", "warmup"}
)  # fmt: skip
"""Keys of the checkpoint's config that the new run does not take over."""


def extend(argv: Sequence[str] | None = None) -> int:
    """The training's exit code."""
    options = _parser().parse_args(argv)
    require_positive(steps=options.steps)
    file = Path(f"{options.name or f'{Path(options.checkpoint).resolve().name}_{options.to}'}.yml")
    check_writable(file, "--name")
    text = explained(_values(options, f"runs/{file.stem}"))
    if file.exists() and read_text(file) != text:
        raise ConfigError(
            f"{file}: exists and differs from what this command would write. Train it "
            "with deepy.py train.py, give another --name, or delete it."
        )
    write_text(file, text)
    print(f"{file}: {options.checkpoint} with pos_emb {options.to}, {options.steps} steps")
    return deepy(["train.py", str(file), *(["--dry-run"] if options.dry_run else [])])


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("kerple extend", EXTEND)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a run's or a model's folder")
    parser.add_argument("--to", default="kerple_log", metavar="METHOD", help="method (kerple_log)")
    parser.add_argument(
        "--steps", type=int, default=1000, metavar="N", help="training steps (1000)"
    )
    parser.add_argument("--init", choices=get_args(KernelInit), help="kerple_init (fit)")
    parser.add_argument("--fade", type=int, metavar="N", help="rotary_fade_iters (none)")
    parser.add_argument(
        "--window", type=int, metavar="W", help="every other layer keeps rotary, in a window of W"
    )
    parser.add_argument("--name", help="NAME.yml and runs/NAME (the checkpoint's and the method's)")
    parser.add_argument(
        "--dry-run", action="store_true", help="write the config and describe it, do not train"
    )
    add_set_argument(parser, "further keys, e.g. data_path=... optimizer.params.lr=3e-5")
    add_checkpoint_arguments(parser)
    return parser


def _values(options: argparse.Namespace, save: str) -> dict[str, Any]:
    """The config's keys: the checkpoint's own, those of the new positions, those of --set."""
    from megatron.checkpoints.saved_config import default_value

    before = _config_of(options.checkpoint, options.iteration)
    own = {
        key: value
        for key, value in before.to_dict().items()
        if OWNER[key] in _KEPT and key not in _OF_THE_PAST and value != default_value(key)
    }
    trained = before.checkpoint.save is not None  # a run: its learning rate is known
    rate = before.optimization.lr / 2 if trained else RATE
    block = before.optimization.optimizer.model_dump(exclude_none=True)
    own |= {
        "optimizer": {**block, "params": {**block["params"], "lr": rate}},
        "min_lr": 0.0,
        "warmup": 0.1,
        "train_iters": options.steps,
        "kerple_lr_scale": round(min(2 * KERNEL_RATES / options.steps, LARGEST_RATE) / rate, 3),
        "load": str(options.checkpoint),
        "load_positions": "fresh",
        "save": save,
    }
    own |= {"iteration": options.iteration} if options.iteration is not None else {}
    own |= _positions(options, before.model)
    given = [f"{key}={json.dumps(value)}" for key, value in own.items()]
    args = NeoXArgs.from_files([], sets=[*given, *options.sets])
    if not args.data.data_path and not args.data.train_data_paths:
        raise ConfigError(
            f"{options.checkpoint}: its config names no data. Add --set data_path=..., the prefix "
            "of a .bin and .idx pair (prepare_data.py makes one)."
        )
    named = {item.partition("=")[0].replace("-", "_").partition(".")[0] for item in options.sets}
    return {key: value for key, value in args.to_dict().items() if key in {*own, *named}}


def _positions(options: argparse.Namespace, before: ModelArgs) -> dict[str, Any]:
    """The keys that `--to`, `--init`, `--fade` and `--window` stand for."""
    from megatron.model.position_names import positional_embedding_class

    keys: dict[str, Any] = {"pos_emb": options.to}
    kernel = getattr(positional_embedding_class(options.to), "scale", None) is not None
    start = "fit" if before.pos_emb == "rotary" else "flat"
    if init := options.init or (start if kernel else None):
        keys["kerple_init"] = init
    if kernel:  # heads of two rotary layers have nothing in common
        keys["kerple_share"] = "per_layer"
    scaling = before.rope_scaling
    turns = options.fade is not None or options.window is not None
    if scaling is not None and turns:
        keys["rope_scaling"] = scaling.model_dump(exclude_none=True)
    if options.fade is not None:
        keys["rotary_fade_iters"] = options.fade
    if options.window is not None:
        local = {"pos_emb": "rotary", "sliding_window_width": options.window}
        keys["layer_pattern"] = [local, {"pos_emb": options.to}]
    return keys


def _config_of(checkpoint: str, iteration: int | None) -> NeoXArgs:
    """The config that a checkpoint was trained with, or that its folder amounts to."""
    from megatron.checkpoints.reading import find_files, read_checkpoint, saved_args

    files = find_files(checkpoint, iteration)
    return read_checkpoint(checkpoint).args if files.is_hf else saved_args(files)[0]
