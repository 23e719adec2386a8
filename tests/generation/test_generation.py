"""Generation: with and without cache, in batches and alone, for every positional embedding."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml

from megatron.commands import run
from megatron.errors import GenerationError
from megatron.generation import Sampling, complete, generate
from megatron.generation.decoding import restrict
from megatron.generation.text import TextGenerator, TextStream, interactive, run_generation
from megatron.model import GPTModel, ModelSpec
from megatron.model.position_base import POSITIONAL_EMBEDDINGS
from megatron.tokenizer import build_tokenizer
from tests.evaluation.helpers import sharpened, tiny_config, write_run

PROMPTS = [[5, 9, 3], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]


def tiny_model(pos_emb: str = "kerple_log", positions: int = 128, **changes: object) -> GPTModel:
    spec = ModelSpec(
        padded_vocab_size=64,
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=positions,
        pos_emb=pos_emb,
        **changes,  # type: ignore[arg-type]
    )
    return sharpened(GPTModel(spec))


def greedy_by_hand(model: GPTModel, prompt: list[int], count: int) -> list[int]:
    """One whole forward pass a token, nothing shared with the code under test."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("pos_emb", sorted(POSITIONAL_EMBEDDINGS))
def test_greedy_is_the_same_with_and_without_cache(pos_emb: str) -> None:
    model = tiny_model(pos_emb)
    expected = [greedy_by_hand(model, prompt, 20) for prompt in PROMPTS]
    assert len({tuple(row) for row in expected}) > 1, "a model that says one thing proves nothing"
    assert generate(model, PROMPTS, max_new_tokens=20) == expected
    assert generate(model, PROMPTS, max_new_tokens=20, use_cache=False) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"kerple_share": "per_layer"},
        {"sliding_window_width": 5},
        {"num_kv_heads": 2},
        {"use_qk_layernorm": True},
        {"forget_gate": True},
        {"attention_sinks": True},
        {"scalable_softmax": True, "sliding_window_width": 5},
        {"forget_gate": True, "attention_sinks": True, "scalable_softmax": True, "num_kv_heads": 2},
    ],
)
def test_cache_with_other_attention(changes: dict[str, object]) -> None:
    model = tiny_model(**changes)
    expected = [greedy_by_hand(model, prompt, 20) for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_new_tokens=20) == expected


def test_works_beyond_the_training_length() -> None:
    model = tiny_model(positions=8)
    assert generate(model, [[1, 2]], max_new_tokens=40) == [greedy_by_hand(model, [1, 2], 40)]


def test_learned_positions_end_with_a_clear_error() -> None:
    with pytest.raises(ValueError, match="learned has vectors for 8 positions"):
        generate(tiny_model("learned", positions=8), [[1, 2]], max_new_tokens=40)


def test_stop_tokens_end_a_row_and_only_that_row() -> None:
    model = tiny_model()
    free = generate(model, PROMPTS, max_new_tokens=12)
    stop = free[0][4]
    stopped = generate(model, PROMPTS, max_new_tokens=12, stop_ids=[stop])
    for row, whole in zip(stopped, free, strict=True):
        expected = whole[: whole.index(stop)] if stop in whole else whole
        assert row == expected
    assert len(stopped[0]) <= 4


def test_prompts_as_a_tensor() -> None:
    model = tiny_model()
    prompts = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert generate(model, prompts, max_new_tokens=5) == [
        greedy_by_hand(model, row, 5) for row in prompts.tolist()
    ]


def test_samples_do_not_depend_on_their_neighbours() -> None:
    model = tiny_model()
    batch = generate(model, PROMPTS, max_new_tokens=15, temperature=1.0, seed=3)
    alone = complete(
        model,
        [PROMPTS[2]],
        max_new_tokens=15,
        sampling=Sampling(1.0),
        seed=3,
        streams=[2],
    )
    assert alone[0].tokens == batch[2]
    assert batch != generate(model, PROMPTS, max_new_tokens=15, temperature=1.0, seed=4)


def test_restrict_keeps_exactly_the_best_and_the_nucleus() -> None:
    logits = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()[torch.tensor([3, 0, 4, 1, 2])]
    assert set(restrict(logits, top_k=2).isfinite().nonzero()[:, 0].tolist()) == {1, 3}
    assert set(restrict(logits, top_p=0.69).isfinite().nonzero()[:, 0].tolist()) == {1, 3}
    assert set(restrict(logits, top_p=0.71).isfinite().nonzero()[:, 0].tolist()) == {1, 3, 4}
    assert set(restrict(logits, top_p=0.01).isfinite().nonzero()[:, 0].tolist()) == {1}


def test_temperature_sampling_follows_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    generator = torch.Generator().manual_seed(0)
    counts = Counter(Sampling(0.5).choose(logits, generator) for _ in range(4000))
    expected = (logits / 0.5).softmax(-1) * 4000
    for token in range(4):
        spread = float(expected[token] * (1 - expected[token] / 4000)) ** 0.5
        assert abs(counts[token] - float(expected[token])) < 5 * spread + 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 1.5}, "top_p"),
    ],
)
def test_bad_sampling_options_are_named(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**values)  # type: ignore[arg-type]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(GenerationError, match="prompt 1 is empty"):
        generate(tiny_model(), [[1], []], max_new_tokens=2)


def test_logits_are_those_of_the_model() -> None:
    model = tiny_model()
    (result,) = complete(model, [[3, 1]], max_new_tokens=3, keep_logits=True, vocab_size=60)
    with torch.no_grad():
        expected = model(torch.tensor([[3, 1, *result.tokens]]))[0, 1:4, :60]
    torch.testing.assert_close(torch.stack(result.logits), expected, rtol=1e-4, atol=1e-4)


