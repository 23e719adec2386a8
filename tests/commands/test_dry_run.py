"""What --dry-run says of a config."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.commands.dry_run import dry_run_report
from megatron.neox_arguments import NeoXArgs
from tests.neox_arguments.samples import TINY


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
    assert "layers 0-2, 4 pos_emb: kerple_log, sliding_window_width: 3" in lines
    assert "layer 3 pos_emb: rpe, forget_gate: True" in lines
    assert "kernel of layers 0-2, 4 KERPLE-log" in lines
    assert f"positions (KERPLE-log + T5 bias) {2 * 4 + 32 * 4}" in lines
    cached = 2 * 2 * 32 * (4 * 4 + 16) / 2**20  # keys and values, 2 bytes, 32 wide
    assert f"KV cache of 16 tokens, generating {cached:.2f} MiB" in lines
    weights = 5 * 2 * 32 * (4 * 32 + 2 * 128) // 2 + 32 * 4 + 32 * 512
    seen = 4 * (4 - 16 / 32) + 8  # keys on average
    assert f"{3 * (2 * weights + 4 * 32 * seen):.3g} flops per token" in report
