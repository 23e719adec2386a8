"""generate.py: texts on the screen and in a file, stop strings, prompts from a keyboard."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import yaml

from megatron.commands import run
from megatron.generation.text import TextGenerator, TextStream, interactive, run_generation
from megatron.model import GPTModel, ModelSpec
from megatron.tokenizer import build_tokenizer
from tests.evaluation.helpers import sharpened, tiny_config, write_run
from tests.generation.test_decoding import greedy_by_hand


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
    assert run_generation(args.replace(norm="rmsnorm", text_gen_type="unconditional")) == 2
    told = "norm is 'layernorm' in the checkpoint and 'rmsnorm' in the config"
    assert told in capsys.readouterr().err


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
    assert "replaced" not in shown.err
    assert run("generate", [*command, "--set", "inference_dtype=bf16"]) == 0
    assert f"{out}: exists and will be replaced" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = generate_command(tmp_path, "-o", str(tmp_path / "config.yml" / "x"))
    monkeypatch.setattr("megatron.generation.text.SelectedCheckpoint", None)  # the work
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
