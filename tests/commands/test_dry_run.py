"""What --dry-run says of a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.commands import run
from megatron.commands.dry_run import dry_run_report
from megatron.errors import ConfigError
from megatron.neox_arguments import KNOWN_KEYS, NeoXArgs
from megatron.neox_arguments.gpt_neox_differences import DIFFERENCES
from tests.conftest import REPOSITORY
from tests.neox_arguments.samples import TINY
from tests.training.cases import run_cases, tiny_config, write_data


def test_the_stage_of_zero_in_effect_is_named() -> None:
    """16-bit training without ZeRO runs under stage 1."""
    args = NeoXArgs.from_dict({**TINY, "precision": "bf16"})
    assert "(ZeRO stage 1, estimated)" in dry_run_report(args, 4)


def test_flops_are_those_of_the_model() -> None:
    """A layer of 32 x (3 x 32 + 32 + 2 x 128) weights and the head's 32 x 512 words, 16 tokens."""
    values = {**TINY, "tokenizer_type": "CharLevelTokenizer", "pos_emb": "none"}
    weights = 2 * 32 * (4 * 32 + 2 * 128) + 32 * 512
    flops = 3 * (2 * weights + 2 * 4 * 8 * 32)  # 8 keys on average, q k^T and the values
    report = dry_run_report(NeoXArgs.from_dict(values))
    assert f"{flops:.3g} flops per token, forward and backward" in report


def test_a_vocabulary_that_a_library_knows_by_name_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def files(kind: str, vocabulary: str) -> str:
        values = {**TINY, "tokenizer_type": kind, "vocab_file": vocabulary}
        return dry_run_report(NeoXArgs.from_dict(values)).partition("# files")[2]

    assert "cl100k_base" not in files("TiktokenTokenizer", "cl100k_base")
    assert "MISSING vocab_file: cl100k_base" in files("GPT2BPETokenizer", "cl100k_base")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "vocab.json").write_text("{}")
    assert "found   vocab_file: ~/vocab.json" in files("GPT2BPETokenizer", "~/vocab.json")


def test_a_pattern_is_shown_and_counted_layer_by_layer() -> None:
    """Three layers of four have a window: keys in the cache, flops and kernels are theirs."""
    pattern = [
        {"count": 3, "pos_emb": "kerple_log", "sliding_window_width": 3},
        {"pos_emb": "rpe", "forget_gate": True},
    ]
    values = {**TINY, "num_layers": 5, "tokenizer_type": "CharLevelTokenizer", "precision": "bf16"}
    report = dry_run_report(NeoXArgs.from_dict({**values, "layer_pattern": pattern}))
    lines = " ".join(report.split())
    assert "layers 1-3, 5 pos_emb: kerple_log, sliding_window_width: 3" in lines
    assert "layer 4 pos_emb: rpe, forget_gate: True" in lines
    assert "kernel of layers 1-3, 5 KERPLE-log" in lines
    assert f"positions (KERPLE-log + T5 bias) {2 * 4 + 32 * 4}" in lines
    cached = 2 * 2 * 32 * (4 * 4 + 16) / 2**20  # keys and values, 2 bytes, 32 wide
    assert f"KV cache of 16 tokens, generating {cached:.2f} MiB" in lines
    weights = 5 * 2 * 32 * (4 * 32 + 2 * 128) // 2 + 32 * 4 + 32 * 512
    seen = 4 * (4 - 16 / 32) + 8  # keys on average
    assert f"{3 * (2 * weights + 4 * 32 * seen):.3g} flops per token" in report


def test_the_patterns_in_configs_are_described_and_train(tmp_path: Path) -> None:
    """Two steps each on top of a model of five layers, with windows and floors of a tiny length."""
    base = tmp_path / "base.yml"
    model = {"num_layers": 5, "pos_emb": "learned", "train_iters": 2}
    base.write_text(yaml.safe_dump(tiny_config(write_data(tmp_path), **model)))
    rows = {
        "swan": "layers 1, 5 pos_emb: none, attention_temperature",
        "rnope": "layers 1-3, 5 pos_emb: rotary, sliding_window_width: 255 layer 4 pos_emb: none",
        "irope": "layer 4 pos_emb: none, attention_temperature",
    }
    cases: dict[str, Any] = {}
    for name, row in rows.items():
        args = NeoXArgs.from_files(
            [base], overrides=[REPOSITORY / "configs" / "kerple" / f"{name}.yml"]
        )
        assert row in " ".join(dry_run_report(args).split())
        smaller = {"sliding_window_width": 3, "attention_temperature": {"floor": 2, "alpha": 9.0}}
        pattern = [
            {key: smaller.get(key, value) for key, value in entry.items()}
            for entry in args.model.layer_pattern or ()
        ]
        config = args.replace(layer_pattern=pattern).to_dict()
        cases[name] = {"config": config, "steps": 2}
    found = run_cases(cases, tmp_path, 1)
    losses = [found[name]["losses"] for name in rows]
    assert all(first > last for first, last in losses)
    assert len({first for first, _ in losses}) == 3, "three models"


