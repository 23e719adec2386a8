"""GPT-NeoX's and the official fork's own files: each is described, or refused with all its reasons.

They belong to others and are not in this repository. `GPT_NEOX_CONFIGS` names a copy of GPT-NeoX's
`configs` folder, `KERPLE_CONFIGS` one of the fork's; without them the folders beside the repository
are looked for.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.commands import model_scripts
from megatron.errors import ConfigError
from megatron.neox_arguments import GROUPS, NeoXArgs
from megatron.neox_arguments.values import declared
from megatron.neox_arguments.yaml_files import read_layer
from tests.conftest import REPOSITORY


def folder(variable: str, name: str) -> Path:
    """The folder that a variable names, or the one of that name beside this repository."""
    if variable in os.environ:
        return Path(os.environ[variable])
    roots = [REPOSITORY.parent, REPOSITORY.parent.parent]
    places = [root / "shared" / "fixtures" / name for root in roots]
    return next((place for place in places if place.is_dir()), places[0])


NEOX = folder("GPT_NEOX_CONFIGS", "neox_configs")
FORK = folder("KERPLE_CONFIGS", "kerple_configs")
FILES = sorted(NEOX.rglob("*.yml"))
needs_neox = pytest.mark.skipif(not FILES, reason="needs GPT-NeoX's configs (GPT_NEOX_CONFIGS)")
needs_fork = pytest.mark.skipif(not FORK.is_dir(), reason="needs the fork's configs")

# File -> what its refusal must name.
REFUSED: dict[str, tuple[str, ...]] = {
    "1-3B-transformer-engine.yml": ("Transformer Engine", "te_layernorm_mlp", "te_mha"),
    "125M-dmoe.yml": ("mixture of experts",),
    "gmlp_small.yml": ("gmlp", "eps"),
    "llemma/34B.yml": ("attention_type",),
    "llemma/7B.yml": ("decay_lr_to", "warmup_iters"),
    "local_setup_comet.yml": ("Comet",),
    "rwkv/170M.yml": ("rwkv",),
    "sparse.yml": ("sparse attention", "local"),
    **{
        f"mamba/mamba-{size}.yml": ("Mamba", "mamba", "output_layer_init_method")
        for size in ("130M", "370M", "790M", "1.4B", "2.8B")
    },
}


def command(file: Path) -> list[str]:
    """A file of a model alone; one of places, loggers and so on behind GPT-NeoX's small model."""
    is_model = any(
        line.strip().strip('"').replace("-", "_").startswith("num_layers")
        for line in file.read_text().splitlines()
    )
    return [str(file)] if is_model else [str(NEOX / "125M.yml"), "--override", str(file)]


def dry_run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert model_scripts.deepy(["train.py", *arguments, "--dry-run"]) == 0
    return capsys.readouterr().out


@needs_neox
@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(NEOX)))
def test_every_file_is_described_or_refused_once(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    name = str(file.relative_to(NEOX))
    reasons = REFUSED.get(name, ())
    if not reasons:
        report = dry_run(command(file), capsys)
        for part in ("# resolved config", "# parameters", "# memory", "# batch"):
            assert part in report
        assert model_scripts.check(command(file)) == 0
        assert len(capsys.readouterr().out.splitlines()) <= 80, "one page"
        return
    assert model_scripts.check(command(file)) == 2
    page = capsys.readouterr().out
    assert all(reason in page for reason in reasons)
    with pytest.raises(ConfigError) as caught:
        dry_run(command(file), capsys)
    for reason in reasons:
        assert reason in str(caught.value)


@needs_neox
def test_no_fewer_files_load_than_before() -> None:
    assert len(FILES) - len(REFUSED) >= 44


@needs_fork
@pytest.mark.parametrize("length", [512, 1024, 2048, 4096, 8192, 16384])
def test_the_forks_commands_load(tmp_path: Path, length: int) -> None:
    """`train.sh` and `test.sh`: a place, a recipe, a run of its own, and a length to test at."""
    own = tmp_path / "kerple_log_github_1235.yml"
    own.write_text(
        "{ data-path: data/github/github_text_document, save: runs/1, load: runs/1, "
        "pos-emb: kerple_log, seed: 1235 }"
    )
    overlay = tmp_path / "lengths" / f"length_{length}.yml"
    overlay.parent.mkdir()
    overlay.write_text(f"seq-length-val: {length}")
    place = FORK / "local_setup.yml"
    assert NeoXArgs.from_files([place, FORK / "train.yml", own]).optimization.train_iters
    args = NeoXArgs.from_files([place, FORK / "ex_eval.yml", own, overlay])
    assert args.model.seq_length_val == length
    assert args.optimization.train_iters == 0


@pytest.mark.parametrize("key", sorted(declared("refused", *GROUPS.values())))
def test_keys_that_ask_for_what_is_not_there_are_refused(key: str) -> None:
    tiny = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    with pytest.raises(ConfigError, match=key):
        NeoXArgs.from_dict({**tiny, "train_micro_batch_size_per_gpu": 1, key: True})


def test_a_file_is_refused_with_all_its_reasons_at_once(tmp_path: Path) -> None:
    file = tmp_path / "many.yml"
    file.write_text(
        "{num_layers: 1, hidden_size: 8, num_attention_heads: 2, train_batch_size: 1, "
        "moe_num_experts: 4, moe_top_k: 2, use_mup: true, norm: deepnorm, sed: 3, lr: 0.1, "
        "use_shared_fs: false, zero_optimization: {stgae: 1}, "
        'attention_config: [[["gmlp", "rwkv"], 1]]}'
    )
    with pytest.raises(ConfigError) as caught:
        NeoXArgs.from_files([file])
    lines = str(caught.value).splitlines()
    for parts in (
        ("moe_num_experts = 4, moe_top_k = 2", "mixture of experts"),
        ("use_mup", "mu-parametrisation"),
        ("use_shared_fs",),
        ("lr = 0.1", "optimizer.params.lr"),
        ("'sed'", "seed"),
        ("zero_optimization.stgae", "stage"),
        ("norm", "deepnorm"),
    ):
        assert sum(all(part in line for part in parts) for line in lines) == 1, parts


def test_every_file_here_is_read_without_its_neighbours() -> None:
    assert not read_layer(REPOSITORY / "configs" / "XL.yml").problems
