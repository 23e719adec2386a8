"""The registry: names, aliases, import paths, kernels from outside, and clear errors."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from megatron.errors import PositionalEmbeddingError, UnknownPositionalEmbeddingError
from megatron.model.position_base import POSITIONAL_EMBEDDINGS, DistanceKernel
from megatron.model.position_names import canonical_name
from megatron.model.positional_embeddings import Exponent, Positive, Uniform, register
from megatron.neox_arguments import allow_kernel
from tests.model.position_helpers import build, options


class TestRegistry:
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
    def test_official_names_resolve(self, alias: str, name: str) -> None:
        assert canonical_name(alias) == name
        assert build(alias).name == name

    def test_every_name_of_the_docs_is_there(self) -> None:
        page = Path(__file__).parents[2] / "docs" / "positional_embeddings.md"
        text = page.read_text(encoding="utf-8")
        for name in POSITIONAL_EMBEDDINGS:
            if not POSITIONAL_EMBEDDINGS[name].__module__.startswith("megatron."):
                continue
            assert f"`{name}`" in text, f"{name} is not documented"

    @pytest.mark.parametrize("name", ["kerple_lgo", "", "KERPLE_LOG"])
    def test_unknown_name_lists_the_known_ones(self, name: str) -> None:
        with pytest.raises(UnknownPositionalEmbeddingError, match="kerple_log"):
            canonical_name(name)
        assert issubclass(UnknownPositionalEmbeddingError, ValueError)

    @pytest.mark.parametrize(
        "name", ["no_such_module:Kernel", "math:nothing", "math:pi", ":", "a:"]
    )
    def test_unimportable_class_says_so(self, name: str) -> None:
        with pytest.raises(UnknownPositionalEmbeddingError, match="pos_emb"):
            build(name)

    def test_a_name_is_taken_once(self) -> None:
        with pytest.raises(PositionalEmbeddingError, match="taken by"):

            @register("mine", aliases=["kerple_power_ap_"])
            class Mine(DistanceKernel):
                def bias(self, d: Tensor) -> Tensor:
                    return -d

        assert "mine" not in POSITIONAL_EMBEDDINGS

    def test_formula_with_an_undeclared_parameter_says_so(self) -> None:
        with pytest.raises(PositionalEmbeddingError, match="takes 'r2'"):

            class Wrong(DistanceKernel):
                learnable: ClassVar = {"r1": Positive(Uniform(0, 1))}

                def bias(self, d: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
                    return -r1 * d

    def test_kernel_without_formula_says_so(self) -> None:
        class Empty(DistanceKernel):
            learnable: ClassVar = {"r1": Exponent(Uniform(0, 1))}

        with pytest.raises(PositionalEmbeddingError, match=r"neither bias\(\) nor weight\(\)"):
            Empty(options())

    def test_bad_bias_scale_names_the_key(self) -> None:
        with pytest.raises(PositionalEmbeddingError, match="kerple_bias_scale: 'both'"):
            build("kerple_log", kerple_bias_scale="both")


class TestCustomKernel:
    def test_the_example_runs_by_import_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
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

    def test_the_example_runs_as_a_script(self, capsys: pytest.CaptureFixture[str]) -> None:
        path = Path(__file__).parents[2] / "examples" / "custom_kernel.py"
        spec = importlib.util.spec_from_file_location("custom_kernel_script", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.main()
        assert "CPD" in capsys.readouterr().out

    def test_the_code_in_the_docs_runs(self) -> None:
        page = Path(__file__).parents[2] / "docs" / "positional_embeddings.md"
        alone, define, ask = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
        standing: dict[str, object] = {}
        exec(alone, standing)
        assert standing["tables"].bias.shape == (12, 512)
        names: dict[str, object] = {"__name__": "docs"}
        exec(define, names)
        exec(ask, names)
        assert names["table"].shape == (12, 512)
