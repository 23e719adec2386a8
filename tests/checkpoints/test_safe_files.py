"""Nothing read from a checkpoint or config can execute."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler

from megatron.checkpoints import read_checkpoint
from megatron.checkpoints.safe_files import host_copy, load_file, synced_save
from megatron.checkpoints.store import checksum
from megatron.checkpoints.universal import parameter_folders, read_states, read_weights
from megatron.errors import CheckpointError
from tests.processes import REPOSITORY
from tests.training.cases import ADAM, layout, run_cases, tiny_config, write_data
from tests.training.runs import finish, run, run_config, start_run


class Malicious:
    """Unpickling this runs a program."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def test_a_malicious_file_is_refused(tmp_path: Path) -> None:
    target, file = tmp_path / "owned", tmp_path / "file.pt"
    torch.save({"module": {"x": torch.ones(2)}, "extra": Malicious(target)}, file)
    torch.load(file, weights_only=False)  # the file does what it threatens ...
    assert target.is_dir()
    target.rmdir()
    with pytest.raises(CheckpointError, match="holds more than data"):
        load_file(file)
    assert not target.exists()  # ... but not when we read it


@pytest.mark.parametrize("content", [b"", b"not a file", b"PK\x03\x04garbage" * 9])
def test_garbage_is_named(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"none\.pt: no such checkpoint file"):
        load_file(tmp_path / "none.pt")
    file = tmp_path / "file.pt"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"file\.pt"):
        load_file(file)


class Allocation:
    """Unpickling this takes memory that the file does not have."""

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, (1 << 33,)


