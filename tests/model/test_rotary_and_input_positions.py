"""Rotary, sinusoidal and learned positions, against Hugging Face and against their definition."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import GPTNeoXConfig
from transformers.models.gpt_neox.modeling_gpt_neox import (
    GPTNeoXRotaryEmbedding,
    apply_rotary_pos_emb,
)

from megatron.errors import PositionalEmbeddingError
from megatron.model.position_base import PositionOptions
from megatron.model.position_names import build_positional_embedding
from megatron.model.rotary_and_input_positions import Rope, RotaryEmbedding, rotary_frequencies
from tests.model.position_helpers import build, wave
from tests.model.position_helpers import options as any_options


def options(**changes: object) -> PositionOptions:
    return any_options(heads=4, head_dim=32, **{"max_position_embeddings": 64, **changes})


def rotary(**changes: object) -> RotaryEmbedding:
    built = build_positional_embedding("rotary", options(**changes))
    assert isinstance(built, RotaryEmbedding)
    return built


def hugging_face(
    length: int | torch.Tensor, rope: dict[str, object], q: torch.Tensor, k: torch.Tensor
):
    config = GPTNeoXConfig(
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **rope},
    )
    positions = torch.arange(length)[None] if isinstance(length, int) else length
    cos, sin = GPTNeoXRotaryEmbedding(config)(q, positions)
    return apply_rotary_pos_emb(q, k, cos, sin)


DIVISORS = {
    "short_factor": [1.0 + i / 8 for i in range(16)],
    "long_factor": [2.0 + i for i in range(16)],
}
SCALINGS: dict[str, dict] = {
    "linear": {"type": "linear", "factor": 4.0},
    "dynamic": {"type": "dynamic", "factor": 4.0},
    "yarn": {"type": "yarn", "factor": 8.0, "original_max_position": 64},
    "yarn_options": {
        "type": "yarn", "factor": 8.0, "original_max_position": 48, "beta_fast": 16.0,
        "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False,
    },
    "yarn_factor": {
        "type": "yarn", "factor": 2.0, "original_max_position": 32, "attention_factor": 1.5
    },
    "longrope": {"type": "longrope", "original_max_position": 40, **DIVISORS},
    "longrope_short": {"type": "longrope", "factor": 8.0, "original_max_position": 512, **DIVISORS},
    "llama3": {
        "type": "llama3", "factor": 8.0, "original_max_position": 64, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "proportional": {"type": "proportional", "factor": 2.0},
}  # fmt: skip
THEIRS = {"type": "rope_type", "original_max_position": "original_max_position_embeddings"}


def check_rotation(options: dict, rope: dict) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 4, 300, 32).unbind(0)
    expected = hugging_face(300, rope, q, k)
    for mine, theirs in zip(rotary(**options)(q, k, 0, 0), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("options", "rope"),
    [
        ({}, {"partial_rotary_factor": 1.0}),
        ({"rotary_pct": 0.25}, {"partial_rotary_factor": 0.25}),
        ({"rotary_emb_base": 500.0}, {"rope_theta": 500.0, "partial_rotary_factor": 1.0}),
    ],
    ids=["default", "pct", "base"],
)
def test_rotation_equals_hugging_face_gpt_neox(options: dict, rope: dict) -> None:
    check_rotation(options, rope)


@pytest.mark.parametrize("name", SCALINGS)
def test_every_scaling_equals_hugging_face(name: str) -> None:
    own = SCALINGS[name]
    share = 0.5 if name == "proportional" else 1.0
    theirs = {THEIRS.get(key, key): value for key, value in own.items()}
    check_rotation(
        {"rope_scaling": own, "rotary_pct": share}, {**theirs, "partial_rotary_factor": share}
    )


def test_dynamic_frequencies_are_those_of_the_length_at_hand() -> None:
    embedding = rotary(rope_scaling=SCALINGS["dynamic"])
    q = torch.randn(1, 4, 200, 32)
    long, _ = embedding(q, q, 0, 0)
    short, _ = embedding(q[:, :, :64], q[:, :, :64], 0, 0)
    torch.testing.assert_close(short, rotary()(q[:, :, :64], q[:, :, :64], 0, 0)[0])
    assert not torch.allclose(short, long[:, :, :64], atol=1e-2)
    places = torch.arange(64)[None]  # documents of 64 tokens in a longer sequence
    torch.testing.assert_close(embedding(q[:, :, :64], q[:, :, :64], 0, 0, places)[0], short)


def test_scores_depend_on_the_difference_of_positions_only() -> None:
    embedding = rotary()
    q, k = torch.randn(1, 4, 1, 32), torch.randn(1, 4, 1, 32)

    def score(m: int, n: int) -> torch.Tensor:
        q_m, k_n = embedding(q, k, m, n)
        return (q_m * k_n).sum(-1)

    torch.testing.assert_close(score(9, 4), score(905, 900), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(score(9, 4), score(9, 5), atol=1e-2)


def test_offsets_continue_where_a_cache_ended() -> None:
    q, k = torch.randn(2, 1, 4, 50, 32).unbind(0)
    whole_q, whole_k = rotary()(q, k, 0, 0)
    embedding = rotary()
    for at in range(40, 50):  # grows token by token, as in generation
        one_q, one_k = embedding(q[:, :, at : at + 1], k[:, :, at : at + 1], at, at)
        torch.testing.assert_close(one_q, whole_q[:, :, at : at + 1])
        torch.testing.assert_close(one_k, whole_k[:, :, at : at + 1])


def test_the_layers_of_a_model_share_their_tables() -> None:
    q, first, second = torch.randn(1, 4, 50, 32), rotary(), rotary()
    assert torch.equal(first(q, q, 0, 0)[0], second(q, q, 0, 0)[0])
    assert first._cos_LR.data_ptr() == second._cos_LR.data_ptr()


def test_clipped_frequencies_fade_by_half_a_cosine_to_zero() -> None:
    scaling = {"type": "clipped", "clipped_pairs": 5}
    found = torch.tensor(rotary(rope_scaling=scaling).frequencies(10)[0])
    plain = [10000 ** (-2 * i / 32) for i in range(16)]
    fade = [1.0] * 11 + [(1 + math.cos(math.pi * i / 4)) / 2 for i in range(5)]
    expected = torch.tensor([a * b for a, b in zip(plain, fade, strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)
    assert found[-1] == 0


def test_xpos_is_rotary_whose_scores_decay_by_pair() -> None:
    """Each pair's share of a score is rotary's times ((2i/R + 0.4) / 1.4)^(d / 512)."""
    q, k = torch.randn(2, 1, 4, 600, 32, dtype=torch.float64).unbind(0)
    found_q, found_k = build("xpos", heads=4, head_dim=32)(q, k)
    plain_q, plain_k = rotary()(q, k)
    for m, n in ((0, 0), (5, 4), (599, 0), (590, 77)):
        found = (found_q[0, :, m] * found_k[0, :, n]).view(4, 2, 16).sum(1)
        plain = (plain_q[0, :, m] * plain_k[0, :, n]).view(4, 2, 16).sum(1)
        decay = [((2 * i / 32 + 0.4) / 1.4) ** ((m - n) / 512) for i in range(16)]
        expected = plain * torch.tensor(decay, dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_xpos_scores_are_torchscales() -> None:
    """microsoft/torchscale at 4d1e0e8 in float64, at four pairs; it turns pairs of neighbours."""
    neighbours = [0, 2, 4, 6, 1, 3, 5, 7]
    q, k = (wave(1, 1, 700, 8, start=start)[..., neighbours] for start in (0, 2))
    q, k = build("xpos", heads=1, head_dim=8)(q, k)
    pairs = ((0, 0), (5, 4), (699, 0), (600, 77))
    found = torch.stack([q[0, 0, m] @ k[0, 0, n] for m, n in pairs])
    expected = torch.tensor([-1.264924, -3.411911, -1.322953, -0.251827], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_xpos_continues_a_cache_and_refuses_what_its_factors_cannot_hold() -> None:
    q, k = torch.randn(2, 1, 4, 50, 32).unbind(0)
    xpos = build("xpos", heads=4, head_dim=32)
    whole_q, whole_k = xpos(q, k)
    one_q, one_k = xpos(q[:, :, 40:], k[:, :, 40:], 40, 40)
    torch.testing.assert_close(one_q, whole_q[:, :, 40:])
    torch.testing.assert_close(one_k, whole_k[:, :, 40:])
    with pytest.raises(PositionalEmbeddingError, match="xpos at position 40049"):
        xpos(q, k, 40000, 40000)
    with pytest.raises(PositionalEmbeddingError, match=r"torch\.float16"):
        xpos(q.half(), k.half(), 5000, 5000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_keeps_fp32_angles_after_a_module_cast(dtype: torch.dtype) -> None:
    q = torch.randn(1, 4, 2, 32, dtype=dtype)
    cast = rotary().to(dtype)
    turned, _ = cast(q, q, 4001, 0)
    assert turned.dtype == dtype
    exact, _ = rotary()(q.float(), q.float(), 4001, 0)
    torch.testing.assert_close(turned, exact.to(dtype))


def test_rotation_keeps_the_norm_and_yarn_scales_it() -> None:
    q = torch.randn(1, 4, 60, 32)
    torch.testing.assert_close(rotary()(q, q, 7, 0)[0].norm(dim=-1), q.norm(dim=-1))
    yarn = rotary(rope_scaling={"type": "yarn", "factor": 4})
    factor = 0.1 * math.log(4) + 1
    torch.testing.assert_close(yarn(q, q, 7, 0)[0].norm(dim=-1), q.norm(dim=-1) * factor)


def test_ntk_keeps_the_fastest_and_divides_the_slowest_frequency() -> None:
    plain, _ = rotary_frequencies(Rope(32, 10000.0, 64, {}))
    ntk, factor = rotary_frequencies(Rope(32, 10000.0, 64, {"type": "ntk", "factor": 8.0}))
    assert factor == 1.0
    assert ntk[0] == plain[0]
    assert ntk[-1].item() == pytest.approx(plain[-1].item() / 8, rel=1e-4)
    assert (ntk[1:] < plain[1:]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_pct": 0.1}, "rotary_pct: 0.1"),
        ({"rotary_pct": 2.0}, "rotary_pct: 2.0"),
        ({"rotary_pct": 0.0}, "rotary_pct: 0.0"),
        ({"rope_scaling": {"type": "axial", "factor": 2}}, "type 'axial'"),
        ({"rope_scaling": {"type": "ntk"}}, "type ntk needs factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 2}}, "needs low_freq_factor"),
        ({"rope_scaling": {**SCALINGS["longrope"], "long_factor": [1.0]}}, "1 numbers; .* need 16"),
        ({"rope_scaling": {"type": "ntk", "factor": 0.5}}, "factor 0.5"),
        ({"rope_scaling": {"type": "ntk", "factor": "big"}}, "factor 'big'"),
        ({"rope_scaling": {"type": "ntk", "faktor": 2}}, "unknown key 'faktor'"),
    ],
)
def test_bad_rotary_options_name_the_key(changes: dict, message: str) -> None:
    with pytest.raises(PositionalEmbeddingError, match=message):
        rotary(**changes)


def test_sinusoidal_is_sines_then_cosines_of_the_position() -> None:
    embedding = build_positional_embedding("sinusoidal", options())
    added = embedding(torch.zeros(2, 30, 128), offset=1000)
    for at, i in [(0, 0), (7, 3), (29, 63)]:
        angle = (1000 + at) / 10000 ** (2 * i / 128)
        assert added[1, at, i].item() == pytest.approx(math.sin(angle), abs=2e-4)
        assert added[1, at, 64 + i].item() == pytest.approx(math.cos(angle), abs=2e-4)
    assert not list(embedding.state_dict())


def test_sinusoidal_keeps_fp32_angles_after_a_module_cast() -> None:
    embedding = build_positional_embedding("sinusoidal", options())
    exact = embedding(torch.zeros(1, 500, 128))
    cast = build_positional_embedding("sinusoidal", options()).bfloat16()
    low = cast(torch.zeros(1, 500, 128, dtype=torch.bfloat16))
    assert low.dtype == torch.bfloat16
    assert (low.float() - exact).abs().max() < 0.005


def test_sinusoidal_needs_an_even_width() -> None:
    with pytest.raises(PositionalEmbeddingError, match="even hidden_size, got 127"):
        build_positional_embedding("sinusoidal", options(hidden_size=127))


def test_learned_adds_its_rows_and_trains_them() -> None:
    embedding = build_positional_embedding("learned", options())
    assert {name: tuple(p.shape) for name, p in embedding.named_parameters()} == {
        "weight": (64, 128)
    }
    assert embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    added = embedding(torch.ones(2, 4, 128), offset=60)
    torch.testing.assert_close(added[1], 1 + embedding.weight[60:])
    added.sum().backward()
    assert embedding.weight.grad[:60].eq(0).all() and embedding.weight.grad[60:].eq(2).all()


@pytest.mark.parametrize(("length", "offset"), [(65, 0), (1, 64), (5, 60)])
def test_learned_past_its_table_says_what_to_do(length: int, offset: int) -> None:
    embedding = build_positional_embedding("learned", options())
    with pytest.raises(PositionalEmbeddingError, match=r"64 positions .max_position_embeddings"):
        embedding(torch.zeros(1, length, 128), offset=offset)


def test_drawn_positions_turn_as_hugging_faces() -> None:
    """Beyond the length of the sequence, and another draw for each row of the batch."""
    q, k = torch.randn(2, 2, 4, 10, 32).unbind()
    positions = torch.stack([torch.randperm(200)[:10].sort().values for _ in range(2)])
    expected = hugging_face(positions, {"partial_rotary_factor": 1.0}, q, k)
    found = rotary(randomized_positions=200)(q, k, 0, 0, positions)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_share_of_the_angles_is_rotary_at_1_and_nothing_at_0() -> None:
    q, k = torch.randn(2, 1, 4, 40, 32).unbind()
    whole, half, none = (RotaryEmbedding(options(), share) for share in (1.0, 0.5, 0.0))
    for turned, plain in zip(whole(q, k, 3, 3), rotary()(q, k, 3, 3), strict=True):
        assert torch.equal(turned, plain)
    assert all(map(torch.equal, none(q, k, 3, 3), (q, k)))
    stretched = rotary(rope_scaling={"type": "linear", "factor": 2.0})
    for turned, plain in zip(half(q, k, 3, 3), stretched(q, k, 3, 3), strict=True):
        torch.testing.assert_close(turned, plain)


def test_a_share_of_yarn_is_a_share_of_its_temperature_too() -> None:
    scaling = {"type": "yarn", "factor": 8.0, "original_max_position": 64}
    quarter = RotaryEmbedding(options(rope_scaling=scaling), 0.25)
    frequencies, factor = rotary(rope_scaling=scaling).frequencies(64)
    shared, warmer = quarter.frequencies(64)
    assert shared == tuple(f / 4 for f in frequencies)
    assert warmer == pytest.approx(1 + (factor - 1) / 4)
