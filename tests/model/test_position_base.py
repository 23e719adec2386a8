"""Options, the registry, kernels from outside; learned numbers stay in their bounds and get exact,
finite gradients."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import re
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.errors import ConfigError, PositionalEmbeddingError
from megatron.model import ModelSpec
from megatron.model.position_base import DistanceKernel, PositionOptions
from megatron.model.position_names import POSITIONAL_EMBEDDINGS, position_options
from megatron.model.positional_embeddings import Exponent, Positive, Uniform, register
from tests.checkpoints.small_models import small_args
from tests.model.position_helpers import CONSTRAINTS, KERNELS, build, kernel, options, present


def test_an_option_of_a_positional_embedding_is_the_models_key() -> None:
    spec = ModelSpec.from_args(small_args(rpe_num_buckets=17), 128)
    options = PositionOptions(spec, tp_rank=1, tp_size=2)
    assert options.rpe_num_buckets == 17
    assert options.num_heads == spec.num_attention_heads
    assert options.local_heads == slice(spec.num_attention_heads // 2, spec.num_attention_heads)
    for twin in (copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        assert twin == options


def test_a_key_that_is_not_there_is_named() -> None:
    options = position_options(heads=2)
    with pytest.raises(PositionalEmbeddingError, match="needs head_dim"):
        _ = options.head_dim
    assert not hasattr(options, "no_such_key")
    with pytest.raises(ConfigError, match="rpe_num_bucket"):
        position_options(heads=2, rpe_num_bucket=8)


class TestRegistry:
    @pytest.mark.parametrize("name", ["kerple_log", "kerple_power_ap_"])  # ours, and the official
    def test_a_name_is_taken_once(self, name: str) -> None:
        before = dict(POSITIONAL_EMBEDDINGS)
        with pytest.raises(PositionalEmbeddingError, match="taken by"):

            @register(name)
            class Mine(DistanceKernel):
                def bias(self, d: Tensor) -> Tensor:
                    return -d

        assert before == POSITIONAL_EMBEDDINGS

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


class TestConstraints:
    def test_ste_clamps_forward_and_passes_the_gradient(self) -> None:
        power = kernel("kerple_power", heads=4)
        with torch.no_grad():
            power.r1.copy_(torch.tensor([-3.0, 0.0, 0.5, 7.0]))
            power.r2.copy_(torch.tensor([-1.0, 1.0, 5.0, 2.0]))
        assert power.kernel_values()["r1"].tolist() == pytest.approx([0.01, 0.01, 0.5, 7.0])
        assert power.kernel_values()["r2"].tolist() == pytest.approx([0.01, 1.0, 2.0, 2.0])
        power(3).bias[:, 2].sum().backward()
        # d(-r1 2^r2)/dr1 = -2^r2 at the clamped r2, also where r1 is out of bounds
        torch.testing.assert_close(power.r1.grad, -(2 ** power.kernel_values()["r2"]))
        assert (power.r2.grad != 0).all()
        power.project_()
        assert power.r1[0] == -3.0  # the stored value moves freely, as the fp32 master did

    def test_project_clamps_in_place_with_a_plain_gradient(self) -> None:
        power = kernel("kerple_power", kerple_constraint="project", heads=4)
        assert power.r1.min() >= 0.01
        with torch.no_grad():
            power.r1.copy_(torch.tensor([-3.0, 0.01, 0.5, 7.0]))
            power.r2.copy_(torch.tensor([-1.0, 1.0, 5.0, 2.0]))
        assert power.kernel_values()["r2"].max() == 2.0
        power.project_()
        assert power.r1.tolist() == pytest.approx([0.01, 0.01, 0.5, 7.0])
        assert power.r2.tolist() == pytest.approx([0.01, 1.0, 2.0, 2.0])
        power(3).bias[:, 2].sum().backward()
        torch.testing.assert_close(power.r1.grad, -(2 ** power.r2.detach()))
        assert (power.r2.grad != 0).all()  # a parameter on its bound can leave it

    @pytest.mark.parametrize("name", KERNELS)
    def test_constraints_agree_on_values_inside_the_bounds(self, name: str) -> None:
        reference = kernel(name)
        values = {key: v.clamp(0.05, 1.95) for key, v in reference.kernel_values().items()}
        for constraint in CONSTRAINTS:
            embedding = kernel(name, kerple_constraint=constraint)
            embedding.set_kernel_values_(values)
            for key, value in embedding.kernel_values().items():
                torch.testing.assert_close(value, values[key], rtol=1e-5, atol=1e-6)

    def test_softplus_starts_where_the_others_start(self) -> None:
        for name in KERNELS:
            start = kernel(name).kernel_values()
            for key, value in kernel(name, kerple_constraint="softplus").kernel_values().items():
                torch.testing.assert_close(value, start[key], rtol=1e-4, atol=3e-4)

    @settings(max_examples=50, deadline=None)
    @given(
        constraint=st.sampled_from(CONSTRAINTS),
        raw=st.floats(-1e4, 1e4),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    )
    def test_whatever_is_stored_the_values_stay_in_bounds(
        self, constraint: str, raw: float, dtype: torch.dtype
    ) -> None:
        embedding = kernel("kerple_log3", kerple_constraint=constraint).to(dtype)
        with torch.no_grad():
            for parameter in embedding.parameters():
                parameter.fill_(raw)
        for key, value in embedding.kernel_values().items():
            assert value.min() >= 0.0099 and value.max() <= embedding.learnable[key].maximum

    @pytest.mark.parametrize("constraint", CONSTRAINTS)
    def test_an_optimizer_stays_in_bounds_and_comes_back(self, constraint: str) -> None:
        power = kernel("kerple_power", kerple_constraint=constraint)
        optimizer = torch.optim.SGD(power.parameters(), lr=0.05)
        for sign in (-1, 1):  # first towards the bounds, then back
            for _ in range(40):
                optimizer.zero_grad()
                (sign * power(8).bias.mean()).backward()
                optimizer.step()
                power.project_()
                values = power.kernel_values()
                assert values["r2"].max() <= 2 and values["r1"].min() >= 0.0099
        assert values["r2"].mean() < 2

    def test_unknown_constraint_names_the_key(self) -> None:
        with pytest.raises(PositionalEmbeddingError, match="kerple_constraint: 'hard'"):
            kernel("kerple_log", kerple_constraint="hard")


class TestGradients:
    @pytest.mark.parametrize("constraint", CONSTRAINTS)
    @pytest.mark.parametrize("name", KERNELS)
    def test_gradcheck_in_float64_from_distance_zero(self, name: str, constraint: str) -> None:
        embedding = kernel(name, heads=3, kerple_constraint=constraint)
        embedding.set_kernel_values_(
            {key: torch.tensor([0.3, 0.9, 1.4]) for key in embedding.learnable}
        )
        embedding.double()
        names = list(embedding.learnable)

        def tables(*raw: Tensor) -> tuple[Tensor, ...]:
            return tuple(
                present(
                    torch.func.functional_call(embedding, dict(zip(names, raw, strict=True)), (6,))
                )
            )

        raw = [embedding.get_parameter(n).detach().clone().requires_grad_() for n in names]
        assert torch.autograd.gradcheck(tables, raw)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("constraint", CONSTRAINTS)
    @pytest.mark.parametrize("name", KERNELS)
    def test_finite_at_the_bounds_in_every_precision(
        self, name: str, constraint: str, dtype: torch.dtype
    ) -> None:
        embedding = kernel(name, heads=4, kerple_constraint=constraint)
        extremes = torch.tensor([-1.0, 0.01, 2.0, 50.0])
        embedding.set_kernel_values_(dict.fromkeys(embedding.learnable, extremes))
        embedding.to(dtype)
        # As in attention, far keys get no gradient: an infinite derivative there would make nan.
        # (A plain sum is more than fp16 can hold.)
        attention = torch.exp(-torch.arange(65536.0)) if dtype == torch.float16 else 1.0
        for table in present(embedding(65536)):
            assert table.dtype == torch.float32 and table.isfinite().all()
            (table * attention).sum().backward(retain_graph=True)
        for parameter in embedding.parameters():
            assert parameter.grad is not None and parameter.grad.dtype == dtype
            assert parameter.grad.isfinite().all()

    @pytest.mark.parametrize("name", KERNELS)
    def test_distance_zero_alone_gives_the_exact_gradient(self, name: str) -> None:
        embedding = kernel(name)
        for table in present(embedding(1)):
            table.sum().backward()
        for key, parameter in embedding.named_parameters():
            # Only the height of a Gaussian bump depends on a parameter at d = 0.
            bump = name.startswith("gauss_bias") and key == "r1"
            expected = torch.full((12,), 1.0 if bump else 0.0)
            shifted = 2e-4 if name.startswith("bam") else 0.0  # its distances begin at 1e-5
            torch.testing.assert_close(parameter.grad, expected, atol=shifted, rtol=0)

    @pytest.mark.parametrize(
        ("precision", "length"), [("kerple_legacy_bf16", 512), ("kerple_legacy_fp16", 128)]
    )
    @pytest.mark.parametrize("name", KERNELS)
    def test_legacy_precision_trains(self, name: str, precision: str, length: int) -> None:
        embedding = kernel(name, **{precision: True})
        for table in present(embedding(length)):
            table.mean().backward()
        assert all(p.grad.isfinite().all() for p in embedding.parameters())

    def test_tables_made_in_inference_mode_do_not_spoil_training(self) -> None:
        log, rotary = kernel("kerple_log"), build("rotary")
        q = torch.randn(1, 2, 16, 64, requires_grad=True)
        with torch.inference_mode():
            log(64)
            rotary(q, q, 0, 0)
        log(32).bias.sum().backward()
        rotary(q, q, 0, 0)[0].sum().backward()
        assert log.r2.grad is not None and q.grad is not None


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power", "kerple_log3", "alibi_learned"])
@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_a_flat_start_is_near_0_within_the_training_length_and_learns(
    name: str, constraint: str
) -> None:
    flat = kernel(name, kerple_init="flat", kerple_constraint=constraint)
    bias = flat(512).bias
    assert bias is not None
    assert bias.abs().max() < 0.3
    bias[:, 1:].sum().backward()
    assert all(p.grad is not None and (p.grad != 0).all() for p in flat.parameters())


def test_a_kernel_whose_tables_no_one_number_scales_has_no_flat_start() -> None:
    with pytest.raises(PositionalEmbeddingError, match="kerple_init: flat with pos_emb gauss_wht1"):
        kernel("gauss_wht1", kerple_init="flat")