def test_no_file_takes_more_memory_than_it_has(tmp_path: Path) -> None:
    file = tmp_path / "file.pt"
    torch.save({"x": Allocation()}, file)
    with pytest.raises(CheckpointError, match="holds more than data"):
        load_file(file)
    torch.save({"x": torch.ones(1).expand(1 << 31)}, file)
    assert file.stat().st_size < 4096
    with pytest.raises(CheckpointError, match="more memory than the file has"):
        load_file(file)
    torch.save({"x": torch.zeros(1 << 20)}, file)
    with zipfile.ZipFile(file) as archive, zipfile.ZipFile(tmp_path / "c.pt", "w", 8) as packed:
        for name in archive.namelist():
            packed.writestr(name, archive.read(name))
    with pytest.raises(CheckpointError, match="unpack to more"):
        load_file(tmp_path / "c.pt")
    torch.save({"x": torch.zeros(4)}, file, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_file(file)


def test_a_refusal_does_not_quote_advice_to_load_it_unsafely(tmp_path: Path) -> None:
    file = tmp_path / "file.pt"
    torch.save({"x": Malicious(tmp_path / "owned")}, file)
    with pytest.raises(CheckpointError) as caught:
        load_file(file)
    assert "weights_only" not in str(caught.value)
    assert "mkdir" in str(caught.value)


def test_a_checksum_is_known_as_soon_as_the_file_is_written(tmp_path: Path) -> None:
    size, value = synced_save({"x": torch.arange(1000)}, tmp_path / "file.pt")
    assert size == (tmp_path / "file.pt").stat().st_size
    assert value == checksum(tmp_path / "file.pt")


def test_plain_states_survive(tmp_path: Path) -> None:
    state = {"step": 3, "values": [torch.arange(4.0)], "nested": {"a": (1, "b", None)}}
    synced_save(state, tmp_path / "file.pt")
    loaded = load_file(tmp_path / "file.pt")
    assert torch.equal(loaded.pop("values")[0], state.pop("values")[0])  # type: ignore[index]
    assert loaded == state


def test_a_host_copy_is_of_its_moment_and_shares_what_was_shared(tmp_path: Path) -> None:
    flat = torch.arange(6.0)
    marked = torch.zeros(2)
    marked.label = "kernel"  # type: ignore[attr-defined]
    state = {
        "views": [flat[:3], flat[3:].view(3, 1)],
        "again": flat,
        "half": torch.ones(2, dtype=torch.bfloat16),
        "none": torch.empty(0),
        "weight": torch.nn.Parameter(torch.ones(2)),
        "marked": marked,
        "scaler": LossScaler(2.0),
        "plain": [3, {"a": (1, None)}],
    }
    copy = host_copy(state)
    flat.add_(1.0)
    state["weight"].data.zero_()  # type: ignore[attr-defined]
    state["scaler"].cur_scale = 7.0  # type: ignore[attr-defined]
    state["plain"][1]["b"] = 2  # type: ignore[index]
    assert torch.equal(copy["again"], torch.arange(6.0))
    assert torch.equal(copy["views"][1], torch.tensor([[3.0], [4.0], [5.0]]))
    copy["again"].zero_()
    assert not copy["views"][0].any(), "views of one storage are views of one copy"
    assert torch.equal(copy["weight"], torch.ones(2)) and copy["half"].dtype == torch.bfloat16
    assert isinstance(copy["weight"], torch.nn.Parameter) and copy["marked"].label == "kernel"
    assert copy["scaler"].cur_scale != 7.0 and copy["plain"] == [3, {"a": (1, None)}]
    assert copy["none"].numel() == 0


def test_a_malicious_universal_checkpoint_is_refused(tmp_path: Path) -> None:
    folder, target = tmp_path / "zero" / "0.word_embeddings.weight", tmp_path / "owned"
    folder.mkdir(parents=True)
    for file, read in (
        ("exp_avg.pt", lambda: read_states(folder)),
        ("fp32.pt", lambda: read_states(folder)),
        ("fp32.pt", lambda: read_weights(tmp_path)),
    ):
        torch.save({"param": torch.ones(2), "extra": Malicious(target)}, folder / file)
        with pytest.raises(CheckpointError, match="holds more than"):
            read()
        assert not target.exists()
        (folder / file).unlink()


def _forge_checksums(checkpoint: Path) -> None:
    """As whoever made the file would."""
    sums = json.loads((checkpoint / "checksums.json").read_text())
    for name in sums:
        sums[name] = [(checkpoint / name).stat().st_size, checksum(checkpoint / name)]
    (checkpoint / "checksums.json").write_text(json.dumps(sums))


def test_a_run_refuses_malicious_model_and_optimizer_files(tmp_path: Path) -> None:
    """Both kinds of file of a ZeRO checkpoint, through DeepSpeed's own loading."""
    save, target = tmp_path / "run", tmp_path / "owned"
    config = run_config(write_data(tmp_path), save, train_iters=2, **layout(zero=1))
    run(config, tmp_path)
    checkpoint = save / "global_step2"
    files = sorted(checkpoint.glob("*_states.pt"))
    assert [f.name.split("_")[0] for f in files] == ["mp", "zero"]
    for file in files:
        original = file.read_bytes()
        state = torch.load(file, weights_only=False)
        state["extra"] = Malicious(target)
        torch.save(state, file)
        _forge_checksums(checkpoint)
        codes, outputs = finish(start_run({**config, "train_iters": 4}, tmp_path))
        assert codes == [2], outputs[0]
        assert f"{file.name}: refused" in outputs[0]
        assert not target.exists()
        file.write_bytes(original)
        _forge_checksums(checkpoint)
    run({**config, "train_iters": 4}, tmp_path)


def test_weights_of_zero_3_are_read_without_its_optimizer_by_no_unsafe_loader(
    tmp_path: Path,
) -> None:
    """DeepSpeed would take them from the newest checkpoint, with a loader that executes."""
    save, target = tmp_path / "run", tmp_path / "owned"
    place = {"optimizer": ADAM, **layout(zero=3)}
    config = tiny_config(write_data(tmp_path), **place)
    anew = {**config, "finetune": True, "iteration": 1}
    cases = {
        "first": {"config": config, "steps": 1, "save": str(save)},
        "newest": {"config": config, "steps": 2, "save": str(save)},
        "anew": {"config": anew, "steps": 0, "resume": str(save), "copy": str(tmp_path / "copy")},
    }
    run_cases(cases, tmp_path, 1)
    weights = read_checkpoint(save, iteration=1).weights
    copied = parameter_folders(tmp_path / "copy" / "global_step0")
    assert copied.keys() == weights.keys()
    for name, folder in copied.items():
        states = read_states(folder)
        assert torch.equal(states["fp32"], weights[name]), name
        assert not any(states[key].any() for key in ("exp_avg", "exp_avg_sq") if key in states)
    (file,) = (save / "global_step1").glob("*_optim_states.pt")
    torch.save({**torch.load(file, weights_only=False), "extra": Malicious(target)}, file)
    _forge_checksums(save / "global_step1")
    with pytest.raises(AssertionError, match=f"{file.name}: refused"):
        run_cases({"anew": cases["anew"]}, tmp_path, 1)
    assert not target.exists()


def _sources() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    ).stdout.split()
    found = [REPOSITORY / name for name in listed] or list(REPOSITORY.rglob("*.py"))
    left_out = {".venv", "tests"}
    return [f for f in found if f.is_file() and not left_out & set(f.relative_to(REPOSITORY).parts)]


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


FORBIDDEN = {
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.full_load",
    "eval",
    "exec",
}


def _dangers(call: ast.Call) -> list[str]:
    name = _dotted(call.func)
    keywords = {k.arg: k.value for k in call.keywords if k.arg}
    found = [name] if name in FORBIDDEN else []
    if name == "yaml.load" and _dotted(keywords.get("Loader", call.func)) == "_ConfigLoader":
        found = []  # the config's loader, tested below
    shell = keywords.get("shell")
    if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
        found.append("shell=True")
    if name == "torch.load":
        only = keywords.get("weights_only")
        if not (isinstance(only, ast.Constant) and only.value is True):
            found.append("torch.load without weights_only=True")
    return found


def test_no_source_can_run_what_it_reads() -> None:
    sources = _sources()
    assert len(sources) > 50
    problems = [
        f"{file.relative_to(REPOSITORY)}:{node.lineno}: {danger}"
        for file in sources
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        for danger in _dangers(node)
        if (file.name, danger) != ("document_outputs.py", "exec")  # cells of our own notebook
    ]
    assert problems == []


def test_the_configs_loader_is_a_safe_one() -> None:
    import yaml

    from megatron.errors import ConfigError
    from megatron.neox_arguments import yaml_files

    assert issubclass(yaml_files._ConfigLoader, yaml.SafeLoader)
    with pytest.raises(ConfigError, match="not valid YAML"):
        yaml_files.parse_yaml("x: !!python/object/apply:os.getcwd []", "text")
