"""`released`, with the recorded official checkpoints in the place of the released ones."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest
import torch

import kerple
from megatron.errors import ReproduceError
from megatron.paper.cli import main
from megatron.paper.released import find_released
from tests.fixture_archives import unpacked


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """Folders as the official configs name them."""
    folder = tmp_path / "release"
    source = {"kerple_log_github_1235": "official_kerple_log"}
    source["kerple_power_ap__github_1235"] = "official_kerple_power_mp2"
    for name, fixture in source.items():
        shutil.copytree(unpacked(fixture), folder / f"{name}_checkpoints")
    return folder


def test_kernels_are_read_from_the_official_files(release: Path) -> None:
    log, power = find_released(release)
    assert [(item.run.method, item.run.data, item.run.seed) for item in (log, power)] == [
        ("kerple_log", "github", 1235),
        ("kerple_power", "github", 1235),
    ]
    model = kerple.load_pretrained(release / "kerple_log_github_1235_checkpoints")
    values = log.found.kernel
    assert set(values) == {"r1", "r2"}
    assert len(values["r1"]) == model.spec.num_attention_heads


def test_figures_and_perplexities_with_any_text(release: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a plain text of ascii letters, for any model of bytes. " * 60)
    out = tmp_path / "out"
    call = ["released", "--dir", str(release), "--out", str(out), "--text", str(text)]
    call += ["--tokenizer", "CharLevelTokenizer", "--lengths", "64", "128", "512"]
    assert main([*call, "--window", "64", "--sequences", "2"]) == 0
    for name in ("kernels", "effective_length", "parameters"):
        assert (out / "figures" / f"{name}.pdf").stat().st_size > 1000
    with (out / "tables" / "released.csv").open(encoding="utf-8") as file:
        rows = {
            (row["group"], row["column"], row["row"]): row["mean"] for row in csv.DictReader(file)
        }
    log, full, window = "KERPLE-log", "full", "windowed@64"
    assert float(rows[log, full, "64"]) == float(rows[log, window, "64"])
    assert float(rows[log, full, "512"]) != float(rows[log, window, "512"])
    assert float(rows["KERPLE-power", full, "512"]) > 1

    model = kerple.load_pretrained(release / "kerple_log_github_1235_checkpoints")
    tokens = torch.tensor(list(text.read_bytes()[: 2 * 512 + 1]))
    losses = []
    for start in (0, 512):
        piece = tokens[start : start + 513]
        logits = model(piece[None, :-1])[0].double()
        losses.append(torch.nn.functional.cross_entropy(logits, piece[1:]))
    expected = float(torch.stack(losses).mean().exp().detach())
    assert float(rows[log, full, "512"]) == pytest.approx(expected, rel=1e-5)


def test_a_folder_without_checkpoints_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ReproduceError, match="Unpack the archives"):
        find_released(tmp_path)
