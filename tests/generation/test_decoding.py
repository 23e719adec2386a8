"""Decoding: with and without cache, in batches and alone, for every positional embedding."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megatron.errors import GenerationError
from megatron.generation import Sampling, complete, decoding, generate
from megatron.generation.decoding import read_prompts, restrict
from megatron.model import GPTModel, ModelSpec
from megatron.model.cache import Cache
from megatron.model.position_names import POSITIONAL_EMBEDDINGS
from tests.evaluation.helpers import sharpened

PROMPTS = [[5, 9, 3], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]


PATTERN = [
    {"pos_emb": "rotary", "sliding_window_width": 3, "forget_gate": True},
    {"pos_emb": "kerple_log", "sliding_window_width": 0},
    {"pos_emb": "none", "attention_temperature": {"floor": 2, "alpha": 0.5}},
]


def tiny_model(pos_emb: str = "kerple_log", positions: int = 128, **changes: object) -> GPTModel:
    spec = ModelSpec(
        **{
            "padded_vocab_size": 64,
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "max_position_embeddings": positions,
            "pos_emb": pos_emb,
            **changes,
        }
    )
    return sharpened(GPTModel(spec))


def greedy_by_hand(model: GPTModel, prompt: list[int], count: int) -> list[int]:
    """One whole forward pass a token, nothing shared with the code under test."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of PROMPTS are read apart, the longest in three chunks."""
    monkeypatch.setattr(decoding, "LITTLE_PADDING", 2)
    monkeypatch.setattr(decoding, "PROMPT_TOKENS", 4)
    monkeypatch.setattr(decoding, "SHORTEST_CHUNK", 4)


@pytest.mark.parametrize("pos_emb", sorted(POSITIONAL_EMBEDDINGS))
def test_greedy_is_the_same_with_and_without_cache(pos_emb: str, small_blocks: None) -> None:
    model = tiny_model(pos_emb)
    expected = [greedy_by_hand(model, prompt, 20) for prompt in PROMPTS]
    assert len({tuple(row) for row in expected}) > 1, "a model that says one thing proves nothing"
    assert generate(model, PROMPTS, max_new_tokens=20) == expected
    assert generate(model, PROMPTS, max_new_tokens=20, use_cache=False) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"kerple_share": "per_layer"},
        {"sliding_window_width": 5},
        {"num_kv_heads": 2},
        {"use_qk_layernorm": True},
        {"qk_norm": "all_heads", "norm": "rmsnorm", "norm_placement": "output", "kv_channels": 12},
        {"forget_gate": True},
        {"attention_sinks": True},
        {"scalable_softmax": True, "sliding_window_width": 5},
        {"forget_gate": True, "attention_sinks": True, "scalable_softmax": True, "num_kv_heads": 2},
        {"forget_gate": True, "attention_sinks": True, "sliding_window_width": 5},
        {"num_layers": 4, "layer_pattern": PATTERN},
    ],
    ids=str,
)
def test_cache_with_other_attention(
    changes: dict[str, object], request: pytest.FixtureRequest
) -> None:
    """Prompts in one padded block, and apart in chunks."""
    model = tiny_model(**changes)
    expected = [greedy_by_hand(model, prompt, 20) for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_new_tokens=20) == expected
    request.getfixturevalue("small_blocks")
    assert generate(model, PROMPTS, max_new_tokens=20) == expected


DYNAMIC = {"type": "dynamic", "factor": 2.0, "original_max_position": 8}


def test_rotations_by_length_run_with_their_own_length_alone() -> None:
    model = tiny_model("rotary", rope_scaling=DYNAMIC)
    alone = [generate(model, [prompt], max_new_tokens=20)[0] for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_new_tokens=20) == alone
    assert generate(model, [PROMPTS[0], PROMPTS[0]], max_new_tokens=20) == [alone[0]] * 2


def test_prompts_are_read_as_blocks() -> None:
    """Two passes for 1 and 300 tokens together, and then one for each new token."""
    model, passes = tiny_model(positions=512), []
    model.embedding.register_forward_hook(lambda _, inputs, __: passes.append(inputs[0].shape))
    generate(model, [[1], list(range(60)) * 5], max_new_tokens=3)
    assert passes == [(1, 300), (1, 1), (2, 1), (2, 1)]


