"""`kerple compare`: user-defined kernels and known ones, or trained runs, in one report.

Kernels are trained as the demo's suite with other methods. Trained runs are evaluated at the same
lengths where a result is missing; both end in a suite's report.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.atomic_files import check_writable, write_text
from megatron.commands.demo_model import add_suite_arguments, suite_words
from megatron.commands.kernel_tools import TRIED
from megatron.errors import KerpleError, ReproduceError
from megatron.neox_arguments.allowed_code import allow_kernel, is_import_path
from megatron.neox_arguments.catalogue import METHODS, check_position_name, label_of
from megatron.neox_arguments.command_line import add_allow_kernel_argument
from megatron.neox_arguments.yaml_files import dump_yaml, parse_yaml, read_text
from megatron.terminal import command_parser

BASELINES = ("kerple_log", "alibi", "rpe", "rotary")
FEW = 20  # documents: a twentieth of them is at least one
COMPARE = """Train your own kernels and known ones here, evaluate them to 32 times their
training length, and write a report with tables, statistics and the learned kernels.

kerple compare my_kernels:SqrtLog                        with log, ALiBi, T5's bias and rotary
kerple compare my_kernels:SqrtLog --with kerple_power    with one known kernel
kerple compare my_kernels:A my_kernels:B --input books/  two kernels of yours, on your own text
kerple compare my_kernels:SqrtLog --seeds 1 2 3          three seeds each, with significance tests
kerple compare runs/a runs/b [runs/a2 runs/b2]           trained runs

It trains the suite `demo` (4 layers, 128 wide, 500 steps at length 128) with these methods.
Finished runs are not repeated: with another kernel, the same command trains only that one.
"""


def compare(argv: Sequence[str] | None = None) -> int:
    options = _compare_parser().parse_args(argv)
    options.words = list(sys.argv[2:] if argv is None else argv)
    folders = [name for name in options.kernels if name not in METHODS and Path(name).is_dir()]
    if folders:
        return _compare_folders(folders, options)
    options.name = options.name or "compare"
    baselines = BASELINES if options.baselines is None else options.baselines
    methods = list(dict.fromkeys([*options.kernels, *baselines]))
    allow_kernel(name for name in methods if is_import_path(name))
    for name in methods:
        check_position_name(name)
        _check_gradients(name)
    directory = Path(options.runs) / options.name
    suite = directory / f"{options.name}.yml"
    check_writable(suite, "--runs")
    if options.input:
        corpus = options.corpus or re.sub(r"[^\w.-]", "_", Path(options.input[0]).resolve().stem)
        _prepare(corpus, options)
    else:
        corpus = options.corpus or "stdlib"
    content = suite_content(methods, corpus, options.seeds)
    own = [f"--allow-kernel={name}" for name in methods if is_import_path(name)]
    return _run_suite(suite, dump_yaml(content), [*suite_words(options), *own])


def _run_suite(suite: Path, content: str, words: Sequence[str]) -> int:
    """Write and run the suite; the file of the last comparison stays if this one is refused."""
    from megatron.paper.cli import main

    before = read_text(suite) if suite.is_file() else None
    write_text(suite, content)
    try:
        return main(["run", "--suite", str(suite), *words])
    except KerpleError:
        if before is not None:
            write_text(suite, before)
        raise


def _compare_parser() -> argparse.ArgumentParser:
    parser = command_parser("kerple compare", COMPARE)
    parser.add_argument(
        "kernels",
        nargs="+",
        metavar="NAME",
        help="MODULE:CLASS, a method's name, or the folders of trained runs",
    )
    parser.add_argument(
        "--with",
        dest="baselines",
        nargs="*",
        metavar="METHOD",
        help=f"methods to compare with ({' '.join(BASELINES)})",
    )
    parser.add_argument("--input", nargs="+", metavar="PATH", help="your own text, as bytes")
    parser.add_argument(
        "--corpus", metavar="NAME", help="a corpus of prepare_data.py (stdlib), or one for --input"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1235], metavar="N", help="seeds (1235)"
    )
    parser.add_argument("--name", help="folder below --runs (compare; compared for trained runs)")
    add_suite_arguments(parser)
    add_allow_kernel_argument(parser)
    return parser


def _prepare(corpus: str, options: argparse.Namespace) -> None:
    """The user's own text as token files; the suite finds them up to date."""
    from megatron.data.prepare import PrepareRequest, prepare_corpus, report
    from megatron.data.preprocess import PreprocessOptions
    from megatron.data.streams import TEXT_SUFFIXES, list_files, plain_suffix

    inputs = tuple(map(Path, options.input))
    files, _ = list_files(list(inputs))
    splitter = "auto"
    if len(files) < FEW and all(plain_suffix(file.name) in TEXT_SUFFIXES for file in files):
        print(f"{corpus}: {len(files)} files, too few to split 90,5,5: every line is a document")
        splitter = "line"
    request = PrepareRequest(
        Path(options.data),
        "CharLevelTokenizer",
        inputs=inputs,
        options=PreprocessOptions(splitter=splitter),
    )
    print(report(corpus, *prepare_corpus(corpus, request)))


