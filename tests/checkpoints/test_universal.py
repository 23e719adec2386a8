"""Save under one layout, resume under another, optimizer included; against DeepSpeed itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoints import read_checkpoint
from megatron.checkpoints.safe_files import load_file
from megatron.checkpoints.sharding import Sharding
from megatron.checkpoints.universal import WEIGHT, conversion_info, other_names, read_progress
from megatron.errors import CheckpointError
from tests.checkpoints.small_models import random_model, small_args
from tests.processes import REPOSITORY
from tests.training.cases import ADAM, ON_TWO, layout, precision, run_cases, tiny_config, write_data
from tests.training.runs import finish, losses, run, run_config, start_run

HALF = 3
BF16 = precision("bf16")
# Every other way to cut a parameter (T5's table, a gated block, grouped heads, gates, numbers per
# head, an output layer of its own cut by columns), norms of one number, and layers that differ.
ODD = {
    "pos_emb": "rpe",
    "layer_pattern": [{}, {"pos_emb": "kerple_log", "forget_gate": False}],
    "norm": "scalenorm",
    "activation": "swiglu",
    "num_kv_heads": 2,
    "forget_gate": True,
    "attention_sinks": True,
    "scalable_softmax": True,
    "intermediate_size": 132,
    "no_weight_tying": True,
    "output_layer_parallelism": "row",
}
TWO = {
    **ON_TWO,
    "bf16_pp2": {**layout(pp=2), **BF16},
    "bf16_mp2_zero1": {**layout(mp=2, zero=1), **BF16},
    "odd_mp2_zero1": {**layout(mp=2, zero=1), **ODD},
}
ONE = {  # where each of those goes: another way to keep the optimizer each time
    "dp2": layout(zero=3),
    "dp2_zero1": layout(),
    "dp2_zero2": layout(pp=1),
    "dp2_zero3": layout(zero=1),
    "mp2": layout(),
    "mp2_zero1": layout(zero=2),
    "pp2": layout(),
    "pp2_zero1": layout(pp=1, zero=1),
    "bf16_pp2": {**layout(), **BF16},
    "bf16_mp2_zero1": {**layout(zero=3), **BF16},
    "odd_mp2_zero1": {**layout(), **ODD},
}
SAME_MODEL = [name for name in TWO if not name.startswith("odd")]
# What DeepSpeed's own loader reads: from these to one process, and from one process to these.
DEEPSPEED_TO_ONE = {
    "dp2": layout(zero=1),
    "dp2_zero1": layout(zero=1),
    "dp2_zero2": layout(zero=3),
    "mp2": layout(pp=1, zero=1),
    "pp2_zero1": layout(zero=2),
    "bf16_pp2": {**layout(), **BF16},
    "odd_mp2_zero1": {**layout(zero=1), **ODD},
}
DEEPSPEED_BACK = [name for name in TWO if "zero" in name]
# With ZeRO 3 it reads the same numbers, but lets both parameter groups count one step number.
DEEPSPEED_GOES_ON = [name for name in DEEPSPEED_BACK if name != "dp2_zero3"]
CONVERTED = DEEPSPEED_BACK  # by DeepSpeed's own converter, which reads ZeRO's files
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}
PADDED = {"make_vocab_size_divisible_by": 24}  # of 64 words: 72 rows, or 96 under mp 2


def _source(name: str) -> str:
    return "odd_one" if name.startswith("odd") else "one"


def _convert(root: Path, name: str) -> None:
    """DeepSpeed's ds_to_universal, in this process."""
    from deepspeed.checkpoint import ds_to_universal

    (root / "converted" / name).mkdir(parents=True)
    ds_to_universal.main(
        Namespace(
            input_folder=str(root / "saved" / name / f"global_step{HALF}"),
            output_folder=str(root / "converted" / name / f"global_step{HALF}"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=False,
        )
    )


class Cases:
    """Cases for the worker; each model trained, resumed or copied."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.data = write_data(root)

    def case(self, place: dict[str, Any], **keys: Any) -> dict[str, Any]:
        common = {"optimizer": ADAM, "weight_decay": 0.1, "lr_decay_style": "cosine"}
        tied = {"no_weight_tying": False}  # the harder case: the head is the embedding
        return {"config": tiny_config(self.data, **{**common, **tied, **place}), **keys}

    def resumed(
        self, place: dict[str, Any], source: str, copy: str, steps: int = 0, how: str = "resume"
    ) -> dict[str, Any]:
        """Read a universal checkpoint, write it again at once, and go on."""
        paths = {how: str(self.root / source), "copy": str(self.root / copy)}
        return self.case(place, steps=steps, **paths)

    def there(self) -> dict[str, Any]:
        """In two processes: trained, saved and exported."""
        cases = {}
        for name, place in TWO.items():
            cases[name] = self.case(place, steps=HALF, export=str(self.root / "from" / name))
            if name in CONVERTED:
                cases[name]["save"] = str(self.root / "saved" / name)
        export = str(self.root / "from" / "padded")
        cases["padded"] = self.case({**layout(mp=2), **PADDED}, steps=HALF, export=export)
        export = str(self.root / "full_disk")
        cases["full_disk"] = self.case(layout(mp=2), steps=1, export=export, full_disk_on=0)
        return cases

    def one(self) -> dict[str, Any]:
        """In one process: from all of those, and what goes back."""
        cases: dict[str, Any] = {"whole": self.case(layout(), steps=2 * HALF)}
        for name, place in (("one", layout()), ("odd_one", {**layout(), **ODD})):
            cases[name] = self.case(place, steps=HALF, export=str(self.root / "from" / name))
        for name, place in ONE.items():
            cases[f"to_one_{name}"] = self.resumed(place, f"from/{name}", f"copy/{name}", HALF)
        for name, place in DEEPSPEED_TO_ONE.items():
            cases[f"deepspeed_{name}"] = self.resumed(
                place, f"from/{name}", f"deepspeed/{name}", how="deepspeed_resume"
            )
        for name in CONVERTED:
            cases[f"converted_{name}"] = self.resumed(
                ONE[name], f"converted/{name}", f"converted_copy/{name}"
            )
        cases["padded"] = self.resumed({**layout(), **PADDED}, "from/padded", "copy/padded")
        export = str(self.root / "from" / "sgd")
        cases["sgd"] = self.case({**layout(zero=1), **SGD}, steps=HALF, export=export)
        cases["sgd_copy"] = self.resumed({**layout(), **SGD}, "from/sgd", "copy/sgd")
        return cases

    def back(self) -> dict[str, Any]:
        """In two processes again."""
        cases = {}
        for name, place in TWO.items():
            source = f"from/{_source(name)}"
            cases[f"back_{name}"] = self.resumed(place, source, f"back/{name}", HALF)
            if name in DEEPSPEED_BACK:
                cases[f"deepspeed_back_{name}"] = self.resumed(
                    place, source, f"deepspeed_back/{name}", HALF, how="deepspeed_resume"
                )
        cases["padded_back"] = self.resumed(
            {**layout(mp=2), **PADDED}, "copy/padded", "back/padded"
        )
        return cases


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("reshard")
    cases = Cases(root)
    found: dict[str, Any] = {
        f"there_{k}": v for k, v in run_cases(cases.there(), root / "a", 2).items()
    }
    for name in CONVERTED:
        _convert(root, name)
    found |= run_cases(cases.one(), root / "b", 1)
    return {**found, **run_cases(cases.back(), root / "c", 2), "root": root, "cases": cases}


def _files(directory: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Every number of a universal checkpoint: parameter -> state -> tensor."""
    zero = directory / f"global_step{HALF}" / "zero"
    found: dict[str, dict[str, torch.Tensor]] = {}
    for file in sorted(zero.glob("*/*.pt")):
        if not file.parent.is_symlink():
            content = load_file(file)
            value = content["param"] if isinstance(content, dict) else content
            found.setdefault(file.parent.name, {})[file.stem] = value
    return found


def _assert_equal(copy: Path, source: Path) -> None:
    """Every number of every parameter, to the bit."""
    _assert_same(copy, source, {WEIGHT, "exp_avg", "exp_avg_sq", "step"})
    for states in _files(source).values():
        assert states["step"] == HALF and states["exp_avg"].abs().sum() > 0


def _assert_same(copy: Path, source: Path, keys: set[str]) -> None:
    expected, found = _files(source), _files(copy)
    assert len(expected) > 20
    assert found.keys() == expected.keys()
    for name, states in expected.items():
        assert found[name].keys() == states.keys() == keys, name
        for key, value in states.items():
            assert torch.equal(found[name][key], value), f"{name} {key}"


@pytest.mark.parametrize("name", TWO)
def test_nothing_is_lost_on_the_way_to_one_process(results: dict[str, Any], name: str) -> None:
    _assert_equal(results["root"] / "copy" / name, results["root"] / "from" / name)


@pytest.mark.parametrize("name", TWO)
def test_nothing_is_lost_on_the_way_back(results: dict[str, Any], name: str) -> None:
    _assert_equal(results["root"] / "back" / name, results["root"] / "from" / _source(name))


@pytest.mark.parametrize("name", DEEPSPEED_TO_ONE)
def test_deepspeeds_own_loader_reads_it_in_one_process(results: dict[str, Any], name: str) -> None:
    """checkpoint: {load_universal: true}"""
    _assert_equal(results["root"] / "deepspeed" / name, results["root"] / "from" / name)


@pytest.mark.parametrize("name", DEEPSPEED_BACK)
def test_deepspeeds_own_loader_reads_it_in_two(results: dict[str, Any], name: str) -> None:
    source = results["root"] / "from" / _source(name)
    _assert_equal(results["root"] / "deepspeed_back" / name, source)


@pytest.mark.parametrize("name", DEEPSPEED_GOES_ON)
def test_training_goes_on_the_same_by_either_loader(results: dict[str, Any], name: str) -> None:
    ours, theirs = results[f"back_{name}"], results[f"deepspeed_back_{name}"]
    assert len(ours["losses"]) == HALF and ours["losses"] == theirs["losses"]
    for mine, other in zip(ours["fingerprints"], theirs["fingerprints"], strict=True):
        assert mine["weights"] == other["weights"] and mine["masters"] == other["masters"]


@pytest.mark.parametrize("name", CONVERTED)
def test_what_deepspeeds_own_converter_makes_is_read(results: dict[str, Any], name: str) -> None:
    """ds_to_universal, of a checkpoint of ours, instead of our tool."""
    _assert_equal(results["root"] / "converted_copy" / name, results["root"] / "from" / name)


def test_a_run_loads_what_deepspeeds_own_converter_makes(results: dict[str, Any]) -> None:
    cases = results["cases"]
    converted = str(cases.root / "converted" / "dp2_zero1")
    config = cases.case(layout(), steps=1)["config"]
    output = run({**config, "load": converted, "train_iters": HALF + 1}, cases.root)
    assert f"resuming after step {HALF}" in output


@pytest.mark.parametrize("name", SAME_MODEL)
@pytest.mark.parametrize("way", ["to_one", "back"])
def test_training_goes_on_as_if_nothing_had_happened(
    results: dict[str, Any], name: str, way: str
) -> None:
    whole = results["whole"]["losses"]
    resumed = results[f"{way}_{name}"]["losses"]
    close = 2e-2 if "bf16" in name else 5e-5
    assert resumed == pytest.approx(whole[HALF:], rel=close)
    if "bf16" not in name:
        assert resumed[0] != pytest.approx(whole[0], rel=1e-3)


def test_padding_follows_the_model_parallel_size(results: dict[str, Any]) -> None:
    """96 rows of 64 words become 72 and 96 again; the words and the first padding stay."""
    root, name = results["root"], "0.word_embeddings.weight"
    wide, narrow = _files(root / "from/padded")[name], _files(root / "copy/padded")[name]
    again = _files(root / "back/padded")[name]
    for state in (WEIGHT, "exp_avg", "exp_avg_sq"):
        assert (wide[state].shape[0], narrow[state].shape[0]) == (96, 72)
        assert torch.equal(narrow[state], wide[state][:72])
        assert torch.equal(again[state][:72], narrow[state])
        assert again[state].shape[0] == 96 and not again[state][72:].any()


def test_an_optimizer_that_counts_no_steps(results: dict[str, Any]) -> None:
    root = results["root"]
    _assert_same(root / "copy/sgd", root / "from/sgd", {WEIGHT, "momentum_buffer"})


def test_a_full_disk_stops_all_ranks(results: dict[str, Any]) -> None:
    """Rank 0 cannot write; rank 1, which sends it slices, does not wait for it."""
    for error in results["there_full_disk"]["save_errors"]:
        assert "rank 0: OSError" in error and "No space left" in error and "rank 1:" not in error
    left = [path.name for path in (results["root"] / "full_disk").iterdir()]
    assert left == [".incomplete"]


def test_one_command(tmp_path: Path) -> None:
    """mp2 -> mp1 through the tool, after the error that asks for it."""
    data, save, target = write_data(tmp_path), tmp_path / "run", tmp_path / "universal"
    config = run_config(
        data, save, train_iters=4, attention_dropout=0.0, hidden_dropout=0.0, **layout(mp=2)
    )
    run(config, tmp_path, processes=2)
    single = {**config, **layout(), "train_iters": 6, "save": str(tmp_path / "next")}
    codes, outputs = finish(start_run({**single, "load": str(save)}, tmp_path))
    assert codes == [2]
    assert "model_parallel_size 2 -> 1" in outputs[0]
    assert "tools/reshard_checkpoint.py" in outputs[0]
    tool = [sys.executable, "tools/reshard_checkpoint.py", str(save), str(target)]
    done = subprocess.run(tool, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (target / "latest_universal").read_text() == "global_step4"
    index, layout_file = target / "global_step4/universal.json", save / "global_step4/layout.json"
    known = json.loads(layout_file.read_text())["data"]
    assert json.loads(index.read_text())["data"] == known and data in known
    assert "resuming after step 4" in run({**single, "load": str(target)}, tmp_path)
    assert sorted(losses(tmp_path / "next")) == [5, 6]
    sgd = {**single, **SGD, "load": str(target), "save": str(tmp_path / "sgd")}
    codes, outputs = finish(start_run(sgd, tmp_path))
    assert codes == [2] and "optimizer.type is 'adam' in the checkpoint" in outputs[0]
    sgd["allow_changed"] = ["optimizer"]
    codes, outputs = finish(start_run(sgd, tmp_path))
    assert codes == [2] and "another optimizer: adam, where optimizer.type is sgd" in outputs[0]
    again = subprocess.run(
        [*tool[:2], str(target), str(tmp_path / "x")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert again.returncode == 2 and "universal already" in again.stderr
    original, universal = read_checkpoint(save), read_checkpoint(target)  # as evaluation does
    assert universal.weights.keys() == original.weights.keys()
    for name, weight in original.weights.items():
        assert torch.equal(universal.weights[name], weight), name


def test_progress_is_the_indexs_or_that_of_deepspeeds_own_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither universal\.json nor mp_rank_00"):
        read_progress(tmp_path)
    counts = {"iteration": 3, "consumed_samples": 12, "skipped_steps": 1}
    torch.save({**counts, "lr_scheduler": {"steps": 3}}, tmp_path / "mp_rank_00_model_states.pt")
    assert read_progress(tmp_path) == {**counts, "schedule": {"steps": 3}}
    index = {"format": 1, **counts, "iteration": 4, "vocab_size": 7}
    (tmp_path / "universal.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"holds no training progress .*schedule"):
        read_progress(tmp_path)
    (tmp_path / "universal.json").write_text(json.dumps({**index, "schedule": {"steps": 4}}))
    expected = {**counts, "iteration": 4, "vocab_size": 7, "schedule": {"steps": 4}}
    assert read_progress(tmp_path) == expected


def test_deepspeed_is_told_which_parameters_every_rank_has_whole() -> None:
    args = small_args(pos_emb="kerple_log", num_layers=1)
    shapes = {name: tuple(p.shape) for name, p in random_model(args).named_parameters()}
    info = conversion_info(shapes, Sharding.of(args.model, neox=False), 2)
    patterns = info["tp_replicated_parameter_patterns"]
    whole = {name for name in shapes if any(re.match(p, name) for p in patterns)}
    assert whole == {
        name for name in shapes if "norm" in name or name.endswith(("dense.bias", "4h_to_h.bias"))
    }
    first, other = "0.word_embeddings.weight", "2.mlp.dense_4h_to_h.bias"
    assert other_names(first, tied=False) == [f"sequential.{first}"]
    assert other_names(other, tied=True) == [f"sequential.{other}"]
    tied = "tied_modules.embedding.word_embeddings.weight"
    assert other_names(first, tied=True) == [f"sequential.{first}", tied]