# kerple check.

NEOX_FILE = """
"num-layers": 2
"hidden-size": 32
"num-attention-heads": 4
"seq-length": 16
"save-interval": 7
"optimizer": {"type": "Adam", "params": {"lr": 0.001}}
"precision": "bfloat16"
"fp32_allreduce": true
"rope-fusion": false
"moe_num_experts": 1
"train-iters": 3
"""


def test_what_becomes_of_the_keys_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kept, renamed, without effect; with the dry run's numbers and the command that starts it."""
    file = tmp_path / "mine.yml"
    file.write_text(NEOX_FILE)
    assert run("check", [str(file)]) == 0
    page = capsys.readouterr().out
    keys, _, numbers = page.partition("\n\n# parameters")
    assert "kept              7\n  num-layers, hidden-size, num-attention-heads" in keys
    assert "save-interval: 7  ->  checkpoint_factor: 7" in keys
    assert "precision: bfloat16  ->  precision: bf16" in keys
    assert "refused           0" in keys
    assert "without effect    2\n  rope-fusion, moe_num_experts" in keys
    assert "other than in GPT-NeoX\n  fp32_allreduce: here averages of gradients in fp32" in keys
    assert "# memory per process" in numbers and "# batch on 1 process" in numbers
    assert numbers.rstrip().endswith(f"train.py {file}") and "# resolved config" not in page
    assert len(page.splitlines()) < 70, "one page"


def test_rows_of_differences_are_those_of_keys_that_are_on_and_at_their_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Switched off, a key makes no difference; train_iters: 3 is not the row of train_iters: 0."""
    file = tmp_path / "mine.yml"
    on = "gpt_j_residual: true\ninit_method: orthogonal\ntrain-epochs: null\nwarmup: 0.01\n"
    for written, rows in (
        (on, {"init_method: here the fork's", "gpt_j_residual with use_bias_in_mlp off"}),
        ("gpt_j_residual: false\ninit_method: normal\nwarmup: 0\nlog_grad_norm: false\n", set()),
    ):
        file.write_text(NEOX_FILE.replace('"fp32_allreduce": true\n', "") + written)
        assert run("check", [str(file)]) == 0
        keys, _, _ = capsys.readouterr().out.partition("\n\n# parameters")
        assert {row for row in rows if row in keys} == rows
        _, differs, listed = keys.partition("differ from GPT-NeoX")
        assert bool(differs) == bool(rows) and "train_" not in listed


def test_the_row_of_a_block_is_printed_although_the_block_is_read_as_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yml"
    block = '"fp16": {"type": "bfloat16", "enabled": true}\n'
    file.write_text(NEOX_FILE.replace('"precision": "bfloat16"\n', block))
    assert run("check", [str(file)]) == 0
    assert "fp16: here bf16 (GPT-NeoX: fp16)" in capsys.readouterr().out


def test_a_row_names_keys_that_exist() -> None:
    """Else `kerple check` would never print it."""
    with_keys = [row for row in DIFFERENCES if row.what.startswith("`") and "<" not in row.what]
    for row in with_keys:
        key = row.what[1:].partition("`")[0].partition(":")[0]
        assert key in KNOWN_KEYS, row.what
    assert len(with_keys) > 20


def test_refused_keys_are_named_and_the_rest_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lines are train.py's own; keys that are not refused are not lost."""
    file = tmp_path / "mine.yml"
    file.write_text(NEOX_FILE.replace('experts": 1', 'experts": 8') + "hidden_dropuot: 0\n")
    assert run("check", [str(file)]) == 2
    page = capsys.readouterr().out
    with pytest.raises(ConfigError) as refusal:
        NeoXArgs.from_files([file])
    for line in (lines := str(refusal.value).splitlines()):
        assert f"\n  {line}\n" in page
    assert f"refused           {len(lines)}" in page and len(lines) == 2
    assert "kept              7" in page and "# parameters" in page
    assert "these are the numbers without the refused keys" in page
    file.write_text("train_iters: 3\n")
    assert run("check", [str(file)]) == 2
    assert "num_layers is missing" in (page := capsys.readouterr().out)
    assert page.rstrip().endswith("not known: see above")
