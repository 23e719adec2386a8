"""Names of positional embeddings, and kernel(): one without a model of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kerple import attention, kernel
from megatron.errors import ConfigError, PositionalEmbeddingError, UnknownPositionalEmbeddingError
from megatron.model import GPTModel, ModelSpec
from megatron.model.position_names import POSITIONAL_EMBEDDINGS, canonical_name
from megatron.neox_arguments import allow_kernel
from tests.checkpoints.small_models import small_args
from tests.model.position_helpers import build


def test_tables_are_those_of_a_model_with_the_same_seed() -> None:
    args = small_args(pos_emb="kerple_log", seed=5)
    model = GPTModel(ModelSpec.from_args(args, 128))
    alone = kernel("kerple_log", heads=args.model.num_attention_heads, seed=5)
    assert torch.equal(alone(50).bias, model.positional_tables(50).bias)


def test_it_learns_through_attention() -> None:
    log = kernel("kerple_log", heads=3)
    q, k, v = torch.randn(3, 2, 3, 40, 8)
    tables = log(40)
    attention(q, k, v, tables.bias, tables.weight).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in log.parameters())


def test_a_method_that_needs_head_dim_asks_for_it() -> None:
    with pytest.raises(PositionalEmbeddingError, match="head_dim"):
        kernel("rpe", heads=4)
    with pytest.raises(PositionalEmbeddingError, match="head_dim"):
        kernel("kerple_log", heads=4, kerple_bias_scale="pre")
    halved = kernel("kerple_log", heads=4, head_dim=4, kerple_bias_scale="pre")(9).bias
    torch.testing.assert_close(2 * halved, kernel("kerple_log", heads=4)(9).bias)
    assert kernel("rpe", heads=4, head_dim=16)(9).bias.shape == (4, 9)


def test_what_cannot_be_built_says_why() -> None:
    with pytest.raises(PositionalEmbeddingError, match="q and k"):
        kernel("rotary", heads=4, head_dim=16)
    with pytest.raises(PositionalEmbeddingError, match="acts on nothing"):
        kernel("none", heads=4)
    with pytest.raises(UnknownPositionalEmbeddingError, match="kerple_log"):
        kernel("kerple_lgo", heads=4)
    with pytest.raises(ConfigError, match="kerple_constraint"):
        kernel("kerple_log", heads=4, kerple_constraint="hard")


@pytest.mark.parametrize("length", [0, -3, 4.5])
def test_a_length_without_distances_is_refused(length: int) -> None:
    log = kernel("kerple_log", heads=4)
    log(64)
    with pytest.raises(PositionalEmbeddingError, match=f"length = {length}"):
        log(length)


def test_a_class_that_the_caller_names_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (Path(__file__).parents[2] / "examples" / "custom_kernel.py").read_text()
    (tmp_path / "named_by_caller.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert kernel("named_by_caller:RationalKernel", heads=4)(9).bias.shape == (4, 9)
    with pytest.raises(UnknownPositionalEmbeddingError, match="cannot be imported"):
        kernel("no_such_module:Kernel", heads=4)


def test_the_package_imports_no_torch_until_it_is_asked() -> None:
    script = "import sys, kerple; assert 'torch' not in sys.modules; dir(kerple); "
    script += "assert 'kernel' in dir(kerple) and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("kerple_power_ap_", "kerple_power"),
        ("kerple_power__ap", "gauss_wht2"),
        ("kerple_power_ap_ap", "kerple_bias_wht"),
        ("kerple_power_original", "kerple_power_original"),
        ("kerple_log", "kerple_log"),
    ],
)
def test_official_names_resolve(alias: str, name: str) -> None:
    assert canonical_name(alias) == name
    assert build(alias).name == name


def test_every_name_of_the_docs_is_there() -> None:
    page = Path(__file__).parents[2] / "docs" / "positional_embeddings.md"
    text = page.read_text(encoding="utf-8")
    for name in POSITIONAL_EMBEDDINGS:
        if not POSITIONAL_EMBEDDINGS[name].__module__.startswith("megatron."):
            continue
        assert f"`{name}`" in text, f"{name} is not documented"


@pytest.mark.parametrize("name", ["kerple_lgo", "", "KERPLE_LOG"])
def test_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(UnknownPositionalEmbeddingError, match="kerple_log"):
        canonical_name(name)
    assert issubclass(UnknownPositionalEmbeddingError, ValueError)


@pytest.mark.parametrize("name", ["no_such_module:Kernel", "math:nothing", "math:pi", ":", "a:"])
def test_unimportable_class_says_so(name: str) -> None:
    with pytest.raises(UnknownPositionalEmbeddingError, match="pos_emb"):
        build(name)


def test_the_example_runs_by_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = Path(__file__).parents[2] / "examples"
    monkeypatch.syspath_prepend(str(examples))
    allow_kernel("custom_kernel:RationalKernel")
    embedding = build("custom_kernel:RationalKernel")
    assert embedding.kind == "tables"
    r1, r2 = embedding.kernel_values().values()
    d = torch.arange(20.0)
    expected = -r1[:, None] * d / (r2[:, None] + d)
    torch.testing.assert_close(embedding(20).bias, expected)
    assert canonical_name("rational") == "rational"


@pytest.mark.parametrize("name", ["rotary", "cable", "learned", "fire", "inkling", "none"])
def test_a_method_without_a_table_says_so_before_it_asks_for_sizes(name: str) -> None:
    """Not "give hidden_size=...", which `kernel` does not take."""
    with pytest.raises(PositionalEmbeddingError, match=f"kernel.*{name}.*no table over distance"):
        kernel(name, heads=2)


def test_a_seed_may_be_0_and_the_message_says_so() -> None:
    assert kernel("kerple_log", heads=2, seed=0)(4).bias is not None
    with pytest.raises(ConfigError, match="seed = -1 is wrong: use a whole number from 0 on"):
        kernel("kerple_log", heads=2, seed=-1)
    with pytest.raises(ConfigError, match="heads = 0 is wrong: use a whole number from 1 on"):
        kernel("kerple_log", heads=0)
