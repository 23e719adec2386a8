"""kerple demo --model: a size that fits the time, then a model that chat can open."""

from __future__ import annotations

import io
import shlex
import shutil
from pathlib import Path

import pytest

from megatron.commands import demo_model, run
from megatron.commands.demo_model import (
    BATCH,
    LENGTH,
    SIZES,
    TOKENS_PER_PARAMETER,
    base_config,
    measured_speed,
    sized,
)
from megatron.neox_arguments import NeoXArgs
from tests.conftest import REPOSITORY


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "texts"
    place.mkdir()
    for number, text in enumerate((REPOSITORY / "LICENSE").read_text("utf-8").split("\n\n")):
        (place / f"{number:03d}.txt").write_text(text)
    return place


def words(config: dict[str, object]) -> tuple[object, object]:
    return config["num_layers"], config["hidden_size"]


def test_the_largest_size_that_reads_enough_in_the_time(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{" + ",".join(f'"{i}": {i}' for i in range(4096)) + "}")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    base = base_config(tmp_path / "x_text_document", tmp_path / "run")
    hour = {speed: sized(base, 3600, speed) for speed in (1e9, 1e11, 1e14)}
    assert words(hour[1e9]) == SIZES[0] and words(hour[1e14]) == SIZES[-1]
    chosen = hour[1e11]
    larger = SIZES[SIZES.index((chosen["num_layers"], chosen["hidden_size"])) + 1]
    for size, fits in ((words(chosen), True), (larger, False)):
        shape = dict(zip(("num_layers", "hidden_size"), size, strict=True))
        tried = {**chosen, **shape, "num_attention_heads": shape["hidden_size"] // 32}
        flops, parameters = demo_model._flops_and_parameters(tried)
        tokens = 3600 * 1e11 / flops * BATCH * LENGTH
        assert (tokens >= TOKENS_PER_PARAMETER * parameters) == fits
    args = NeoXArgs.from_dict(chosen)
    assert args.optimization.lr_decay_iters == args.optimization.train_iters
    assert chosen["kerple_lr_scale"] * 1e-3 * chosen["train_iters"] == pytest.approx(30, rel=0.1)


def test_a_model_of_own_text_is_trained_exported_and_answers(
    texts: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_model, "measured_speed", lambda _: 1e9)
    small = ["--set", "num_layers=1", "train_micro_batch_size_per_gpu=2", "split=80,10,10"]
    assert run("demo", ["--model", "--minutes", "0.01", "--input", str(texts), *small]) == 0
    said = capfd.readouterr()
    assert "1.00e+09 flops a second: 2 layers, 64 wide" in said.out
    assert Path("runs/model_hf/model.safetensors").is_file()
    hint = [line for line in said.err.splitlines() if line.startswith("next: ")][-1]
    _, starter, command, folder = shlex.split(hint)
    assert (starter, command, folder) == ("kerple", "chat", "runs/model")
    monkeypatch.setattr("sys.stdin", io.StringIO("The license\n"))
    assert run(command, [folder, "--set", "maximum_tokens=3"]) == 0
    assert "The license" in capfd.readouterr().out
    monkeypatch.setattr(demo_model, "find_spec", lambda _: None)
    shutil.rmtree("runs/model_hf")
    assert run("demo", ["--model", *small]) == 0
    assert "transformers is not installed: the model is trained, but" in capfd.readouterr().out
    assert not Path("runs/model_hf").exists()
    assert run("demo", ["--model", "--minutes", "-1"]) == 2
    assert "--minutes -1: more than 0" in capfd.readouterr().err


@pytest.mark.slow  # another training
def test_the_speed_is_that_of_training_steps(
    texts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prefix = demo_model._tokens(
        demo_model._parser().parse_args(["--model", "--input", str(texts), "--data", "data"])
    )
    speed = measured_speed(base_config(prefix, Path("runs/model")))
    assert 1e7 < speed < 1e15
    assert "next: " not in capfd.readouterr().err, "its folder is gone"
