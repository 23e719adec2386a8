"""Folders of trained runs as a suite: kinds, names, and what cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ReproduceError
from megatron.neox_arguments import NeoXArgs
from megatron.paper.kernel_figures import kernel_bias
from megatron.paper.run_folders import missing_evaluation, suite_of_folders
from megatron.paper.suite_file import Layout
from tests.neox_arguments.samples import TINY


def folder(place: Path, *, last: int = 4, **changes: Any) -> Path:
    """What train.py leaves of a run that ended at step `last` of 4."""
    config = {**TINY, "train_iters": 4, "data_path": "data/books/books_text_document", **changes}
    saved = place / f"global_step{last}" / "configs" / "resolved.yml"
    saved.parent.mkdir(parents=True)
    saved.write_text(NeoXArgs.from_dict(config).to_yaml())
    (place / "latest").write_text(f"global_step{last}")
    ended = {"reason": "finished" if last == 4 else "stopped", "at_step": last}
    (place / "manifest.json").write_text(json.dumps({"history": [ended]}))
    return place


def test_seeds_of_one_training_are_one_kind(tmp_path: Path) -> None:
    runs = [
        folder(tmp_path / f"{method}{seed}", pos_emb=method, seed=seed, eval_lengths=[16, 32])
        for method in ("kerple_log", "alibi")
        for seed in (1, 2)
    ]
    suite = suite_of_folders(tmp_path / "out", runs)
    assert [run.name for run in suite.runs] == [
        f"run.books.{method}.{seed}" for method in ("kerple_log", "alibi") for seed in (1, 2)
    ]
    assert [run.directory for run in suite.runs] == runs
    (pair,) = suite.file.contrasts["differences"].pairs
    assert (pair.label, pair.first) == ("ALiBi against KERPLE-log", "run.books.alibi")
    (section,) = suite.sections
    assert section.table is not None and section.table.layout is Layout.STACKED
    assert section.table.mark_significance and section.lengths == [16, 32]


def test_runs_of_one_method_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    """The first one's evaluation settings hold for all; other training lengths keep theirs."""
    one = folder(tmp_path / "one", pos_emb="kerple_log", eval_num_sequences=3)
    two = folder(tmp_path / "two", pos_emb="kerple_log", seq_length=32, eval_num_sequences=5)
    suite = suite_of_folders(tmp_path / "out", [one, two], ["eval_lengths=[32, 64]"])
    assert [run.data for run in suite.runs] == ["one", "two"]
    assert {run.config["eval_num_sequences"] for run in suite.runs} == {3}
    assert {tuple(run.config["eval_lengths"]) for run in suite.runs} == {(32, 64)}
    table = suite.sections[0].table
    assert table is not None and {point.train_length for point in table.points} == {0}
    assert suite.file.contrasts["differences"].pairs[0].label == "two against one"
    args = missing_evaluation(suite.runs[1])
    assert args is not None and args.evaluation.eval_tasks == ["extrapolation"]
    assert args.evaluation.eval_results_prefix == str(two / "results" / "compare")
    assert (args.checkpoint.load, args.model.seq_length) == (str(two), 32)


def test_a_pattern_over_layers_is_named_by_all_its_methods(tmp_path: Path) -> None:
    """Not by the first, as if the run had no other; its kernels are plot_kernels' to draw."""
    pattern = [{"pos_emb": "none"}, {"count": 3, "pos_emb": "kerple_log"}, {"pos_emb": "none"}]
    mixed = folder(tmp_path / "mixed", pos_emb="none", layer_pattern=pattern)
    plain = folder(tmp_path / "plain", pos_emb="none")
    suite = suite_of_folders(tmp_path / "out", [plain, mixed], ["eval_lengths=[16]"])
    assert [run.data for run in suite.runs] == ["books", "books"]
    (pair,) = suite.file.contrasts["differences"].pairs
    assert pair.label == "NoPE + KERPLE-log against NoPE"
    assert kernel_bias(suite.runs[1].method, {"r1": [1.0], "r2": [1.0]}, 1, 8) is None


def test_what_cannot_be_compared_is_named(tmp_path: Path) -> None:
    one, twin = folder(tmp_path / "one"), folder(tmp_path / "twin", log_interval=7)
    half = folder(tmp_path / "half", last=2)
    for others, reason in (
        ([twin], "one and .*twin: the same training with the same seed"),
        ([half], r"half: its training has not finished \(of 4 steps\)"),
        ([one], "two trained runs or more"),
    ):
        with pytest.raises(ReproduceError, match=reason):
            suite_of_folders(tmp_path / "out", [one, *others])
    with pytest.raises(ReproduceError, match="train_iters=3: of trained runs, evaluation keys"):
        suite_of_folders(tmp_path / "out", [one, twin], ["train_iters=3"])
