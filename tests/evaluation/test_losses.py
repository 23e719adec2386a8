"""Scores of given tokens against full logits, tokens that a model has not, and the bar."""

from __future__ import annotations

import io
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

from megatron.data import IndexedDatasetWriter
from megatron.evaluation.evaluator import run_evaluation
from megatron.evaluation.losses import TotalBar, score_continuations, score_tokens
from megatron.model import GPTModel, ModelSpec
from megatron.neox_arguments import NeoXArgs
from tests.evaluation.helpers import VOCAB, sharpened, tiny_config, write_run


def test_scores_at_places_are_those_of_the_full_logits() -> None:
    args = NeoXArgs.from_dict(tiny_config())
    model = sharpened(GPTModel(ModelSpec.from_args(args, VOCAB)))
    tokens = torch.randint(0, 256, (3, 40))
    best = model(tokens).argmax(-1)
    tokens[0, 10] = best[0, 9]  # one place that the model gets right
    places = [(10, 20), (5, 30), (1, 39)]
    best = model(tokens).argmax(-1)
    expected = [
        [bool(best[row, place - 1] == tokens[row, place]) for place in own]
        for row, own in enumerate(places)
    ]
    scores = score_tokens(model, tokens.tolist(), places)
    assert [score.greedy.tolist() for score in scores] == expected
    assert expected[0][0]
    log_probs = model(tokens).log_softmax(-1)
    for row, own in enumerate(places):
        wanted = [log_probs[row, place - 1, tokens[row, place]] for place in own]
        torch.testing.assert_close(scores[row].log_probs, torch.stack(wanted))


@pytest.mark.parametrize("pos_emb", ["kerple_log", "rotary", "learned"])
def test_a_shared_context_is_read_once(pos_emb: str) -> None:
    args = NeoXArgs.from_dict(tiny_config(pos_emb=pos_emb, max_position_embeddings=64))
    model = sharpened(GPTModel(ModelSpec.from_args(args, VOCAB)))
    tokens = torch.randint(0, 256, (80,)).tolist()
    question, other = tokens[:30], tokens[30:34]
    pairs = [
        (question, tokens[40:43]),
        (other, tokens[43:50]),
        (question, tokens[50:51]),
        (question, tokens[51:60]),
    ]
    alone = [score_continuations(model, [pair])[0] for pair in pairs]
    read: list[int] = []
    model.embedding.register_forward_hook(lambda _, given, __: read.append(given[0].numel()))
    for found, expected in zip(score_continuations(model, pairs), alone, strict=True):
        torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-4, atol=1e-4)
        assert found.greedy.tolist() == expected.greedy.tolist()
    assert read == [29, 3, 4 * 9]  # each context but its last token, then that and continuations


def test_data_of_another_tokenizer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args, _ = write_run(tmp_path, eval_lengths=[8], eval_tasks=["extrapolation"])
    with IndexedDatasetWriter(tmp_path / "other") as writer:
        for _ in range(20):
            writer.add_document([600] * 50)
    assert run_evaluation(args.replace(data_path=str(tmp_path / "other"))) == 1
    assert "the data holds token 600, the model has 512" in capsys.readouterr().err


def test_progress_is_lines_in_a_pipe_and_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, bar_shown in ((io.StringIO(), False), (Terminal(), True)):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr("megatron.evaluation.losses.SECONDS_BETWEEN_LINES", 0.0)
        with closing(TotalBar(10, 2560.0, show=True)) as bar:
            bar.at("extrapolation valid 8")
            bar.advance(10, 8)
            bar.at("extrapolation valid 16")
        text = stream.getvalue()
        assert ("|" in text) == bar_shown and "50%" in text
        assert ("s left\n" in text) != bar_shown
