"""An ONNX file in ONNX Runtime gives our logits, the official code's, and the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.commands import run
from megatron.errors import GenerationError
from megatron.generation import complete
from megatron.generation.onnx_model import OnnxModel, quantize, write_onnx
from tests.fixture_archives import unpacked
from tests.generation.test_decoding import tiny_model

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
TRAINED, FAR = 16, 512
KINDS: dict[str, dict[str, Any]] = {
    "kerple_log": {"num_kv_heads": 2, "attention_sinks": True, "sliding_window_width": 40}
}
MORE = {
    "rotary": {},
    "kerple_power": {},
    "alibi": {},
    "rpe": {},
    "none": {"scalable_softmax": True},
}


def all_logits(session: Any, tokens: np.ndarray, pieces: int = 1) -> np.ndarray:
    """Of every position; the tokens are read in pieces, with the cache between."""
    inputs = session.get_inputs()
    past = {
        each.name: np.zeros((len(tokens), each.shape[1], 0, each.shape[3]), np.float32)
        for each in inputs[1:]
    }
    found = []
    for piece in np.array_split(tokens, pieces, axis=1):
        logits, *present = session.run(None, {"input_ids": piece, **past})
        past = dict(zip(past, present, strict=True))
        found.append(logits)
    return np.concatenate(found, axis=1)


@pytest.mark.parametrize(
    "pos_emb", [pytest.param(name, marks=pytest.mark.slow) for name in (*KINDS, *MORE)]
)
def test_logits_and_tokens_are_ours_at_1x_and_32x(pos_emb: str, tmp_path: Path) -> None:
    model = tiny_model(pos_emb, TRAINED, **{**KINDS, **MORE}[pos_emb])
    write_onnx(model, tmp_path / "model.onnx")
    onnx = OnnxModel(tmp_path / "model.onnx")
    names = [each.name for each in onnx.session.get_inputs()]
    assert names[:3] == ["input_ids", "past_key_values.0.key", "past_key_values.0.value"]
    assert [each.name for each in onnx.session.get_outputs()][:2] == ["logits", "present.0.key"]
    for batch, length, pieces in ((3, TRAINED, 1), (1, FAR, 1), (2, FAR, 5)):
        tokens = torch.randint(64, (batch, length))
        with torch.no_grad():
            expected = model(tokens).numpy()
        actual = all_logits(onnx.session, tokens.numpy(), pieces)
        np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=0)
    prompts = [[5, 9, 3], [7]]
    ours, theirs = (complete(each, prompts, max_new_tokens=200) for each in (model, onnx))
    assert [row.tokens for row in ours] == [row.tokens for row in theirs]


def test_the_official_logits_and_int8(tmp_path: Path) -> None:
    """Converted by the command; the numbers are those that the official code recorded."""
    source = unpacked("official_kerple_log")
    expected = np.load(source / "expected.npz")
    assert run("convert_checkpoint", [str(source), str(tmp_path / "a"), "--to", "onnx"]) == 0
    session = OnnxModel(tmp_path / "a" / "model.onnx").session
    logits = all_logits(session, expected["tokens"].astype(np.int64))
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4, rtol=0)
    whole = (tmp_path / "a" / "model.onnx").stat().st_size
    quantize(tmp_path / "a" / "model.onnx")
    session = OnnxModel(tmp_path / "a" / "model.onnx").session
    rough = all_logits(session, expected["tokens"].astype(np.int64))
    assert 1e-4 < abs(rough - expected["logits"]).mean() < 0.1 * expected["logits"].std()
    assert (tmp_path / "a" / "model.onnx").stat().st_size < 0.7 * whole


def test_wrong_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, model in (
        ("forget_gate", tiny_model(forget_gate=True)),
        ("cable", tiny_model("cable")),
    ):
        with pytest.raises(GenerationError, match=f"{name}: a score that depends on the text"):
            write_onnx(model, tmp_path / "x.onnx")
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    for name, fragment in (("absent", "no such file"), ("broken", "not an ONNX model")):
        assert run("generate", ["--onnx", str(tmp_path / f"{name}.onnx")]) == 2
        assert fragment in capsys.readouterr().err
    assert run("generate", ["--onnx", "x.onnx", "--set", "hidden_size=3"]) == 2
    assert "hidden_size=3: with --onnx, keys of generation only" in capsys.readouterr().err