def suite_content(methods: Sequence[str], corpus: str, seeds: Sequence[int]) -> dict[str, Any]:
    """The demo's suite with other methods, text and seeds."""
    from megatron.paper.suite_file import SUITE_DIRECTORY

    file = SUITE_DIRECTORY / "demo.yml"
    content: dict[str, Any] = parse_yaml(read_text(file), str(file))
    section = content["sections"]["main"]
    title = "Python standard library" if corpus == "stdlib" else corpus
    caption = f"Perplexity on the validation part of {title} after training at length 128."
    section |= {"methods": list(methods), "data": [corpus]}
    section["table"] = {
        "layout": "stacked",
        "rounding": "magnitude",
        "mark_significance": len(seeds) > 1,
        "caption": caption,
    }
    return {
        "about": f"{', '.join(map(label_of, methods))} on {title}, with the demo's small model",
        "seeds": list(seeds),
        "splits": content["splits"],
        "models": content["models"],
        "data": {corpus: {"title": title}},
        "sections": {"main": section},
    }


def _check_gradients(name: str) -> None:
    """Refuse a kernel that cannot be trained before the other methods are trained."""
    from megatron.model.kernel_theory import training_problems
    from megatron.model.position_base import TableEmbedding
    from megatron.model.position_names import build_positional_embedding, position_options

    module = build_positional_embedding(name, position_options(heads=4, head_dim=32))
    if isinstance(module, TableEmbedding) and (problems := training_problems(module, TRIED)):
        raise ReproduceError(f"{name}: {problems[0]}")


# Trained runs.


def _compare_folders(folders: Sequence[str], options: argparse.Namespace) -> int:
    """Evaluate what is missing, then the report of these runs as a suite."""
    from megatron.evaluation.evaluator import run_evaluation
    from megatron.paper.cli import write_report
    from megatron.paper.run_folders import missing_evaluation, suite_of_folders

    others = [name for name in options.kernels if name not in folders]
    flags = {"--with": options.baselines, "--input": options.input, "--corpus": options.corpus}
    others += [flag for flag, value in flags.items() if value is not None]
    if others:
        raise ReproduceError(
            f"{' '.join(others)}: cannot be combined with folders of trained runs "
            f"({' '.join(folders)}), which are compared as they are"
        )
    place = Path(options.runs) / (options.name or "compared")
    suite = suite_of_folders(place, [Path(folder) for folder in folders], options.sets)
    for run in suite.runs:
        if (args := missing_evaluation(run)) is not None:
            print(f"{run.directory}: evaluating at lengths {run.config['eval_lengths']}")
            if code := run_evaluation(args):
                return code
            if missing_evaluation(run) is not None:
                raise ReproduceError(f"{run.directory}: its evaluation gave no result to compare")
    write_report(suite, None, shlex.join(["kerple", "compare", *options.words]), of_folders=True)
    return 0
