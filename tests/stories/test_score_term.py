"""A new score term with a learned number per head is an edit of four files of the package.

The term is put into a copy of the tree, which then trains, splits, resumes, reshards, exports and
counts it: `python -m tests.stories.test_score_term DIRECTORY` is what runs there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import kerple
from megatron.checkpoints import read_checkpoint
from megatron.checkpoints.hf.folder import write_hf
from megatron.checkpoints.writing import write_neox
from megatron.errors import CheckpointError
from megatron.model.outline import outline_of
from megatron.model.sizes import ModelSizes
from megatron.neox_arguments import NeoXArgs
from tests.checkpoints.small_models import logits_of, tokens
from tests.conftest import REPOSITORY
from tests.training.cases import ADAM, layout, run_cases, tiny_config, write_data

USE = """
        if self.query_gain is not None:
            {q} = {q} * (1 + self.query_gain)[:, None, None].to({q}.dtype)
"""
TERM = {
    "neox_arguments/model_keys.py": (
        "    intermediate_size: PositiveInt | None = key(",
        '    query_gain: bool = key(False, "Queries times 1 + g, learned per head.", ours=True)\n',
    ),
    "model/layer_formulas.py": (
        '    "softmax_scale": PerHeadNumber(',
        '    "query_gain": PerHeadNumber("query_gain", lambda config: 0.0),\n',
    ),
    "model/attention.py": (
        "        key_bias, sink = self._gates_and_sinks(",
        USE.lstrip("\n").format(q="q_BHLD"),
    ),
    "checkpoints/hf/modeling_kerple.py": (
        "        terms = ScoreTerms()",
        USE.lstrip("\n").format(q="q"),
    ),
}
"""File -> the line before which something is put, and what."""
HEADS, LAYERS = 4, 2


def test_a_score_term_in_four_files_is_trained_split_resumed_exported_counted(
    tmp_path: Path,
) -> None:
    assert len(TERM) <= 4
    tree = tmp_path / "tree"
    for part in ("megatron", "tests", "tools"):
        unused = shutil.ignore_patterns("__pycache__", "fixtures")
        shutil.copytree(REPOSITORY / part, tree / part, ignore=unused)
    for name, (before, text) in TERM.items():
        file = tree / "megatron" / name
        source = file.read_text(encoding="utf-8")
        assert source.count(before) == 1, name
        file.write_text(source.replace(before, text + before), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.stories.test_score_term", str(tmp_path / "runs")],
        cwd=tree, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def _check(directory: Path) -> None:
    """In the copy: everything that reads facts of parameters finds the term's."""
    data = write_data(directory)
    config = tiny_config(data, query_gain=True, optimizer=ADAM, weight_decay=0.1)
    results = _trained(config, directory)
    one, mp2 = results["one"], results["mp2"]
    assert mp2["losses"] == pytest.approx(one["losses"], rel=2e-5)
    assert results["resumed"]["losses"] == mp2["losses"][2:]
    assert results["moved"]["losses"] == pytest.approx(one["losses"][2:], rel=2e-5)
    plain = tiny_config(data, optimizer=ADAM, weight_decay=0.1)
    assert _count(config) - _count(plain) == HEADS * LAYERS
    name = "2.attention.query_gain"
    facts = outline_of(NeoXArgs.from_dict(config).model).facts(name)
    assert (facts.split, facts.fp32, facts.is_decayed((HEADS,))) == (0, True, False)
    learned = [read_checkpoint(directory / run).weights[name] for run in ("one", "mp2")]
    assert learned[0].shape == (HEADS,)
    assert (learned[0].abs() > 1e-3).all(), "nothing was learned"
    torch.testing.assert_close(learned[1], learned[0], rtol=1e-3, atol=1e-5)
    _check_exports(directory, name)


def _trained(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Four steps on two tensor-parallel ranks, in one go and in two; then the same on one."""
    save = {name: str(directory / name) for name in ("one", "mp2", "half", "universal")}
    split = {**config, **layout(mp=2)}
    two = {
        "mp2": {"config": split, "steps": 4, "save": save["mp2"]},
        "half": {"config": split, "steps": 2, "save": save["half"], "export": save["universal"]},
        "resumed": {"config": split, "steps": 2, "resume": save["half"]},
    }
    alone = {
        "one": {"config": config, "steps": 4, "save": save["one"]},
        "moved": {"config": config, "steps": 2, "resume": save["universal"]},
    }
    return run_cases(two, directory, 2) | run_cases(alone, directory, 1)


def _count(config: dict[str, Any]) -> int:
    return ModelSizes(NeoXArgs.from_dict(config)).parameters.total


def _check_exports(directory: Path, name: str) -> None:
    run, inputs = directory / "one", tokens()
    ours = kerple.load_pretrained(run)
    whole, rounded = directory / "hf", directory / "hf16"
    for folder, dtype in ((whole, None), (rounded, torch.bfloat16)):
        folder.mkdir()
        write_hf(read_checkpoint(run), folder, dtype=dtype)
    exported = AutoModelForCausalLM.from_pretrained(whole, trust_remote_code=True).eval()
    torch.testing.assert_close(
        logits_of(exported, inputs), logits_of(ours, inputs), atol=1e-4, rtol=0
    )
    half = AutoModelForCausalLM.from_pretrained(rounded, trust_remote_code=True)
    exact = ours.get_parameter(f"sequential.{name}")
    theirs = half.gpt_neox.layers[0].attention.query_gain
    loaded = kerple.load_pretrained(rounded, dtype=torch.bfloat16)
    for kept in (theirs, loaded.get_parameter(f"sequential.{name}")):
        assert kept.dtype == torch.float32
        assert torch.equal(kept, exact)
    with pytest.raises(CheckpointError, match="query_gain"):
        write_neox(read_checkpoint(run), directory / "neox")


if __name__ == "__main__":
    _check(Path(sys.argv[1]))
