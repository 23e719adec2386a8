"""`tools/reproduce.py released`: the paper's figures from its released checkpoints, in minutes.

The six archives of the official release unpack to folders as the official configs name them
(`kerple_log_github_1235_checkpoints`, `kerple_power_ap__arxiv_1235_checkpoints`, ...). Their
kernels are drawn as they are; with any text, perplexity from 512 to 16,384 is measured, log against
power, with all of the context and with a window.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.errors import ReproduceError
from megatron.evaluation.perplexity import Extrapolation
from megatron.evaluation.results_schema import Result, read_result
from megatron.evaluation.tasks import EvaluationOptions, requested
from megatron.neox_arguments.catalogue import canonical_method, label_of
from megatron.paper.cells import DATA_TITLES, Cell
from megatron.paper.pages import Chapter, Page, to_text, write_page, write_tables
from megatron.paper.run_results import ResultSet, RunResults
from megatron.paper.suite import Run
from megatron.paper.suite_file import DataSet
from megatron.paper.tables import Block, Column, Entry, Row, Table

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

_FOLDER = re.compile(r"(?P<method>kerple_\w*?)_(?P<data>github|arxiv|openwebtext2)_(?P<seed>\d+)")
_DEPTH = 3
"""How far below the directory checkpoints are looked for."""


@dataclass(frozen=True)
class ReleasedOptions:
    text: tuple[Path, ...]
    tokenizer: str
    vocab_file: Path | None
    merge_file: Path | None
    lengths: tuple[int, ...]
    window: int
    sequences: int
    """At the longest length; the others see the same tokens."""


@dataclass(frozen=True)
class Released:
    """One checkpoint: its config, where it is and what it was trained on, and its kernel."""

    args: NeoXArgs
    found: RunResults

    @property
    def run(self) -> Run:
        return self.found.run


def find_released(directory: Path) -> list[Released]:
    """Every checkpoint folder below `directory`, by method and data set."""
    from megatron.checkpoints import read_checkpoint
    from megatron.checkpoints.inspection import kernel_of

    if not directory.is_dir():
        raise ReproduceError(f"--dir {directory}: no such directory")
    released = []
    places = ["*/" * depth + "latest" for depth in range(_DEPTH + 1)]
    latest = [path for place in places for path in directory.glob(place) if path.is_file()]
    for folder in sorted(path.parent for path in latest):
        checkpoint = read_checkpoint(folder)
        config = checkpoint.args.to_dict()
        named = _FOLDER.search(folder.name)
        method = canonical_method(str(config["pos_emb"]))
        data = named["data"] if named else folder.name
        seed = int(named["seed"]) if named else int(config.get("seed") or 0)
        config["train_iters"] = checkpoint.iteration
        run = Run(folder.name, "released", data, method, seed, 1, config, folder)
        kernels = kernel_of(checkpoint)
        values = kernels[0]["values"] if kernels else {}
        results = RunResults(run, kernel=values, last_step=checkpoint.iteration)
        released.append(Released(checkpoint.args, results))
    if not released:
        raise ReproduceError(
            f"--dir {directory}: no checkpoint there. Unpack the archives of the official release "
            "into it: folders such as kerple_log_github_1235_checkpoints, with `latest` inside"
        )
    return sorted(released, key=lambda item: (item.run.data, item.run.method, item.run.name))


def make_released_report(directory: Path, out: Path, options: ReleasedOptions) -> Path:
    """Figures, and with a text the perplexity table; the path of the page."""
    released = find_released(directory)
    page = Page(
        "KERPLE: the released checkpoints",
        f"{len(released)} checkpoints of the official release, read from their files.",
        [(item.run.name, _facts(item)) for item in released],
        [_figures(released, out)],
    )
    if options.text:
        table = _perplexity_table(released, out, options)
        page.chapters.insert(0, Chapter("Perplexity by length", tables=[table]))
        write_tables([table], out)
        print(f"\n{to_text(table)}", end="")
    write_page(page, out)
    return out / "report.html"


def _facts(item: Released) -> str:
    heads = item.args.model.num_attention_heads
    return f"{label_of(item.run.method)}, {heads} heads, step {item.found.last_step}"


def _data_sets(released: Sequence[Released]) -> list[DataSet]:
    names = dict.fromkeys(item.run.data for item in released)
    return [DataSet(name=name, title=DATA_TITLES.get(name, name)) for name in names]


def _figures(released: Sequence[Released], out: Path) -> Chapter:
    from megatron.paper.kernel_figures import kernel_plots
    from megatron.paper.style import save_figures

    results = ResultSet(tuple(item.found for item in released))
    heads = released[0].args.model.num_attention_heads
    plots = kernel_plots(results, _data_sets(released), heads)
    return Chapter("Kernels", figures=save_figures(plots, out / "figures"))


# Perplexity on a text of the user's.


def _perplexity_table(released: Sequence[Released], out: Path, options: ReleasedOptions) -> Table:
    prefix = _prepared(out, options)
    measured = {
        (item.run.name, window): _evaluated(item, prefix, out, options, window)
        for item in released
        for window in (None, options.window)
    }
    blocks = []
    for data in _data_sets(released):
        own = [item for item in released if item.run.data == data.name]
        pairs = [(item, window) for item in own for window in (None, options.window)]
        columns = tuple(
            Column(f"windowed@{window}" if window else "full", label_of(item.run.method))
            for item, window in pairs
        )
        results = [measured[item.run.name, window] for item, window in pairs]
        rows = tuple(
            Row(str(length), tuple(_entry(result, length) for result in results))
            for length in options.lengths
        )
        blocks.append(Block(f"trained on {data.title}", "length", columns, rows))
    names = ", ".join(path.name for path in options.text)
    caption = (
        f"Perplexity of the released checkpoints on {names}, the same tokens at every length; "
        f"windowed: attention to the last {options.window} tokens only."
    )
    return Table("released", caption, tuple(blocks))


def _entry(result: Result | None, length: int) -> Entry:
    found = Extrapolation().cells(result.results).get(("valid", length)) if result else None
    return Entry(Cell(found, seeds=0 if found is None else 1))


def _prepared(out: Path, options: ReleasedOptions) -> Path:
    from megatron.data.prepare import PrepareRequest, prepare_corpus

    request = PrepareRequest(
        directory=out / "data",
        tokenizer_type=options.tokenizer,
        vocab_file=options.vocab_file,
        merge_file=options.merge_file,
        inputs=options.text,
    )
    return prepare_corpus("text", request)[0]


def _evaluated(
    item: Released, prefix: Path, out: Path, options: ReleasedOptions, window: int | None
) -> Result | None:
    from megatron.evaluation.evaluator import run_evaluation

    changes: dict[str, Any] = {
        "load": str(item.run.directory),
        "save": None,
        "data_path": None,
        "valid_data_paths": [str(prefix)],
        "do_valid": True,
        "do_test": False,
        "eval_tasks": [Extrapolation.name],
        "eval_lengths": list(options.lengths),
        "eval_protocol": "fixed_tokens",
        "eval_num_sequences": options.sequences,
        "eval_window": window,
        "eval_results_prefix": str(out / "results" / item.run.name),
    }
    args = item.args.replace(**changes)
    if run_evaluation(args) != 0:
        return None
    task, options_of_task = Extrapolation(), EvaluationOptions.from_args(args)
    expected = requested(task, options_of_task, args.model.model_dump(mode="json"))["settings"]
    # Another text or other lengths before this one have left their own files beside it.
    pattern = f"{item.run.name}_{task.file_name(options_of_task)}*.json"
    files = (out / "results").glob(pattern)
    return next((own for own in map(read_result, files) if own.settings == expected), None)
