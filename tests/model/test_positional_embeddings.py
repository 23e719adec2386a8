"""Every table over distance: its formula, how it starts, how it is sharded."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.errors import PositionalEmbeddingError
from megatron.model.position_base import Tables
from megatron.model.positional_embeddings import alibi_slopes, t5_buckets
from megatron.mpu.parallel_layers import parameter_facts
from tests.model.position_helpers import (
    KERNELS,
    LEARNED_TABLES,
    TABLES,
    build,
    kernel,
)

# Written out by hand from the paper, on plain floats, apart from the package's own formulas.
FORMULAS = {
    "kerple_log": {"bias": lambda d, r: -r[0] * math.log(1 + r[1] * d)},
    "kerple_power": {"bias": lambda d, r: -r[0] * d ** r[1]},
    "kerple_log3": {"bias": lambda d, r: -r[0] * math.log(1 + r[1] * d ** r[2])},
    "kerple_bias_wht": {
        "bias": lambda d, r: -r[0] * d ** r[1],
        "weight": lambda d, r: math.exp(-r[2] * d ** r[3]),
    },
    "gauss_bias2": {"bias": lambda d, r: r[0] * math.exp(-r[1] * d * d)},
    "gauss_bias3": {"bias": lambda d, r: r[0] * math.exp(-r[1] * d ** r[2])},
    "gauss_wht1": {"weight": lambda d, r: math.exp(-r[0] * d * d)},
    "gauss_wht2": {"weight": lambda d, r: math.exp(-r[0] * d ** r[1])},
    "alibi_learned": {"bias": lambda d, r: -r[0] * d},
    "kerple_inkling": {"bias": lambda d, r: -r[0] * math.log(1 + r[1] * d)},  # beside features
    "ape": {
        "bias": lambda d, r: -r[0] * d - r[1] * math.log(1 + d) - r[2] * math.sqrt(d),
        "weight": lambda d, r: 1 / (1 + r[3] * d),
    },
    "bam": {"bias": lambda d, r: -math.exp(r[0]) * (d + 1e-5) ** r[1]},
    "bam_ssmax": {"bias": lambda d, r: -math.exp(r[0]) * (d + 1e-5) ** r[1]},  # and its rows
}


class TestFormulas:
    def test_every_distance_kernel_has_its_formula_here(self) -> None:
        assert set(KERNELS) == set(FORMULAS)

    @pytest.mark.parametrize("name", KERNELS)
    def test_table_is_the_formula_of_the_paper(self, name: str) -> None:
        embedding = kernel(name)
        tables = embedding(70)._asdict()
        values = {key: value.tolist() for key, value in embedding.kernel_values().items()}
        assert list(values) == [f"r{i + 1}" for i in range(len(values))]
        for head in range(12):
            r = [values[key][head] for key in values]
            for table, formula in FORMULAS[name].items():
                expected = torch.tensor([formula(d, r) for d in range(70)])
                torch.testing.assert_close(tables[table][head], expected, rtol=2e-5, atol=1e-7)
        assert {k for k, v in tables.items() if v is not None} == set(FORMULAS[name])
        assert embedding.table_names == tuple(FORMULAS[name])

    @pytest.mark.parametrize("name", TABLES)
    def test_tables_are_fp32_per_head_and_a_longer_one_begins_with_the_shorter(
        self, name: str
    ) -> None:
        embedding = build(name)
        for long, short in zip(embedding(300), embedding(1), strict=True):
            assert (long is None) == (short is None)
            if long is not None and short is not None:
                assert long.shape == (12, 300) and long.dtype == torch.float32
                torch.testing.assert_close(long[:, :1], short)

    @pytest.mark.parametrize("name", ["kerple_log", "kerple_bias_wht"])
    def test_pre_scale_divides_the_bias_alone_by_sqrt_head_dim(self, name: str) -> None:
        post, pre = build(name)(50), build(name, kerple_bias_scale="pre")(50)
        torch.testing.assert_close(pre.bias * 8, post.bias)
        if post.weight is not None:
            assert torch.equal(pre.weight, post.weight)

    def test_legacy_bf16_rounds_as_the_official_code(self) -> None:
        power = kernel("kerple_power", kerple_legacy_bf16=True)
        power.set_kernel_values_({"r1": torch.ones(12), "r2": torch.ones(12)})
        bias = power(16384).bias
        assert bias is not None and bias.dtype == torch.float32
        assert len(bias[0].unique()) == 1025  # as measured on the official code
        log, exact = kernel("kerple_log", kerple_legacy_bf16=True), kernel("kerple_log")
        values = {"r1": torch.full((12,), 2.0), "r2": torch.full((12,), 1.0)}
        log.set_kernel_values_(values)
        exact.set_kernel_values_(values)
        d = torch.arange(16384).bfloat16()
        official = -values["r1"].bfloat16()[:, None] * torch.log(1 + d * 1)
        assert torch.equal(log(16384).bias, official.float())
        error = (log(16384).bias - exact(16384).bias).abs().max()
        assert 0.03 < error < 0.08

    def test_legacy_fp16_holds_distances_exactly_to_2048_only(self) -> None:
        power = kernel("kerple_power", kerple_legacy_fp16=True)
        power.set_kernel_values_({"r1": torch.ones(12), "r2": torch.ones(12)})
        bias = -power(8192).bias[0]
        d = torch.arange(8192)
        assert torch.equal(bias[:2049], d[:2049].float())
        assert len(bias[2048:4096].unique()) == 1025 and len(bias[4096:].unique()) == 1025
        log = kernel("kerple_log", kerple_legacy_fp16=True)
        values = {"r1": torch.full((12,), 2.0), "r2": torch.full((12,), 1.0)}
        log.set_kernel_values_(values)
        rounded = -torch.tensor(2.0).half() * torch.log(1 + d.half())
        assert torch.equal(log(8192).bias, rounded.float().expand(12, -1))
        assert torch.equal(log(8192).bias[0, 2048], log(8192).bias[0, 2049])

    def test_two_legacy_precisions_are_refused(self) -> None:
        with pytest.raises(PositionalEmbeddingError, match="kerple_legacy_fp16 are both true"):
            kernel("kerple_log", kerple_legacy_fp16=True, kerple_legacy_bf16=True)

    def test_alibi_slopes_equal_blooms(self) -> None:
        from transformers.models.bloom.modeling_bloom import build_alibi_tensor

        for heads in (1, 2, 6, 8, 12, 16, 20, 25, 32, 40, 112):
            mask = torch.ones(1, 5)
            bloom = build_alibi_tensor(mask, heads, torch.float32).view(heads, 5)
            torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), bloom[:, 1])
            bias = build("alibi", heads=heads)(5).bias
            # Bloom adds slope * key position: relative to the query's own position it is ours.
            torch.testing.assert_close(bias, bloom.flip(1) - bloom[:, -1:])

    def test_alibi_slopes_of_twelve_heads_are_those_of_the_official_code(self) -> None:
        powers = [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]
        assert alibi_slopes(12) == pytest.approx([2**-p for p in powers])

    def test_bam_is_the_authors_prior_where_it_starts(self) -> None:
        """Their code: distances from -d, a location of 0, slopes stored as logarithms, shape 1."""
        torch.testing.assert_close(
            build("bam")(40).bias, build("alibi")(40).bias, atol=1e-4, rtol=0
        )
        start = kernel("bam").kernel_values()
        torch.testing.assert_close(start["r1"].exp(), torch.tensor(alibi_slopes(12)))
        assert start["r2"].eq(1).all()

    @pytest.mark.parametrize("constraint", ["ste", "project", "softplus"])
    def test_learned_slopes_start_as_alibis_and_have_gradients(self, constraint: str) -> None:
        learned = build("alibi_learned", kerple_constraint=constraint)
        torch.testing.assert_close(learned(40).bias, build("alibi")(40).bias)
        (parameter,) = learned.parameters()
        (grad,) = torch.autograd.grad(learned(40).bias.sum(), parameter)
        assert grad.ne(0).all()
        ranks = [build("alibi_learned", tp_size=2, tp_rank=rank) for rank in range(2)]
        assert torch.equal(
            torch.cat([r.kernel_values()["r1"] for r in ranks]),
            build("alibi_learned").kernel_values()["r1"],
        )

    def test_official_original_is_alibi_with_slopes_of_at_least_a_hundredth(self) -> None:
        slopes = -build("kerple_power_original")(2).bias[:, 1]
        expected = [max(0.01, slope) for slope in alibi_slopes(12)]
        torch.testing.assert_close(slopes, torch.tensor(expected))
        assert (slopes == 0.01).sum() == 2

    @pytest.mark.parametrize(("buckets", "far"), [(32, 128), (16, 64), (64, 1000), (2, 5)])
    def test_t5_buckets_equal_transformers(self, buckets: int, far: int) -> None:
        from transformers.models.t5.modeling_t5 import T5Attention

        d = torch.arange(30000)
        expected = T5Attention._relative_position_bucket(-d, False, buckets, far)
        assert torch.equal(t5_buckets(d.float(), buckets, far), expected)

    def test_t5_bias_is_its_bucket_times_sqrt_head_dim(self) -> None:
        rpe = build("rpe")
        bias = rpe(2000).bias
        assert torch.equal(bias[:, 5], rpe.weight[5] * 8)
        assert torch.equal(bias[:, 1999], rpe.weight[31] * 8)
        assert rpe.weight.shape == (32, 12)
        bias.sum().backward()
        assert rpe.weight.grad[31].eq(8 * (bias[0] == rpe.weight[31, 0] * 8).sum()).all()

    def test_sandwich_is_the_inner_product_of_sinusoids(self) -> None:
        bias = build("sandwich", heads=8)(400).bias
        assert torch.equal(bias[:, 0], torch.zeros(8))
        exponents = [2 * i / 128 for i in range(1, 65)]
        for d in (1, 17, 399):
            product = sum(math.cos(d / 10000**e) for e in exponents)
            for head in range(8):
                assert bias[head, d] == pytest.approx((product - 64) / (head + 1), abs=1e-3)

    def test_none_has_no_tables(self) -> None:
        nope = build("none")
        assert nope.kind == "none" and nope(9) == Tables(None, None)


OFFICIAL_RANGES = {  # mind the swap of a and p between log and power
    "kerple_log": {"r1": 2, "r2": 1},
    "kerple_power": {"r1": 1, "r2": 2},
    "kerple_bias_wht": {"r1": 1, "r2": 2, "r3": 1, "r4": 2},
    "gauss_wht2": {"r1": 1, "r2": 2},
}


class TestInitialisation:
    @pytest.mark.parametrize("name", sorted(OFFICIAL_RANGES))
    def test_starts_uniform_as_the_official_code(self, name: str) -> None:
        embedding = kernel(name, heads=4096)
        for parameter, high in OFFICIAL_RANGES[name].items():
            values = embedding.get_parameter(parameter)
            assert values.min() >= 0 and values.max() < high
            assert values.mean().item() == pytest.approx(high / 2, abs=0.05 * high)
            assert values.std().item() == pytest.approx(high / math.sqrt(12), rel=0.05)

    def test_official_checkpoint_names_mind_the_swap(self) -> None:
        for name, letters in {"kerple_log": "pa", "kerple_power": "ap"}.items():
            facts = [parameter_facts(parameter) for parameter in kernel(name).parameters()]
            assert [own.neox for own in facts] == [f"attention.rpe.bias_{x}" for x in letters]

    def test_t5_starts_with_xavier(self) -> None:
        weight = build("rpe", heads=256, rpe_num_buckets=64).weight
        assert weight.std().item() == pytest.approx(math.sqrt(2 / (64 + 256)), rel=0.05)

    @pytest.mark.parametrize("name", LEARNED_TABLES)
    @pytest.mark.parametrize("tp_size", [2, 4])
    def test_shards_concatenate_to_the_full_draw(self, name: str, tp_size: int) -> None:
        full = build(name)
        shards = [build(name, tp_size=tp_size, tp_rank=rank) for rank in range(tp_size)]
        for key, parameter in full.named_parameters():
            parts = [shard.get_parameter(key) for shard in shards]
            heads = int(name == "rpe")  # its rows are buckets
            assert torch.equal(torch.cat([p.detach() for p in parts], heads), parameter.detach())

    @pytest.mark.parametrize("name", TABLES)
    def test_sharded_tables_are_rows_of_the_full_one(self, name: str) -> None:
        for table_index in range(2):
            parts = [build(name, tp_size=3, tp_rank=rank)(40)[table_index] for rank in range(3)]
            full = build(name)(40)[table_index]
            if full is None:
                assert parts == [None] * 3
            else:
                torch.testing.assert_close(torch.cat(parts), full)

    def test_draw_depends_on_seed_layer_and_parameter_only(self) -> None:
        start = kernel("kerple_log").r1
        torch.manual_seed(0)
        assert torch.equal(kernel("kerple_log").r1, start)
        assert not torch.equal(kernel("kerple_log", seed=8).r1, start)
        assert not torch.equal(kernel("kerple_log", layer=0).r1, start)
        assert not torch.equal(kernel("kerple_log", layer=0).r1, kernel("kerple_log", layer=1).r1)
        bias_wht = kernel("kerple_bias_wht")
        assert not torch.equal(bias_wht.r1, bias_wht.r3)

    @pytest.mark.parametrize("name", KERNELS)
    def test_parameters_are_flagged_one_per_local_head(self, name: str) -> None:
        embedding = kernel(name, tp_size=2, tp_rank=1)
        for parameter in embedding.parameters():
            assert parameter.shape == (6,) and parameter.dtype == torch.float32
            assert parameter.is_kernel_parameter
            facts = parameter_facts(parameter)
            assert (facts.split, facts.fp32, facts.decay, facts.rate) == (0, True, False, "kernel")
            assert parameter.model_parallel and parameter.tensor_model_parallel

    @pytest.mark.parametrize("name", TABLES)
    def test_state_dict_holds_parameters_only(self, name: str) -> None:
        embedding = build(name)
        embedding(64)
        assert set(embedding.state_dict()) == {n for n, _ in embedding.named_parameters()}
