"""extrapolation and sliding against losses computed from full logits."""

from __future__ import annotations

import math
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch

from kerple import __version__
from megatron.data import IndexedDataset
from megatron.evaluation import perplexity
from megatron.evaluation.evaluator import run_evaluation
from megatron.evaluation.losses import stream_losses
from megatron.evaluation.perplexity import window_starts
from megatron.model import GPTModel
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import build_tokenizer
from tests.evaluation.helpers import (
    evaluated,
    official_texts,
    plain_losses,
    result_of,
    write_data,
    write_run,
)

LENGTHS = [8, 16, 32]


def valid_stream(args: NeoXArgs) -> torch.Tensor:
    """All tokens of the valid documents (10 to 15 of 20), end to end."""
    assert args.data.data_path is not None
    data = IndexedDataset(args.data.data_path)
    return torch.from_numpy(np.concatenate([data[i] for i in range(10, 16)]).astype(np.int64))


def test_extrapolation_on_the_official_sequences(tmp_path: Path) -> None:
    args, model = write_run(tmp_path, eval_lengths=LENGTHS)
    content = evaluated(args, "extrapolation")
    for length in LENGTHS:
        for split, texts in official_texts(args, length, 5).items():
            means = [float(plain_losses(model, text).mean()) for text in texts]
            (entry,) = [e for e in content["results"][split] if e["length"] == length]
            assert entry["loss"] == pytest.approx(statistics.fmean(means), rel=1e-5)
            assert entry["ppl"] == pytest.approx(math.exp(statistics.fmean(means)), rel=1e-4)
            assert entry["stderr"] == pytest.approx(statistics.stdev(means) / 5**0.5, rel=1e-3)
            assert (entry["tokens"], entry["sequences"]) == (5 * length, 5)


def test_perplexity_per_character(tmp_path: Path) -> None:
    args, _ = write_run(tmp_path, eval_lengths=[16], char_level_ppl=True)
    tokenizer = build_tokenizer("CharLevelTokenizer")
    texts = official_texts(args, 16, 5)["valid"]
    characters = sum(len(tokenizer.detokenize(text[1:].tolist())) for text in texts)
    (entry,) = evaluated(args, "extrapolation")["results"]["valid"]
    assert entry["characters"] == characters < entry["tokens"]  # some bytes are no characters
    assert math.log(entry["char_ppl"]) == pytest.approx(entry["loss"] * 80 / characters)


def test_result_file_says_what_was_measured(tmp_path: Path) -> None:
    args, model = write_run(tmp_path, eval_lengths=[8])
    content = evaluated(args, "extrapolation")
    assert content["format"] == 2
    assert content["task"] == "extrapolation"
    assert content["checkpoint"].endswith("run/global_step10")
    assert content["iteration"] == 10
    assert content["pos_emb"] == "kerple_log"
    assert content["protocol"] == "fixed_sequences"
    assert content["train_length"] == 16
    assert content["seed"] == 1234
    assert content["parameters"] == sum(p.numel() for p in model.parameters())
    assert len(content["config_hash"]) == 16
    assert content["version"] == __version__
    settings = content["settings"]
    assert settings["lengths"] == [8]
    assert settings["num_sequences"] == 5
    assert [(item["split"], item["share"]) for item in settings["data"]] == [
        ("valid", "0.5,0.3,0.2"),
        ("test", "0.5,0.3,0.2"),
    ]
    assert settings["data"][0]["bytes"] == Path(f"{args.data.data_path}.bin").stat().st_size


def test_fixed_tokens_scores_the_very_same_tokens(tmp_path: Path) -> None:
    args, model = write_run(
        tmp_path, eval_lengths=LENGTHS, eval_protocol="fixed_tokens", eval_num_sequences=3
    )
    content = evaluated(args, "extrapolation")
    stream = valid_stream(args)
    assert [entry["tokens"] for entry in content["results"]["valid"]] == [96, 96, 96]
    for entry in content["results"]["valid"]:
        length = entry["length"]
        texts = [stream[start : start + length + 1] for start in range(0, 96, length)]
        expected = torch.stack([plain_losses(model, text) for text in texts]).mean()
        assert entry["loss"] == pytest.approx(float(expected), rel=1e-5)
        assert entry["sequences"] == 96 // length


def test_a_split_that_is_too_small_says_so_and_serves_no_token_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args, _ = write_run(tmp_path, eval_lengths=[200, 1000])
    content = evaluated(args, "extrapolation")
    # 540 valid tokens hold two sequences of 200; five were asked for
    assert [(e["length"], e["sequences"]) for e in content["results"]["valid"]] == [(200, 2)]
    assert {(e["split"], e["length"]) for e in content["errors"]} == {
        ("valid", 1000),
        ("test", 1000),
    }
    said = capsys.readouterr().out
    assert "the split holds 2 sequences of this length, not 5" in said
    assert "not measured: valid 1000" in said


def test_learned_positions_fail_beyond_their_table_and_the_rest_runs(tmp_path: Path) -> None:
    args, _ = write_run(tmp_path, pos_emb="learned")
    content = evaluated(args, "extrapolation")
    assert [entry["length"] for entry in content["results"]["valid"]] == [16]
    beyond = {e["length"]: e["error"] for e in content["errors"] if e["split"] == "valid"}
    assert list(beyond) == [32, 64, 128, 256, 512]
    assert all("learned has vectors for 16 positions" in error for error in beyond.values())