def test_a_row_that_ends_frees_its_places() -> None:
    """The longest prompt stops: learned positions of the other may then reach the last one."""
    model = tiny_model("learned", positions=32)
    prompts = [[3, 5], list(range(28))]
    expected = [
        greedy_by_hand(model, prompt, count) for prompt, count in zip(prompts, (30, 2), strict=True)
    ]
    stopped = complete(
        model, prompts, max_new_tokens=30, should_stop=lambda new: new == expected[1]
    )
    assert [row.tokens for row in stopped] == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"forget_gate": True},
        {"num_layers": 3, "layer_pattern": PATTERN},
        # rows on both sides of its threshold, in one block
        {"pos_emb": "fire", "fire_threshold": 5, "sliding_window_width": 9},
    ],
)
def test_blocks_after_rows_of_different_lengths(changes: dict[str, object]) -> None:
    """Several tokens at once continue a joint cache, which `select` may repeat rows of."""
    model = tiny_model(**changes)
    with torch.inference_mode():
        first, cache = read_prompts(model, PROMPTS)
        cache.select(torch.tensor([2, 0, 0]))
        more = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 8, 7, 6]])
        found = model(more, cache=cache)
        for row, (prompt, own) in enumerate(zip((2, 0, 0), more.tolist(), strict=True)):
            whole = model(torch.tensor([[*PROMPTS[prompt], *own]]))[0]
            torch.testing.assert_close(found[row], whole[-4:], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(first[prompt], whole[-5], rtol=1e-4, atol=1e-4)


def test_a_window_bounds_its_layers_cache() -> None:
    """200 tokens in, 200 out: a layer with a window keeps its window, in room for twice as many."""
    model = tiny_model(num_layers=4, layer_pattern=PATTERN)
    tokens = torch.randint(64, (2, 400))
    bounded = model.new_cache()
    whole = Cache([None] * 4)
    results = []
    with torch.no_grad():
        for cache in (bounded, whole):
            for start, stop in ((0, 200), *((at, at + 1) for at in range(200, 400))):
                last = model(tokens[:, start:stop], cache=cache)
            results.append(last)
    torch.testing.assert_close(*results)
    token = 2 * 2 * 32 * 4  # keys and values of two rows, 32 wide, in fp32
    gates = 2 * 4 * 8  # their sums, four heads, in fp64
    assert [layer.kept for layer in bounded.layers] == [4, 1, 400, 4]
    assert bounded.layers[0].num_bytes <= 64 * (token + gates)
    assert bounded.layers[2].num_bytes >= 400 * token
    assert bounded.layers[1].num_bytes <= 64 * token
    assert whole.layers[0].num_bytes >= 400 * (token + gates)
    bounded.select(torch.tensor([1]))
    assert bounded.layers[1].num_bytes <= 32 * token


def test_works_beyond_the_training_length() -> None:
    model = tiny_model(positions=8)
    assert generate(model, [[1, 2]], max_new_tokens=40) == [greedy_by_hand(model, [1, 2], 40)]


def test_learned_positions_end_with_a_clear_error() -> None:
    with pytest.raises(ValueError, match="learned has vectors for 8 positions"):
        generate(tiny_model("learned", positions=8), [[1, 2]], max_new_tokens=40)


def test_stop_tokens_end_a_row_and_only_that_row() -> None:
    model = tiny_model()
    free = generate(model, PROMPTS, max_new_tokens=12)
    stop = free[0][4]
    stopped = generate(model, PROMPTS, max_new_tokens=12, stop_ids=[stop])
    for row, whole in zip(stopped, free, strict=True):
        expected = whole[: whole.index(stop)] if stop in whole else whole
        assert row == expected
    assert len(stopped[0]) <= 4


def test_prompts_as_a_tensor() -> None:
    model = tiny_model()
    prompts = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert generate(model, prompts, max_new_tokens=5) == [
        greedy_by_hand(model, row, 5) for row in prompts.tolist()
    ]


def test_samples_do_not_depend_on_their_neighbours() -> None:
    model = tiny_model()
    batch = generate(model, PROMPTS, max_new_tokens=15, temperature=1.0, seed=3)
    alone = complete(
        model,
        [PROMPTS[2]],
        max_new_tokens=15,
        sampling=Sampling(1.0),
        seed=3,
        streams=[2],
    )
    assert alone[0].tokens == batch[2]
    assert batch != generate(model, PROMPTS, max_new_tokens=15, temperature=1.0, seed=4)


def test_restrict_keeps_exactly_the_best_and_the_nucleus() -> None:
    logits = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()[torch.tensor([3, 0, 4, 1, 2])]
    assert set(restrict(logits, top_k=2).isfinite().nonzero()[:, 0].tolist()) == {1, 3}
    assert set(restrict(logits, top_p=0.69).isfinite().nonzero()[:, 0].tolist()) == {1, 3}
    assert set(restrict(logits, top_p=0.71).isfinite().nonzero()[:, 0].tolist()) == {1, 3, 4}
    assert set(restrict(logits, top_p=0.01).isfinite().nonzero()[:, 0].tolist()) == {1}


def test_temperature_sampling_follows_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    generator = torch.Generator().manual_seed(0)
    counts = Counter(Sampling(0.5).choose(logits, generator) for _ in range(4000))
    expected = (logits / 0.5).softmax(-1) * 4000
    for token in range(4):
        spread = float(expected[token] * (1 - expected[token] / 4000)) ** 0.5
        assert abs(counts[token] - float(expected[token])) < 5 * spread + 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 1.5}, "top_p"),
    ],
)
def test_bad_sampling_options_are_named(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**values)  # type: ignore[arg-type]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(GenerationError, match="prompt 1 is empty"):
        generate(tiny_model(), [[1], []], max_new_tokens=2)


def test_logits_are_those_of_the_model() -> None:
    model = tiny_model()
    (result,) = complete(model, [[3, 1]], max_new_tokens=3, keep_logits=True, vocab_size=60)
    with torch.no_grad():
        expected = model(torch.tensor([[3, 1, *result.tokens]]))[0, 1:4, :60]
    torch.testing.assert_close(torch.stack(result.logits), expected, rtol=1e-4, atol=1e-4)
