"""One line per method, and everything that reads it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.model.position_base import DistanceKernel, TableEmbedding
from megatron.model.position_names import POSITIONAL_EMBEDDINGS
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.catalogue import METHODS, aliases, label_of, method
from tests.conftest import REPOSITORY
from tests.neox_arguments.samples import TINY, write

OURS = {
    name: cls
    for name, cls in POSITIONAL_EMBEDDINGS.items()
    if cls.__module__.startswith("megatron.")
}


def test_the_catalogue_and_the_classes_are_the_same_list() -> None:
    assert set(METHODS) == set(OURS)
    for name, cls in OURS.items():
        assert bool(METHODS[name].formula) == issubclass(cls, TableEmbedding), name
        if issubclass(cls, DistanceKernel):
            expected = cls.learnable if METHODS[name].official else {}
            assert set(cls.official) == set(expected), name


def test_a_label_belongs_to_one_method() -> None:
    assert len({entry.label for entry in METHODS.values()}) == len(METHODS)
    assert not set(aliases()) & set(METHODS)


def test_a_method_of_ones_own_is_shown_under_its_own_name() -> None:
    assert method("my.module:Kernel") is None
    assert label_of("my.module:Kernel") == "Kernel"
    assert label_of("kerple_power_ap_") == "KERPLE-power"


NEW_CLASS = '''
@register("kerple_root")
class KerpleRoot(DistanceKernel):
    """A new kernel."""

    learnable: ClassVar = {"r1": Positive(Uniform(0, 1))}

    def bias(self, d: Tensor, r1: Tensor) -> Tensor:
        return -r1 * d**0.5

'''
NEW_LINE = r'Method("kerple_root", "KERPLE-root", "a square root", r"-r_1\sqrt{d}"),'
CHECK = """
import re
import sys
from pathlib import Path

import torch
from megatron.checkpoints.hf.folder import write_hf
from megatron.commands.kernel_tools import plot_kernels
from megatron.commands.dry_run import dry_run_report
from megatron.paper.tables import lay_out, measured_cells, published_source
from megatron.paper.pages import to_markdown
from tests.checkpoints.small_models import at_rest, logits_of, random_model, small_args, tokens
from tests.paper.test_tables import SPEC
sys.path.insert(0, "tools")
from generate_config_docs import render

out = Path(sys.argv[1])
args = small_args(pos_emb="kerple_root")
heads = args.model.num_attention_heads
assert r"| `kerple_root` | KERPLE-root |  | 1 | a square root: $-r_1\\sqrt{d}$ |" in render()
assert re.search(rf"positions .KERPLE-root. +{heads}\\n", dry_run_report(args))
assert plot_kernels(["kerple_root", "--out", str(out)]) == 0
assert (out / "kerple_root.png").stat().st_size > 5000
spec = SPEC.model_copy(update={"methods": ("kerple_root", "alibi")})
cells = measured_cells(spec, lambda data, name, point: {1: 5.0})
assert "KERPLE-root" in to_markdown(lay_out(spec, cells, published_source(spec)))
model = random_model(args)
write_hf(at_rest(model, args), out / "hf")
assert "KERPLE-root" in (out / "hf" / "README.md").read_text()
torch.save((tokens(), logits_of(model, tokens())), out / "expected.pt")
"""
CHECK_EXPORT = """
import sys
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
assert "megatron" not in sys.modules
inputs, expected = torch.load(sys.argv[2], weights_only=True)
with torch.no_grad():
    torch.testing.assert_close(model(inputs).logits, expected, atol=1e-4, rtol=0)
"""


def test_a_new_kernel_is_one_class_and_one_line(tmp_path: Path) -> None:
    """In config docs, dry run, plot, table, model card and an export that works by itself."""
    for part in ("kerple", "megatron", "tests", "tools"):
        shutil.copytree(
            REPOSITORY / part,
            tmp_path / part,
            ignore=shutil.ignore_patterns("__pycache__", "fixtures"),
        )
    formulas = tmp_path / "megatron" / "model" / "positional_embeddings.py"
    text, before = formulas.read_text(), "# Baselines with tables."
    formulas.write_text(text.replace(before, f"{NEW_CLASS.lstrip()}\n{before}", 1))
    catalogue = tmp_path / "megatron" / "neox_arguments" / "catalogue.py"
    text, before = catalogue.read_text(), 'Method("alibi",'
    catalogue.write_text(text.replace(before, f"{NEW_LINE}\n        {before}", 1))
    out = tmp_path / "out"
    (out / "hf").mkdir(parents=True)
    keep = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    environment = {**keep, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    ours = {**environment, "PYTHONPATH": str(tmp_path)}
    run(CHECK, [str(out)], tmp_path, ours)
    run(CHECK_EXPORT, [str(out / "hf"), str(out / "expected.pt")], out, environment)


def run(script: str, arguments: list[str], folder: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    "name",
    ["kerple_log", "kerple_power_ap_", "kerple_power__ap", "kerple_power_ap_ap",
     "kerple_power_original"],
)  # fmt: skip
def test_official_position_names_are_known_here_and_to_the_model(name: str) -> None:
    from megatron.model.position_names import canonical_name
    from megatron.neox_arguments.catalogue import canonical_method

    NeoXArgs.from_dict({**TINY, "pos_emb": name})
    assert canonical_name(name) == canonical_method(name)


def test_every_registered_position_is_accepted() -> None:
    from megatron.model.position_names import POSITIONAL_EMBEDDINGS

    for name in POSITIONAL_EMBEDDINGS:
        assert NeoXArgs.from_dict({**TINY, "pos_emb": name}).model.pos_emb == name


def test_own_kernel_by_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        tmp_path,
        "my_positions.py",
        "from megatron.model.positional_embeddings import TableEmbedding\n"
        "class Mine(TableEmbedding):\n    pass\n",
    )
    write(tmp_path, "my_broken_positions.py", "1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = write(tmp_path, "mine.yml", json.dumps(TINY))
    assert NeoXArgs.from_files([config], sets=["pos_emb=my_positions:Mine"]).model.pos_emb
    for wrong in ("my_positions:Other", "no_such_module:X", "my_broken_positions:X", ":", "a:b:c"):
        with pytest.raises(ConfigError, match="pos_emb"):
            NeoXArgs.from_files([config], sets=[f"pos_emb={wrong!r}"])
