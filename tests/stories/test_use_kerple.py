"""use_kerple: transformers' own models with a kernel, against the same models with a dense bias."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kerple import kernel, use_kerple
from megatron.errors import EngineError

transformers = pytest.importorskip("transformers")
VOCABULARY, LENGTH, LEARNED = 61, 40, 32
SIZES = {
    "LlamaForCausalLM": {"num_key_value_heads": 2},
    "MistralForCausalLM": {"num_key_value_heads": 2, "sliding_window": 12},
    "Qwen2ForCausalLM": {"num_key_value_heads": 2},
    "Qwen3ForCausalLM": {"num_key_value_heads": 2, "head_dim": 16},
    "GPTNeoXForCausalLM": {"rotary_pct": 0.5},
    "GPT2LMHeadModel": {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0},
}


def plain(name: str, **changed: Any) -> Any:
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    config = cls.config_class(
        **({"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "max_position_embeddings": LEARNED}
        | {"bos_token_id": 1, "eos_token_id": 1} | SIZES[name] | changed)
    )  # fmt: skip
    if hasattr(config, "intermediate_size"):
        config.intermediate_size = 64
    return cls(config).eval()


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def padding() -> Tensor:
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, :13] = 0
    return mask


def without_positions(model: Any) -> Any:
    """In another way than use_kerple's: angles and position vectors of 0."""
    for part in model.modules():
        if hasattr(part, "inv_freq"):
            part.inv_freq.zero_()
            part.attention_scaling = 1.0
    if hasattr(model.base_model, "wpe"):
        model.base_model.wpe = nn.Embedding.from_pretrained(torch.zeros(LENGTH, 48))
    return model


def dense_mask(bias: Tensor, padding: Tensor, window: int | None) -> Tensor:
    """Bias, future, window and padding as one [B, H, L, L] that is added to the scores."""
    index = torch.arange(LENGTH)
    distance = index[:, None] - index
    seen = (distance >= 0) & (distance < (window or LENGTH))
    seen = seen & (padding[:, None, None, :].bool() | (distance == 0))
    return torch.where(seen, bias[:, distance.clamp(min=0)], -torch.inf)


@pytest.mark.parametrize("name", SIZES)
def test_logits_and_gradients_are_those_of_a_dense_bias(
    name: str, tokens: Tensor, padding: Tensor
) -> None:
    ours, theirs = use_kerple(plain(name), "kerple_log"), without_positions(plain(name))
    theirs.set_attn_implementation("eager")
    expected_kernel = kernel("kerple_log", heads=4)
    bias = expected_kernel(LENGTH).bias
    mask = dense_mask(bias, padding, SIZES[name].get("sliding_window"))
    seen = padding.bool()
    actual = ours(tokens, attention_mask=padding).logits[seen]
    expected = theirs(tokens, attention_mask=mask).logits[seen]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    for logits in (actual, expected):
        logits.square().sum().backward()
    torch.testing.assert_close(
        ours.kerple_kernel.r2.grad, expected_kernel.r2.grad, rtol=1e-3, atol=1e-5
    )
    gradients = [model.get_input_embeddings().weight.grad for model in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["MistralForCausalLM", "GPT2LMHeadModel"])
def test_generate_with_padding_and_cache_past_the_learned_length(
    name: str, tokens: Tensor, padding: Tensor
) -> None:
    model = use_kerple(plain(name))
    options = {"max_new_tokens": 5, "do_sample": False}
    together = model.generate(tokens, attention_mask=padding, **options)
    alone = model.generate(tokens[1:, 13:], **options)
    assert together[1, LENGTH:].tolist() == alone[0, LENGTH - 13 :].tolist()
    whole = model.generate(tokens, attention_mask=padding, use_cache=False, **options)
    assert together.tolist() == whole.tolist()
    with pytest.raises(EngineError, match="cache of fixed size"):
        model.generate(tokens, cache_implementation="static", **options)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM"])
def test_packed_documents_do_not_see_each_other(name: str, tokens: Tensor) -> None:
    model = use_kerple(plain(name))
    parts = [15, LENGTH - 15]
    positions = torch.cat([torch.arange(part) for part in parts])[None]
    packed = model(tokens[:1], position_ids=positions, use_cache=False).logits
    apart = [model(part).logits for part in tokens[:1].split(parts, dim=1)]
    torch.testing.assert_close(packed, torch.cat(apart, dim=1), rtol=1e-4, atol=1e-5)


def test_saved_and_loaded_the_kernel_stays_fp32(tmp_path: Path, tokens: Tensor) -> None:
    model = use_kerple(plain("LlamaForCausalLM"), "rpe", rpe_num_buckets=8)
    with torch.no_grad():
        next(model.kerple_kernel.parameters()).normal_()
        expected = model(tokens).logits
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(tokens).logits, expected, rtol=0, atol=0)
    narrow = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for each in (narrow, loaded.bfloat16()):
        assert {p.dtype for p in each.kerple_kernel.parameters()} == {torch.float32}
        assert each.lm_head.weight.dtype == torch.bfloat16
        assert each(tokens).logits.isfinite().all()


def test_a_copy_has_a_kernel_of_its_own(tokens: Tensor) -> None:
    model = use_kerple(plain("LlamaForCausalLM"))
    other = copy.deepcopy(model)
    before = model(tokens).logits
    with torch.no_grad():
        other.kerple_kernel.r1.mul_(20)
    assert torch.equal(model(tokens).logits, before)
    assert not torch.equal(other(tokens).logits, before)


@pytest.mark.slow
def test_one_graph_of_torch_compile(tokens: Tensor) -> None:
    model = use_kerple(plain("LlamaForCausalLM"))
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-5)


def test_what_it_cannot_take_is_one_line(tokens: Tensor, tmp_path: Path) -> None:
    model = use_kerple(plain("LlamaForCausalLM"))
    with pytest.raises(EngineError, match="has a kernel already"):
        use_kerple(model)
    with pytest.raises(EngineError, match="would compute without them"):
        model.set_attn_implementation("sdpa")
    with pytest.raises(EngineError, match="not known; it takes GPT2LMHeadModel"):
        use_kerple(nn.Linear(1, 1))
    with pytest.raises(EngineError, match=r"mask of \[batch, 1, queries, keys\]"):
        model(tokens, attention_mask=torch.zeros(2, 1, LENGTH, LENGTH))
    model.config.kerple["pos_emb"] = "somebody.elses:Kernel"
    model.save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="names a class to import"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
