"""A checkpoint from a stranger is data: whatever class it names, nothing of it is imported."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kerple import load_pretrained
from megatron.checkpoints import read_checkpoint
from megatron.checkpoints.store import write_checksums
from megatron.commands import run
from megatron.errors import KerpleError
from megatron.generation.pretrained import SelectedCheckpoint
from megatron.neox_arguments import NeoXArgs
from megatron.terminal import run_command
from megatron.training import resharding
from tests.checkpoints.small_models import saved_model, small_args

MODULE = """
from pathlib import Path
Path(__file__).with_name("i_ran").touch()
from megatron.model.positional_embeddings import KerpleLog
class X(KerpleLog):
    pass
"""


class Stranger:
    """A run of somebody else's below the working directory, with a program inside."""

    def __init__(self, working_directory: Path) -> None:
        self.package = f"runs_{uuid.uuid4().hex[:8]}"
        self.folder = working_directory / self.package / "stranger"
        saved_model(self.folder, pos_emb="kerple_log")
        (self.folder / "evil.py").write_text(MODULE)
        self.name = f"{self.package}.stranger.evil:X"
        self.config = self.folder / "global_step5" / "configs" / "resolved.yml"
        content = yaml.safe_load(self.config.read_text())
        self.config.write_text(yaml.safe_dump({**content, "pos_emb": self.name}))
        write_checksums(self.folder / "global_step5")  # as a forger would

    @property
    def ran(self) -> bool:
        return (self.folder / "i_ran").exists()


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stranger]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Stranger(tmp_path)
    for name in [name for name in sys.modules if name.startswith("runs_")]:
        del sys.modules[name]


def test_load_pretrained_refuses_and_runs_nothing(stranger: Stranger) -> None:
    with pytest.raises(KerpleError, match="--allow-kernel"):
        load_pretrained(stranger.folder)
    assert not stranger.ran


def test_the_user_may_allow_it_by_name(stranger: Stranger) -> None:
    model = load_pretrained(stranger.folder, allow_kernel=stranger.name)
    assert model.spec.pos_emb == stranger.name
    assert stranger.ran


def test_another_allowed_class_does_not_help(stranger: Stranger) -> None:
    with pytest.raises(KerpleError, match="--allow-kernel"):
        load_pretrained(stranger.folder, allow_kernel="some.other:Y")
    assert not stranger.ran


@pytest.mark.parametrize("name", ["inspect_checkpoint", "convert_checkpoint"])
def test_tools_refuse_with_one_line(
    stranger: Stranger, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(stranger.folder), *(["out", "--to", "hf"] if "convert" in name else [])]
    assert run(name, arguments) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert "--allow-kernel" in error
    assert not stranger.ran


def test_resharding_refuses(stranger: Stranger) -> None:
    assert run_command(resharding.main, [str(stranger.folder), "out", "5"]) == 2
    assert not stranger.ran


def test_evaluation_refuses_a_checkpoint_with_another_class(stranger: Stranger) -> None:
    args = small_args(pos_emb="kerple_log", load=str(stranger.folder))
    with pytest.raises(KerpleError, match="--allow-kernel"):
        _ = SelectedCheckpoint(args, "cpu").model
    assert not stranger.ran


def test_a_hugging_face_folder_refuses(stranger: Stranger, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    saved_model(tmp_path / "honest", pos_emb="kerple_log")
    from megatron.checkpoints.hf.folder import write_hf

    write_hf(read_checkpoint(tmp_path / "honest"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pos_emb": stranger.name}))
    write_checksums(folder)
    with pytest.raises(KerpleError, match="--allow-kernel"):
        load_pretrained(folder)
    assert not stranger.ran


def test_a_config_inside_the_run_does_not_vouch_for_it(stranger: Stranger) -> None:
    with pytest.raises(KerpleError, match="--allow-kernel"):
        NeoXArgs.from_files([stranger.config])
    assert not stranger.ran


def test_a_config_of_ones_own_does(stranger: Stranger, tmp_path: Path) -> None:
    own = tmp_path / "mine.yml"
    own.write_text(stranger.config.read_text())
    assert NeoXArgs.from_files([own]).model.pos_emb == stranger.name
    assert load_pretrained(stranger.folder).spec.pos_emb == stranger.name


@pytest.mark.parametrize("key", ["eval_include_path", "launcher_args"])
def test_other_keys_that_lead_to_programs_are_not_obeyed_there(
    stranger: Stranger, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    content = yaml.safe_load(stranger.config.read_text())
    stranger.config.write_text(
        yaml.safe_dump({**content, "pos_emb": "kerple_log", key: str(stranger.folder)})
    )
    assert NeoXArgs.from_files([stranger.config]).to_dict().get(key) is None
    assert f"{key} is ignored" in capsys.readouterr().err
    args = NeoXArgs.from_files([stranger.config], sets=[f"{key}=mine"])
    assert args.to_dict()[key] == "mine"