def text_generator(**options: object) -> TextGenerator:
    spec = ModelSpec(
        padded_vocab_size=512, num_layers=1, hidden_size=32, num_attention_heads=2, seq_length=16,
        pos_emb="kerple_log",
    )  # fmt: skip
    tokenizer = build_tokenizer("CharLevelTokenizer")
    return TextGenerator(sharpened(GPTModel(spec)), tokenizer, **options)  # type: ignore[arg-type]


def test_stop_strings_are_cut_off() -> None:
    whole = text_generator(max_new_tokens=30).samples(["a prompt"])[0]["text"]
    assert len(whole) > 6
    stop = whole[4:6]
    (record,) = text_generator(max_new_tokens=30, stop_strings=(stop,)).samples(["a prompt"])
    assert record["text"] == whole.split(stop)[0]
    assert record["finished"]


def test_interactive_answers_each_prompt() -> None:
    said: list[str] = []
    generator = text_generator(max_new_tokens=5)
    source = io.StringIO("one#two\nlines#")
    interactive(generator, source, said.append, prompt_end="#", samples=2)
    answers = "".join(said).split("prompt> ")
    assert [answer.count("--- ") for answer in answers] == [0, 2, 2, 0]
    expected = generator.samples(["two\nlines"], quiet=True)[0]
    assert answers[2].startswith(f"--- 1 of 2\ntwo\nlines{expected['text']}\n--- 2 of 2\n")


def test_input_file_mode_writes_a_record_per_sample(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("Hello\n\nA longer prompt than the first\n", "utf-8")
    args, model = write_run(
        tmp_path,
        text_gen_type="input-file",
        sample_input_file=str(tmp_path / "prompts.txt"),
        sample_output_file=str(tmp_path / "out" / "samples.jsonl"),
        num_samples=2,
        maximum_tokens=6,
        temperature=0,
    )
    assert run_generation(args) == 0
    lines = (tmp_path / "out" / "samples.jsonl").read_text("utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["context"][:5] for record in records] == ["Hello", "Hello", "A lon", "A lon"]
    tokenizer = build_tokenizer("CharLevelTokenizer")
    expected = greedy_by_hand(model, tokenizer.tokenize("Hello"), 6)
    assert records[0]["text"] == tokenizer.detokenize(expected)
    assert records[0]["length"] == 6
    assert not records[0]["finished"]


def test_generation_errors_are_printed_not_raised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args, _ = write_run(tmp_path, text_gen_type="input-file", sample_input_file="/nowhere/x.txt")
    assert run_generation(args) == 2
    assert "sample_input_file /nowhere/x.txt" in capsys.readouterr().err


def test_texts_are_shown_as_they_are_sampled() -> None:
    generator = text_generator(max_new_tokens=12)
    pieces: list[str] = []
    (record,) = generator.stream(["ab"], pieces.append)
    assert record["text"] == generator.samples(["ab"], quiet=True)[0]["text"]
    assert "".join(pieces) == f"ab{record['text']}\n"
    assert len(pieces) > 6, "not all at once"


def test_a_stop_string_is_never_half_shown() -> None:
    whole = text_generator(max_new_tokens=30).samples(["a prompt"])[0]["text"]
    stop = whole[4:7]
    pieces: list[str] = []
    generator = text_generator(max_new_tokens=30, stop_strings=(stop,))
    list(generator.stream(["a prompt"], pieces.append))
    assert "".join(pieces) == f"a prompt{whole.split(stop)[0]}\n"


def test_characters_of_several_bytes_are_shown_whole() -> None:
    pieces: list[str] = []
    stream = TextStream(lambda tokens: bytes(tokens).decode("utf-8", "replace"), pieces.append)
    text = "é€x".encode()
    for end in range(1, len(text) + 1):
        stream.show(list(text[:end]))
    assert pieces == ["é", "€", "x"]


def generate_command(tmp_path: Path, *settings: str) -> list[str]:
    write_run(tmp_path)
    (tmp_path / "config.yml").write_text(
        yaml.safe_dump({**tiny_config(), "load": "auto", "save": str(tmp_path / "run")})
    )
    return [str(tmp_path / "config.yml"), "--set", "maximum_tokens=9", *settings]


def test_generate_prints_samples_and_keeps_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`load: auto` is `save`; without a temperature the text is sampled, not the most likely."""
    out = tmp_path / "deep" / "samples.jsonl"
    command = generate_command(tmp_path, "num_samples=3", "-o", str(out))
    assert run("generate", command) == 0
    shown = capsys.readouterr()
    records = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert all(record["text"] in shown.out for record in records)
    assert len({record["text"] for record in records}) == 3
    assert shown.err.splitlines()[-1] == f"3 samples: {out}"


def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = generate_command(tmp_path, "-o", str(tmp_path / "config.yml" / "x"))
    monkeypatch.setattr("megatron.generation.text.Subject", None)  # the work
    assert run("generate", command) == 2
    assert capsys.readouterr().err.startswith("error: sample_output_file (-o) ")


def test_ctrl_c_keeps_what_was_sampled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "samples.jsonl"
    command = generate_command(tmp_path, "num_samples=3", "-o", str(out))
    show, calls = TextStream.show, []

    def interrupted_in_the_second(self: TextStream, tokens: list[int]) -> None:
        show(self, tokens)
        calls.append(tokens)
        if len(calls) == 9 + 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(TextStream, "show", interrupted_in_the_second)
    assert run("generate", command) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")
    first, second = (json.loads(line) for line in out.read_text("utf-8").splitlines())
    assert first["length"] == 9 and first["message"] is None
    assert second["length"] == 4 and second["message"] == "interrupted"
