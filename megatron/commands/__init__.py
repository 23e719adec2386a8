"""The commands: scripts of the checkout, and subcommands of the installed `kerple`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from megatron.errors import KerpleError, did_you_mean
from megatron.terminal import exit_with, run_command

__all__ = ["COMMANDS", "kerple", "run", "start"]


class Command(NamedTuple):
    """Its function (`module:function` below megatron), what it does, its first arguments."""

    function: str
    summary: str
    arguments: tuple[str, ...] = ()


COMMANDS = {
    "demo": Command("commands.demo_model:demo",
        "train nine small models, evaluate to 32x, write a report; --model: one to chat with"),
    "compare": Command("commands.compare:compare",
        "compare your kernels with known ones, or trained runs with each other, in a report"),
    "init": Command("commands.model_scripts:init", "write a first config that explains every key"),
    "extend": Command("commands.extend:extend",
        "replace a trained model's rotary positions by a kernel and continue training"),
    "check": Command("commands.model_scripts:check",
        "report whether a GPT-NeoX config runs here: keys, parameters, memory, launch"),
    "deepy": Command("commands.model_scripts:deepy",
        "start train, evaluate or generate on one or many processes"),
    "train": Command("commands.model_scripts:train",
        "train a model in this process (or in each of srun's)"),
    "evaluate": Command("commands.model_scripts:evaluate",
        "measure a checkpoint: perplexity by length, retrieval, lm-eval tasks"),
    "eval": Command("commands.model_scripts:evaluate", "evaluate, under GPT-NeoX's name"),
    "generate": Command("commands.model_scripts:generate", "generate text with a checkpoint"),
    "chat": Command("commands.model_scripts:generate",
        "complete prompts that you type, with a run's model",
        ("--text_gen_type", "interactive")),
    "serve": Command("commands.model_scripts:serve",
        "serve OpenAI's completions API over HTTP with a run's model"),
    "prepare_data": Command("commands.data_tools:prepare_data",
        "download a corpus, or take your own text, and tokenize it"),
    "preprocess_data": Command("commands.data_tools:preprocess_data",
        "tokenize text, with GPT-NeoX's flags"),
    "merge_datasets": Command("commands.data_tools:merge_datasets", "join token files"),
    "train_tokenizer": Command("commands.data_tools:train_tokenizer",
        "train a tokenizer on your text"),
    "inspect_checkpoint": Command("commands.checkpoint_tools:inspect_checkpoint",
        "show what a checkpoint holds, or what differs between two"),
    "convert_checkpoint": Command("commands.checkpoint_tools:convert_checkpoint",
        "convert between our, GPT-NeoX's, official KERPLE's, Hugging Face's and ONNX files"),
    "convert_neox_to_hf": Command("commands.checkpoint_tools:neox_to_hf",
        "export to Hugging Face, with GPT-NeoX's flags"),
    "convert_hf_llama_to_neox": Command("commands.checkpoint_tools:hf_to_neox",
        "import from Hugging Face, with GPT-NeoX's flags"),
    "convert_hf_to_sequential": Command("commands.checkpoint_tools:hf_to_neox",
        "import from Hugging Face, with the flags of GPT-NeoX's other tool"),
    "reshard_checkpoint": Command("commands.checkpoint_tools:reshard_checkpoint",
        "make a run's checkpoint resumable under another layout"),
    "plot_kernels": Command("commands.kernel_tools:plot_kernels",
        "draw the kernels of a checkpoint, of a method or of your own class"),
    "check_kernel": Command("commands.kernel_tools:check_kernel",
        "test whether a kernel is conditionally positive definite"),
    "plot_run": Command("commands.plot_run:main",
        "draw a run's loss, learning rate, gradient norm, tokens/s and kernels"),
    "watch": Command("commands.watch:main",
        "show a run's loss, learning rate, tokens/s and kernels while it trains"),
    "reproduce": Command("paper.cli:main", "reproduce the paper, on a cluster or in miniature"),
    "completion": Command("commands.completion:main",
        "print a completion script for bash, zsh or fish"),
    "lm_eval": Command("evaluation.lm_eval_cli:main",
        "the lm_eval command with --model kerple_neox"),
}  # fmt: skip


def run(name: str, argv: Sequence[str]) -> int:
    """One command with its arguments; the exit code."""

    def main(arguments: Sequence[str] | None) -> int | None:
        if str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))  # for `module:Class` of the user
        module, _, function = command.function.partition(":")
        called = getattr(importlib.import_module(f"megatron.{module}"), function)
        code: int | None = called(arguments)
        return code

    command = COMMANDS[name]
    return run_command(main, [*command.arguments, *argv])


def start(name: str) -> NoReturn:
    """A script of the checkout: one command with this process's arguments, and its exit code."""
    exit_with(lambda: run(name, sys.argv[1:]))


def kerple(argv: Sequence[str] | None = None) -> int:
    """The console script: `kerple NAME ARGUMENTS...`; hyphens and underscores are the same."""
    if argv is None:
        exit_with(lambda: run_command(_kerple))
    return run_command(_kerple, argv)


def _kerple(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_listing())
        return 0
    if words[0] in ("-V", "--version"):
        from kerple import __version__

        print(__version__)
        return 0
    name = words[0].replace("-", "_")
    if name not in COMMANDS:
        advice = did_you_mean(name, COMMANDS, f"There are: {', '.join(COMMANDS)}.")
        raise KerpleError(f"{words[0]}: no such command. {advice}")
    return run(name, words[1:])


def _listing() -> str:
    lines = [f"  {name:<26}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: kerple COMMAND ...", "", "commands (kerple COMMAND --help):", *lines])
