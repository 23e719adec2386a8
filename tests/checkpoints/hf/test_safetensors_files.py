"""Files that safetensors' own reader reads, and files that it has written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoints.hf.safetensors_files import read_safetensors, write_safetensors
from megatron.checkpoints.lazy_weights import outlines
from megatron.errors import CheckpointError

TENSORS = {
    "matrix": torch.randn(6, 4).T,
    "half": torch.randn(3, 5).bfloat16(),
    "number": torch.tensor(2.5, dtype=torch.float16),
    "nothing": torch.empty(0, 4),
    "long": torch.arange(50).double(),
}


@pytest.mark.parametrize(("shard_bytes", "files"), [(10**9, 1), (32, 3)])
def test_safetensors_reads_what_we_write(tmp_path: Path, shard_bytes: int, files: int) -> None:
    write_safetensors(tmp_path, outlines(TENSORS), TENSORS.items(), shard_bytes)
    found = sorted(tmp_path.glob("*.safetensors"))
    assert len(found) == files
    assert (tmp_path / "model.safetensors.index.json").is_file() == (files > 1)
    read = {name: tensor for path in found for name, tensor in load_file(path).items()}
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())
    ours = read_safetensors(found)
    assert all(torch.equal(ours[name], tensor) for name, tensor in TENSORS.items())
    shapes = outlines(ours)
    assert all((shapes[n].shape, shapes[n].dtype) == (t.shape, t.dtype) for n, t in TENSORS.items())


def test_tensors_out_of_order_are_not_written_under_other_names(tmp_path: Path) -> None:
    backwards = reversed(list(TENSORS.items()))
    with pytest.raises(CheckpointError, match=r"long .* comes as matrix"):
        write_safetensors(tmp_path, outlines(TENSORS), backwards)


def test_quantized_weights_are_refused_by_their_type(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(2, dtype=torch.float8_e4m3fn)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="x has the type F8_E4M3"):
        read_safetensors([tmp_path / "a.safetensors"])