def test_sliding_scores_every_token_once_with_the_most_context(tmp_path: Path) -> None:
    args, model = write_run(tmp_path, eval_lengths=[8, 24], eval_stride=5)
    content = evaluated(args, "sliding")
    stream = valid_stream(args)
    total = 5 * 16  # eval_num_sequences x seq_length
    for entry in content["results"]["valid"]:
        length = entry["length"]
        losses = torch.full((total,), torch.nan, dtype=torch.float64)
        losses[:length] = plain_losses(model, stream[: length + 1])
        done = length
        while done < total:
            end = min(done + 5, total)
            losses[done:end] = plain_losses(model, stream[end - length : end + 1])[done - end :]
            done = end
        assert entry["tokens"] == total
        assert entry["loss"] == pytest.approx(float(losses.mean()), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "streams"),
    [
        ({"pos_emb": "kerple_log"}, True),
        ({"pos_emb": "rotary", "scalable_softmax": True}, True),
        ({"pos_emb": "none", "forget_gate": True}, True),
        ({"pos_emb": "sinusoidal"}, False),
    ],
    ids=str,
)
def test_sliding_reads_a_file_once_where_windows_allow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], streams: bool
) -> None:
    """Windows reach back 3 tokens a layer, 6 in all: a stride of 5 leaves 19 of 24 and 3 of 8."""
    args, _ = write_run(
        tmp_path, eval_lengths=[8, 24], eval_stride=5, sliding_window_width=3, **changes
    )
    calls: list[int] = []

    def counted(model: GPTModel, text: torch.Tensor, chunk: int) -> torch.Tensor:
        calls.append(len(text))
        return stream_losses(model, text, 7)

    monkeypatch.setattr(perplexity, "stream_losses", counted)
    found = evaluated(args, "sliding")["results"]
    assert calls == ([5 * 16 + 1] * len(found) if streams else [])
    monkeypatch.setattr(GPTModel, "context_seen", lambda self: None)
    shutil.rmtree(tmp_path / "run" / "results")  # else it would not be measured again
    expected = evaluated(args, "sliding")["results"]
    assert len(calls) == (len(found) if streams else 0)
    for split, entries in expected.items():
        for entry, other in zip(entries, found[split], strict=True):
            assert other == pytest.approx(entry, rel=1e-5)


def test_sliding_goes_over_all_files_of_a_split(tmp_path: Path) -> None:
    args, _ = write_run(tmp_path, eval_lengths=[8, 48], do_test=False)
    alone = []
    for name, vocabulary in (("one", 40), ("two", 250)):
        path = str(write_data(tmp_path / name, vocabulary=vocabulary))
        data = args.replace(data_path=None, valid_data_paths=[path], eval_num_sequences=3)
        alone.append((path, result_of(data, "sliding")["results"]["valid"]))
    paths = [path for path, _ in alone]
    both = args.replace(data_path=None, valid_data_paths=paths, eval_num_sequences=6)
    found = result_of(both, "sliding")["results"]["valid"]
    for entry, *parts in zip(found, *(own for _, own in alone), strict=True):
        assert entry["tokens"] == sum(part["tokens"] for part in parts) == 2 * 48
        assert entry["loss"] == pytest.approx(sum(part["loss"] for part in parts) / 2)
        assert parts[0]["loss"] != pytest.approx(parts[1]["loss"], rel=1e-3)


def test_sliding_passes_over_files_shorter_than_a_window(tmp_path: Path) -> None:
    args, _ = write_run(tmp_path, eval_lengths=[8, 48], do_test=False, eval_num_sequences=3)
    long = str(write_data(tmp_path / "long"))
    short = str(write_data(tmp_path / "short", documents=1, length=20))
    both = args.replace(data_path=None, valid_data_paths=[long, short])
    found = result_of(both, "sliding")
    alone = result_of(args.replace(data_path=None, valid_data_paths=[long]), "sliding")
    assert found["results"]["valid"] == alone["results"]["valid"]
    assert found["errors"] == []


@pytest.mark.parametrize(("total", "length", "stride"), [(10, 4, 2), (11, 4, 3), (4, 4, 1)])
def test_window_starts(total: int, length: int, stride: int) -> None:
    seen: list[int] = []
    for start, scored in window_starts(total, length, stride):
        assert start >= 0
        seen += range(start + length - scored, start + length)
    assert seen == list(range(total))


def test_a_stride_longer_than_the_window_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args, _ = write_run(tmp_path, eval_lengths=[8], eval_stride=9, eval_tasks=["sliding"])
    assert run_evaluation(args) == 1
    assert "eval_stride = 9 is longer than the window of 8" in capsys.readouterr().err


def test_the_last_tokens_alone_are_scored(tmp_path: Path) -> None:
    args, model = write_run(tmp_path, eval_lengths=[8, 16, 32], eval_last=12)
    content = evaluated(args, "extrapolation_last12")
    assert content["task"] == "extrapolation_last"
    assert content["settings"]["last"] == 12
    assert [entry["length"] for entry in content["results"]["valid"]] == [16, 32]
    for entry in content["results"]["valid"]:
        texts = official_texts(args, entry["length"], 5)["valid"]
        losses = torch.cat([plain_losses(model, text)[-12:] for text in texts])
        assert entry["tokens"] == 60
        assert entry["loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
    assert {(e["split"], e["length"]) for e in content["errors"]} == {("valid", 8), ("test", 8)}
    assert "eval_last = 12 is more" in content["errors"][0]["error"]
    plain = evaluated(args.replace(eval_last=None), "extrapolation")
    assert "last" not in plain["settings"] and plain["task"] == "extrapolation"
