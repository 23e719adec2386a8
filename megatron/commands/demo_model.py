"""`kerple demo`: the demo's suite; with --model, one byte-pair model for prompts.

The model is the largest that this machine trains in the time given: a few steps measure the speed,
the size follows from it, and the learning rate ends where the time does.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron.atomic_files import check_writable, write_text
from megatron.data.corpora import SOURCES
from megatron.errors import ReproduceError
from megatron.neox_arguments.command_line import add_set_argument
from megatron.neox_arguments.yaml_files import dump_yaml
from megatron.terminal import command_parser, print_next_command, shown_command

DEMO = """Train nine small models, evaluate them to 32 times their training length, write a report.
With --model: train one larger model with byte pairs, export it, and complete prompts with it.

kerple demo                                        five methods, two with three seeds, and a report
kerple demo --model                                a model of code, trained for an hour
kerple demo --model --minutes 10 --input texts/    a model of your own text

The model is the largest that trains on at least 5 tokens per parameter in that time on this
machine. After an interruption the same command continues. `kerple chat runs/model` then completes
prompts. The context may be longer than the 256 tokens of the training.
"""
LENGTH, BATCH = 256, 16
VOCABULARY_SIZE = 4096
TOKENS_PER_PARAMETER = 5
LEARNING_RATE = 1e-3
SIZES = ((2, 64), (2, 128), (4, 128), (4, 192), (6, 256), (6, 384), (8, 512), (12, 512))
"""Layers and width; heads are 32 wide."""
MEASURED_STEPS, FIRST_STEPS = 12, 4
"""Steps that measure the speed; the first of them are not counted."""
CORPORA = [name for name, source in SOURCES.items() if source.vocabulary]


def demo(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.model:
        return train_model(options)
    from megatron.paper.cli import main

    retry = ["--retry-failed"] if options.retry_failed else []
    return main(["run", "--suite", "demo", *suite_words(options), *retry])


def add_suite_arguments(parser: argparse.ArgumentParser) -> None:
    """How a suite is run here; `suite_words` passes it on to `reproduce run`."""
    add = parser.add_argument
    add("--runs", default="runs", metavar="DIR", help="folder of runs (runs)")
    add("--data", default="data", metavar="DIR", help="folder of data (data)")
    add("-j", "--jobs", type=int, default=2, metavar="N", help="runs at a time (2)")
    add(
        "--restart-changed",
        action="store_true",
        help="move runs with other settings aside and train them again",
    )
    add_set_argument(parser, "config values for every run, e.g. train_iters=100")


def suite_words(options: argparse.Namespace) -> list[str]:
    words = ["--runs", options.runs, "--data", options.data, "-j", str(options.jobs)]
    words += ["--restart-changed"] if options.restart_changed else []
    return words + (["--set", *options.sets] if options.sets else [])


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("kerple demo", DEMO, allow_abbrev=False)
    add_suite_arguments(parser)
    add = parser.add_argument
    add("--model", action="store_true", help="train one model, instead of the suite")
    add("--minutes", type=float, default=60.0, metavar="N", help="--model: training time (60)")
    add("--corpus", choices=CORPORA, default=CORPORA[0], help=f"--model: text ({CORPORA[0]})")
    add("--input", nargs="+", type=Path, metavar="PATH", help="--model: your own text")
    add("--retry-failed", action="store_true", help="repeat the suite's runs that failed")
    return parser


def train_model(options: argparse.Namespace) -> int:
    """Tokens, size, training, export; each step that is done is not repeated."""
    if options.minutes <= 0:
        raise ReproduceError(f"--minutes {options.minutes:g}: more than 0")
    if not (exports := find_spec("transformers") is not None):
        print("transformers is not installed: the model is trained, but not exported")
    folder = Path(options.runs) / "model"
    file, exported = (Path(options.runs) / name for name in ("model_config.yml", "model_hf"))
    check_writable(file, "--runs")
    if file.is_file():
        print(f"{file}: exists; its training continues (for a new model delete it and {folder})")
    else:
        prefix = _tokens(options)
        config = base_config(prefix, folder)
        speed = measured_speed(config)
        config = sized(config, 60 * options.minutes, speed)
        print(f"{speed:.2e} flops a second: {describe(config)}")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, dump_yaml(config))
    if code := _train(file, options.sets):
        return code
    from megatron.commands import run

    export = [str(folder), str(exported), "--to", "hf"]
    if exports and not exported.exists() and (code := run("convert_checkpoint", export)):
        return code
    print_next_command(f"{shown_command('chat')} {folder}")
    return 0


def _tokens(options: argparse.Namespace) -> Path:
    """The corpus in byte pairs of its own vocabulary; where its token files are."""
    from megatron.commands.data_tools import prepare_data, train_tokenizer

    name, place, words = options.corpus, Path(options.data), ["-q", "-d", options.data]
    if options.input:
        name, texts = "model", [str(path) for path in options.input]
        vocabulary = place / name
        size = ["--vocab-size", str(VOCABULARY_SIZE), "--max-megabytes", "20", "-q"]
        train_tokenizer(["--input", *texts, "--output-dir", str(vocabulary), *size])
        words += ["-t", "GPT2BPETokenizer", "-v", str(vocabulary / "vocab.json")]
        words += ["-m", str(vocabulary / "merges.txt"), "--input", *texts]
    prepare_data([*words, name])
    return place / name / f"{name}_text_document"


def base_config(prefix: Path, folder: Path) -> dict[str, Any]:
    """The demo's recipe with longer texts and byte pairs, at the smallest size."""
    from megatron.paper.suite import load_suite

    config = dict(load_suite("demo").runs[0].config)
    for key in ("num_gpus", "zero_optimization", "eval_lengths"):
        config.pop(key, None)
    data = {
        "data_path": str(prefix),
        "tokenizer_type": "GPT2BPETokenizer",
        "vocab_file": str(prefix.parent / "vocab.json"),
        "merge_file": str(prefix.parent / "merges.txt"),
    }
    config["optimizer"] = {"type": "Adam", "params": {"lr": LEARNING_RATE, "betas": [0.9, 0.99]}}
    config |= {"seq_length": LENGTH, "max_position_embeddings": LENGTH, **data}
    config |= {"train_micro_batch_size_per_gpu": BATCH, "training_backend": "torch"}
    config |= {"save": str(folder), "load": str(folder), "pos_emb": "kerple_log"}
    return {**config, **_shape(*SIZES[2])}


