"""Runs that began before a key existed are resumed as they began."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import kerple
from megatron.checkpoints.run_state import LAYOUT, write_configs
from megatron.checkpoints.saved_config import (
    _found,
    _plain,
    check_agreement,
    check_same_model,
    config_to_resume,
    intermediate_size_for,
    values_when_saved,
)
from megatron.checkpoints.store import CHECKSUMS, CheckpointStore, checksum
from megatron.errors import CheckpointError
from megatron.neox_arguments import NeoXArgs
from megatron.training.optimizer import Schedule
from tests.training.cases import tiny_config, write_data
from tests.training.runs import losses, run, run_config

STEPS, FIRST = 6, 2


def forget_keys(save: Path, *keys: str, **values: Any) -> None:
    """Make the newest checkpoint one of a version that did not know `keys`, and had `values`."""
    store = CheckpointStore(save)
    newest = store.newest()
    assert newest is not None
    folder = store.path(newest)
    file = folder / "configs" / "resolved.yml"
    saved = yaml.safe_load(file.read_text())
    kept = {key: saved[key] for key in saved if key not in keys}
    file.write_text(yaml.safe_dump({**kept, **values}))
    layout = folder / LAYOUT
    known = json.loads(layout.read_text())
    known.pop("grad_accum_dtype")
    layout.write_text(json.dumps(known))
    sums = json.loads((folder / CHECKSUMS).read_text())
    for changed in (file, layout):
        name = str(changed.relative_to(folder))
        sums[name] = [changed.stat().st_size, checksum(changed)]
    (folder / CHECKSUMS).write_text(json.dumps(sums))


def rates(save: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["lr"] for line in lines if "lr" in line}


@pytest.mark.parametrize("override", [False, True])
def test_a_run_from_before_lr_decay_rule_keeps_its_schedule(tmp_path: Path, override: bool) -> None:
    save = tmp_path / "run"
    schedule = {"lr_decay_style": "exponential", "warmup": 0.34, "lr_decay_iters": STEPS}
    config = run_config(write_data(tmp_path), save, **schedule)
    run({**config, "train_iters": FIRST, "lr_decay_rule": "earlier"}, tmp_path)
    forget_keys(save, "lr_decay_rule", "kerple_lr_scale", "kerple_weight_decay")
    again = {**config, "train_iters": STEPS, "override_lr_scheduler": override}
    output = run(again, tmp_path)
    assert ("from before lr_decay_rule existed" in output) is not override
    rule = "neox" if override else "earlier"
    rate = Schedule(0.01, 0.0, 0.34 * STEPS, STEPS, "exponential", rule)
    expected = {step: rate(step - 1) for step in range(FIRST + 1, STEPS + 1)}
    found = rates(save)
    assert {step: found[step] for step in expected} == pytest.approx(expected, rel=1e-9)
    saved = yaml.safe_load((save / f"global_step{STEPS}/configs/resolved.yml").read_text())
    assert saved["lr_decay_rule"] == rule  # what the next resume goes by


def test_an_earlier_run_keeps_its_width_its_window_and_its_bf16_sums(tmp_path: Path) -> None:
    """Its config said: a gated MLP of 48, a window of 5 keys; gradients were added up in bf16."""
    data, plain = write_data(tmp_path), {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    said = {"activation": "swiglu", "precision": "bf16", **plain}
    said |= {"intermediate_size": 48, "sliding_window_width": 5}
    meant = {**said, "intermediate_size": 144, "sliding_window_width": 4}
    meant |= {"data_types": {"grad_accum_dtype": "bf16"}}
    save, whole = tmp_path / "run", tmp_path / "whole"
    run(run_config(data, whole, **meant, train_iters=4), tmp_path)
    run(run_config(data, save, **meant, train_iters=2), tmp_path)
    new = ("lr_decay_rule", "mlp_multiple_of", "data_types")
    forget_keys(save, *new, intermediate_size=48, sliding_window_width=5)
    assert read_shape(save) == (48, 5)
    run(run_config(data, save, **said, train_iters=4), tmp_path)
    assert losses(save) == losses(whole)


def read_shape(save: Path) -> tuple[int, int | None]:
    """What an evaluation of the run would build."""
    spec = kerple.load_pretrained(save).spec
    return spec.ffn_size, spec.attention_window


@pytest.mark.parametrize(("given", "expected"), [({}, 0.8), ({"momentum": 0.5}, 0.5)])
def test_an_earlier_sgd_run_keeps_its_momentum(
    tmp_path: Path, given: dict[str, float], expected: float
) -> None:
    """It was betas[0]; as in GPT-NeoX it is now 0 unless `momentum` says more."""
    block = {"type": "sgd", "params": {"lr": 0.1, "betas": [0.8, 0.9], "eps": 1e-8}}
    now = {"type": "sgd", "params": {"lr": 0.1, "betas": [0.8, 0.9], **given}}
    args = NeoXArgs.from_dict(tiny_config("data", optimizer=now))
    assert args.optimization.optimizer.params.momentum == given.get("momentum", 0.0)
    (tmp_path / "configs").mkdir()
    saved = {**args.to_dict(), "optimizer": block}
    (tmp_path / "configs" / "resolved.yml").write_text(yaml.safe_dump(saved))
    began = config_to_resume(args, tmp_path)
    assert began.optimization.optimizer.params.momentum == expected


def test_an_earlier_run_keeps_tables_that_no_layer_scales() -> None:
    """apply_query_key_layer_scaling had no effect before scale_tables_by_layer existed."""
    today = {"lr_decay_rule": "neox", "mlp_multiple_of": 1, "apply_query_key_layer_scaling": True}
    assert values_when_saved(today) == {"scale_tables_by_layer": False}
    assert values_when_saved({**today, "scale_tables_by_layer": True}) == {}


def test_files_are_compared_by_name_and_methods_by_meaning() -> None:
    assert _plain("data_path", "/a/x") == _plain("data_path", "/b/x") != _plain("data_path", "/b/y")
    assert _plain("train_data_paths", ["/a/x", "/a/y"]) == ["x", "y"]
    assert _plain("data_path", None) is None
    assert _plain("pos_emb", "kerple_log") == "kerple_log" and _plain("pos_emb", None) is None
    assert _plain("norm", "x/y") == "x/y" and _plain("split", (1, 2)) == [1, 2]


def test_gated_widths_of_earlier_runs_are_eight_thirds_in_steps_of_64() -> None:
    for hidden, width in ((48, 128), (96, 256), (512, 1408)):
        saved = {"activation": "swiglu", "hidden_size": hidden}
        changed = values_when_saved(saved)["intermediate_size"]
        assert changed == intermediate_size_for(width, "swiglu")


def test_another_pattern_is_refused_with_both_values() -> None:
    """However its counts are written; names of the official code are ours."""
    values = {**tiny_config("x"), "num_layers": 4}
    values.pop("pos_emb")

    def config(*entries: dict[str, Any]) -> NeoXArgs:
        return NeoXArgs.from_dict({**values, "layer_pattern": list(entries)})

    power = {"pos_emb": "kerple_power"}
    saved = config({"count": 2, "pos_emb": "kerple_power_ap_"}, {"pos_emb": "none"})
    check_same_model(saved, config(power, power, {"pos_emb": "none"}), Path("x"), native=True)
    other = config({"count": 2, **power}, {"pos_emb": "none", "sliding_window_width": 7})
    with pytest.raises(CheckpointError) as caught:
        check_same_model(saved, other, Path("x"), native=True)
    assert "kerple_power_ap_'}, {'pos_emb': 'none'}] in the checkpoint" in str(caught.value)
    assert "'sliding_window_width': 7}] in the config" in str(caught.value)


def test_what_may_change_on_resuming_is_named_key_by_key(tmp_path: Path) -> None:
    config = tiny_config("x")
    write_configs(tmp_path / "configs", NeoXArgs.from_dict(config))

    def agree(**changes: Any) -> list[str]:
        args = NeoXArgs.from_dict({**config, **changes})
        return check_agreement(tmp_path, args, batch_size=4, saved_batch_size=4)

    assert agree() == []
    with pytest.raises(CheckpointError, match=r"pos_emb is .*allow_changed: \[pos_emb\]"):
        agree(pos_emb="alibi")
    assert "pos_emb" in agree(pos_emb="alibi", allow_changed=["pos_emb"])[0]
    other = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "betas": [0.5, 0.9]}}}
    with pytest.raises(CheckpointError, match=r"optimizer\.params\.betas"):
        agree(**other, allow_changed=["pos_emb"])
    assert agree(**other, allow_changed=["optimizer"])


def test_a_file_of_the_tokenizer_may_lie_beside_the_checkpoint(tmp_path: Path) -> None:
    assert _found("elsewhere/vocab.json", tmp_path / "run") == "elsewhere/vocab.json"
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab.json").touch()
    found = str(tmp_path / "tokenizer" / "vocab.json")
    assert _found("elsewhere/vocab.json", tmp_path / "run") == found
