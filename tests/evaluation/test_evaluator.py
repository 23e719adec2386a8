"""Caching, resuming, errors, parallel checkpoints and several processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.evaluation import perplexity
from megatron.evaluation.evaluator import run_evaluation
from megatron.generation import pretrained
from megatron.launcher.environment import free_port
from megatron.neox_arguments import NeoXArgs
from tests.conftest import REPOSITORY
from tests.evaluation.helpers import write_checkpoint, write_data, write_run
from tests.fixture_archives import unpacked
from tests.training.cases import tiny_config
from tests.training.runs import finish, start_run


def result(args: NeoXArgs, name: str = "extrapolation", step: int = 10) -> dict[str, Any]:
    path = Path(args.checkpoint.load or "") / "results" / f"step{step}_{name}.json"
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return content


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("nothing should be computed")


def test_repeating_a_finished_evaluation_does_not_even_load_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args, _ = write_run(tmp_path, eval_lengths=[8, 16])
    assert run_evaluation(args) == 0
    first = result(args)
    capsys.readouterr()
    monkeypatch.setattr(pretrained, "load_pretrained", refuse)
    assert run_evaluation(args) == 0
    assert result(args) == first
    assert "already evaluated" in capsys.readouterr().out


def test_other_parameters_or_weights_are_another_evaluation(tmp_path: Path) -> None:
    args, _ = write_run(tmp_path, eval_lengths=[8])
    assert run_evaluation(args) == 0
    before = result(args)["results"]
    more = args.replace(eval_num_sequences=7)
    assert run_evaluation(more) == 0
    assert result(args)["results"] == before, "another setting must be another file"
    (other,) = (tmp_path / "run" / "results").glob("step10_extrapolation.*.json")
    assert json.loads(other.read_text())["results"]["valid"][0]["sequences"] == 7
    assert run_evaluation(args) == 0
    assert run_evaluation(more) == 0
    assert len(list((tmp_path / "run" / "results").glob("*.json"))) == 2
    shutil.rmtree(tmp_path / "run" / "global_step10")
    write_checkpoint(tmp_path / "run", {**args.to_dict(), "seed": 99})
    assert run_evaluation(args) == 0
    assert result(args)["results"] != before


def test_an_interrupted_evaluation_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args, _ = write_run(tmp_path, eval_lengths=[8, 16, 32])
    measure = perplexity.Extrapolation.entry
    measured: list[tuple[str, int]] = []

    def interrupted(self: Any, context: Any, files: Any, length: int) -> dict[str, Any]:
        if length == 32 and len(measured) < 3:
            raise KeyboardInterrupt
        measured.append((files[0].which, length))
        return measure(self, context, files, length)

    monkeypatch.setattr(perplexity.Extrapolation, "entry", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_evaluation(args)
    assert measured == [("valid", 8), ("valid", 16)]
    assert not (tmp_path / "run" / "results" / "step10_extrapolation.json").exists()
    measured[:] = [("valid", 8), ("valid", 16), ("", 0)]
    assert run_evaluation(args) == 0
    assert measured[3:] == [("valid", 32), ("test", 8), ("test", 16), ("test", 32)]
    assert "continues an interrupted evaluation (2 parts done)" in capsys.readouterr().out
    assert [e["length"] for e in result(args)["results"]["valid"]] == [8, 16, 32]
    assert not list((tmp_path / "run" / "results" / "cache").glob("*.part"))


@pytest.mark.usefixtures("only_local_tasks")
def test_an_unknown_task_names_the_nearest_and_the_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args, _ = write_run(tmp_path, eval_lengths=[8], eval_tasks=["extrapolate", "extrapolation"])
    assert run_evaluation(args) == 1
    assert result(args)["results"]["valid"]
    error = capsys.readouterr().err
    assert "error: extrapolate: unknown task; nearest: extrapolation" in error
    assert "1 of 2 tasks failed: extrapolate" in error


@pytest.mark.slow
def test_the_nearest_names_include_lm_evals_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args, _ = write_run(tmp_path, eval_tasks=["hellaswagg"])
    assert run_evaluation(args) == 1
    assert "unknown task; nearest: hellaswag" in capsys.readouterr().err


def test_no_data_is_an_error_of_the_tasks_that_need_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args, _ = write_run(
        tmp_path,
        eval_tasks=["extrapolation", "passkey"],
        passkey_lengths=[180],
        passkey_depths=1,
        passkey_samples=1,
    )
    config = {key: value for key, value in args.to_dict().items() if key != "data_path"}
    assert run_evaluation(NeoXArgs.from_dict(config)) == 1
    assert "no valid data: set data_path" in capsys.readouterr().err
    assert result(args, "passkey")["results"]["grid"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"load": "/nowhere/run"}, "/nowhere/run: no such checkpoint directory"),
        ({"iteration": 77}, "global_step77 does not exist"),
    ],
)
def test_a_missing_checkpoint_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    args, _ = write_run(tmp_path)
    assert run_evaluation(args.replace(**changes)) == 2
    assert message in capsys.readouterr().err


def test_iteration_selects_the_checkpoint(tmp_path: Path) -> None:
    args, _ = write_run(tmp_path, eval_lengths=[8])
    write_checkpoint(tmp_path / "run", {**args.to_dict(), "seed": 7}, step=20)
    assert run_evaluation(args) == 0
    assert run_evaluation(args.replace(iteration=10)) == 0
    newest, chosen = result(args, step=20), result(args, step=10)
    assert (newest["iteration"], chosen["iteration"]) == (20, 10)
    assert newest["results"] != chosen["results"]


def test_a_tokenizer_larger_than_the_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.tokenizer.tokenizer_kinds import CharLevelTokenizer

    args, _ = write_run(tmp_path, eval_tasks=["passkey"], passkey_lengths=[200])
    monkeypatch.setattr(CharLevelTokenizer, "vocab_size", 50257)
    assert run_evaluation(args) == 1
    assert "CharLevelTokenizer has 50257 tokens, the model only 512" in capsys.readouterr().err


def test_eval_results_prefix_places_the_files(tmp_path: Path) -> None:
    prefix = tmp_path / "elsewhere" / "mine"
    args, _ = write_run(tmp_path, eval_lengths=[8], eval_results_prefix=str(prefix))
    assert run_evaluation(args) == 0
    assert (tmp_path / "elsewhere" / "mine_extrapolation.json").is_file()


def test_an_official_checkpoint_with_two_model_parallel_shards(tmp_path: Path) -> None:
    from megatron.checkpoints import read_checkpoint

    source = unpacked("official_kerple_power_mp2")
    shutil.copytree(source, tmp_path / "official")
    config = read_checkpoint(tmp_path / "official").args.to_dict()
    prefix = write_data(tmp_path / "toy_text_document", vocabulary=128)
    config |= {
        "load": str(tmp_path / "official"),
        "data_path": str(prefix),
        "split": "0.5,0.3,0.2",
        "eval_lengths": [8],
        "eval_num_sequences": 3,
    }
    args = NeoXArgs.from_dict(config)
    assert run_evaluation(args) == 0
    content = result(args, step=7)
    assert content["results"]["valid"][0]["tokens"] == 24
    import kerple
    from tests.evaluation.helpers import plain_losses
    from tests.evaluation.test_perplexity import official_texts

    model = kerple.load_pretrained(tmp_path / "official")
    texts = official_texts(args, 8, 3)["valid"]
    expected = torch.stack([plain_losses(model, text) for text in texts]).mean()
    assert content["results"]["valid"][0]["loss"] == pytest.approx(float(expected), rel=1e-5)


def run_processes(count: int, arguments: list[str]) -> list[subprocess.CompletedProcess[str]]:
    """evaluate.py in `count` processes, as a launcher would start it."""
    port = str(free_port())
    started = []
    for rank in range(count):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        started.append(
            subprocess.Popen(
                [sys.executable, "evaluate.py", *arguments],
                cwd=REPOSITORY,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    finished = []
    for process in started:
        out, error = process.communicate(timeout=120)
        finished.append(subprocess.CompletedProcess(process.args, process.returncode, out, error))
    return finished


CONTRADICTIONS: dict[str, Any] = {
    "norm": ("rmsnorm", "layernorm"),
    "activation": ("relu", "gelu"),
    "seq_length": (8, 16),
    "gpt_j_residual": (True, False),
    "sliding_window_width": (4, "not set"),
    "kerple_bias_scale": ("pre", "post"),
    "num_layers": (3, 2),
    "pos_emb": ("alibi", "kerple_log"),
}


@pytest.mark.parametrize("key", CONTRADICTIONS)
def test_a_config_of_another_model_is_refused_with_both_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    args, _ = write_run(tmp_path, eval_lengths=[8])
    given, found = CONTRADICTIONS[key]
    assert run_evaluation(args.replace(**{key: given})) == 2
    error = capsys.readouterr().err
    assert f"{key} is {found!r}".replace("'not set'", "not set") in error, error
    assert f"{given!r} in the config" in error and "global_step10" in error
    assert not (tmp_path / "run" / "results").exists()


def test_a_result_records_the_checkpoint_not_the_config_given(tmp_path: Path) -> None:
    args, _ = write_run(tmp_path, eval_lengths=[8])
    (tmp_path / "run/global_step10/configs/resolved.yml").write_text(args.to_yaml())
    other = args.replace(hidden_dropout=0.5, eval_num_sequences=3, attention_engine="tiled")
    assert run_evaluation(other) == 0
    found = result(args)
    assert found["config_hash"] == args.config_hash() != other.config_hash()
    assert (found["train_length"], found["pos_emb"]) == (16, "kerple_log")


def test_a_result_names_all_methods_of_a_pattern(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pattern = [{"pos_emb": "none"}, {"pos_emb": "kerple_log"}]
    args, _ = write_run(tmp_path, eval_lengths=[8], pos_emb="kerple_log", layer_pattern=pattern)
    assert run_evaluation(args) == 0
    assert "extrapolation: none+kerple_log, step 10" in capsys.readouterr().out
    assert result(args)["pos_emb"] == "none+kerple_log"


def test_a_dead_peer_is_named_and_ends_the_evaluation_with_77(tmp_path: Path) -> None:
    program = str(REPOSITORY / "tests" / "evaluation" / "lost_peer.py")
    job = start_run(tiny_config("data"), tmp_path, 2, program=[program])
    codes, outputs = finish(job)
    assert codes == [77, 9], outputs[0]
    assert "error (rank 0): rank 1" in outputs[0] and "has died" in outputs[0]
    assert "Traceback" not in outputs[0]