def _shape(layers: int, width: int) -> dict[str, int]:
    return {"num_layers": layers, "hidden_size": width, "num_attention_heads": width // 32}


def _flops_and_parameters(config: dict[str, Any]) -> tuple[float, int]:
    """Flops of a training step, and all parameters."""
    from megatron.model.sizes import ModelSizes
    from megatron.neox_arguments import NeoXArgs

    sizes = ModelSizes(NeoXArgs.from_dict(config))
    step = sizes.outline.training_flops_per_token(LENGTH) * BATCH * LENGTH
    return step, sizes.parameters.total


def measured_speed(config: dict[str, Any]) -> float:
    """Flops a second of some steps of training here, the first of which are not counted."""
    from megatron.paper.run_files import finite, read_metrics

    with tempfile.TemporaryDirectory() as place:
        file, save = Path(place) / "speed.yml", str(Path(place) / "run")
        short: dict[str, Any] = dict.fromkeys(("train_iters", "lr_decay_iters"), MEASURED_STEPS)
        short |= {"save": save, "load": save, "eval_iters": 0, "warmup": 0, "log_interval": 1}
        write_text(file, dump_yaml({**config, **short}))
        if _train(file, (), quiet=True):
            raise ReproduceError("the steps that measure the speed failed; see above")
        lines = list(read_metrics(Path(save) / "metrics.jsonl"))
    found = [
        seconds
        for line in lines
        if line["step"] > FIRST_STEPS and (seconds := finite(line.get("step_seconds")))
    ]
    return _flops_and_parameters(config)[0] / statistics.median(found)


def sized(config: dict[str, Any], seconds: float, speed: float) -> dict[str, Any]:
    """The largest size that reads enough tokens in this time, with its steps and schedule."""
    for size in reversed(SIZES):
        chosen = {**config, **_shape(*size)}
        flops, parameters = _flops_and_parameters(chosen)
        steps = max(int(seconds * speed / flops), 2)
        if steps * BATCH * LENGTH >= TOKENS_PER_PARAMETER * parameters:
            break
    # The kernels' rates sum to 15 over the training, as over the paper's, where it is long enough.
    scale = min(60.0, max(1.0, round(30 / (LEARNING_RATE * steps), 1)))
    part = max(1, steps // 10)
    return chosen | {
        "train_iters": steps,
        "lr_decay_iters": steps,
        "kerple_lr_scale": scale,
        "eval_interval": part,
        "checkpoint_factor": part,
        "log_interval": max(1, steps // 200),
        "warmup": max(0.05, 1 / steps),
    }


def describe(config: dict[str, Any]) -> str:
    _, parameters = _flops_and_parameters(config)
    tokens = config["train_iters"] * BATCH * LENGTH
    return (
        f"{config['num_layers']} layers, {config['hidden_size']} wide, {parameters:,} parameters, "
        f"{config['train_iters']:,} steps of {BATCH} x {LENGTH} tokens ({tokens:,})"
    )


def _train(file: Path, sets: Sequence[str], *, quiet: bool = False) -> int:
    """train.py in a process of its own, which ends with it."""
    from megatron.paper.execute import script_command

    command = [*script_command(sys.executable, "train"), str(file)]
    command += ["--set", *sets] if sets else []
    done = subprocess.run(command, capture_output=quiet, text=True, check=False)
    if quiet and done.returncode:
        print(done.stderr, end="", file=sys.stderr)
    return done.returncode
