"""Conversations: the tokens and the labels are those of transformers, as are loss and gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megatron.checkpoints.hf.folder import write_hf
from megatron.data.chat import ChatTemplate, conversations_of_line
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.loader import get_labels_and_mask
from megatron.errors import DataError
from megatron.model.loss import masked_mean
from megatron.tokenizer import build_tokenizer
from tests.checkpoints.hf.exports import both
from tests.checkpoints.small_models import VOCABULARY, at_rest, small_args
from tests.data.samples import BYTES, prepare

TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
{%- if message['role'] == 'assistant' %}
<|assistant|>{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}
{%- else %}
<|{{ message['role'] }}|>{{ message['content'] | trim }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|assistant|>{% endif %}"""
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Grüße?  "},
    {"role": "assistant", "content": "Hallo"},
    {"role": "user", "content": "<b>and</b>"},
    {"role": "assistant", "content": "so on"},
]


def byte_tokenizer(folder: Path) -> Path:
    """Bytes and five special tokens; like Llama's file it puts a first token before every text."""
    special = ["<s>", "</s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*special, *letters])}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(special)
    library.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    library.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_tokens_and_labels_are_those_of_transformers(tmp_path: Path) -> None:
    file = byte_tokenizer(tmp_path)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(file), bos_token="<s>", eos_token="</s>")
    expected = theirs.apply_chat_template(
        TALK, chat_template=TEMPLATE, return_dict=True, return_assistant_tokens_mask=True
    )
    settings = {"chat_template": TEMPLATE, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    template = ChatTemplate.read(tmp_path / "tokenizer_config.json")
    ours = build_tokenizer("HFTokenizer", vocab_file=file)
    tokens, labels, _ = template.encode(TALK, ours, end=1)
    assert tokens == [*expected["input_ids"], 1]
    marked = np.array([*expected["assistant_masks"], 1])
    assert labels == np.where(marked, tokens, -100).tolist()
    assert 0 < marked.sum() < len(marked) / 2


def test_loss_and_gradients_are_those_of_transformers(tmp_path: Path) -> None:
    """The labels go to transformers as they are in the file; it shifts them itself."""
    keys: dict[str, Any] = {"pos_emb": "rotary", "rotary_pct": 0.5, "no_weight_tying": True}
    ours, theirs = both(tmp_path, **keys)
    text = torch.randint(1, VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(1))
    label = text.clone()
    label[0, :9] = label[1, :4] = label[1, 13:] = -100
    tokens, labels, mask = get_labels_and_mask(text, eod=0, label=label)
    loss = masked_mean(ours(tokens, labels), mask)
    loss.backward()
    expected = theirs(input_ids=text, labels=label).loss
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    with torch.no_grad():  # an export renames and rearranges weights; so it does gradients
        for parameter in ours.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    write_hf(at_rest(ours, small_args(**keys)), tmp_path / "gradients")
    exported = dict(type(theirs).from_pretrained(tmp_path / "gradients").named_parameters())
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(exported[name].data, parameter.grad, rtol=1e-4, atol=1e-6)


def test_prepare_data_writes_tokens_and_labels(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    lines = [json.dumps({"messages": TALK}), "{}", json.dumps({"messages": ["hello"]})]
    (tmp_path / "talks.jsonl").write_text("\n".join(lines))
    given = ("--chat-template", template, "--input", tmp_path / "talks.jsonl", "talks")
    assert prepare(tmp_path, *given) == 0
    output = capfd.readouterr()
    assert 'talks.jsonl:2: key "messages" is missing' in output.err
    assert 'talks.jsonl:3: key "messages": message 1 has no role' in output.err
    prefix = tmp_path / "data" / "talks" / "talks_messages"
    tokens, labels = (IndexedDataset(f"{prefix}{name}_document") for name in ("", "_label"))
    with_loss = bytes(int(label) for label in labels[0] if label >= 0)
    assert with_loss == b"Hallo<|end|>so on<|end|>\0"
    assert bytes(tokens[0].astype(np.uint8)).startswith(b"<|system|>Be brief.<|end|>")
    assert f"train_label_data_paths=[{prefix}_label_document]" in output.err
    assert prepare(tmp_path, *given) == 0
    assert "up to date" in capfd.readouterr().out
    template.write_text(TEMPLATE.replace("<|end|>", "|"))
    assert prepare(tmp_path, *given) == 0
    assert "talks: ready" in capfd.readouterr().out


@pytest.mark.parametrize("message", ["hello", {"content": "hello"}, {"role": 1}])
def test_a_message_without_a_role_is_refused(message: Any) -> None:
    line = json.dumps({"messages": [TALK[0], message]}).encode()
    with pytest.raises(ValueError, match='key "messages": message 2 has no role'):
        conversations_of_line(line, ["messages"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{{ messages[-1].content }}", "writes the turns before turn 2 anew"),
        ("{{ raise_exception('no system turn') }}", "no system turn"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_conversation_that_the_template_refuses(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ChatTemplate(text).encode(TALK, BYTES, None)


def test_tojson_takes_its_indent_as_in_transformers() -> None:
    template = ChatTemplate("{{ messages[0] | tojson(2) }}")
    assert template.pieces(TALK[:1])[0][0] == json.dumps(TALK[0], indent=2, ensure_ascii=False)


def test_a_file_that_is_no_template_is_named(tmp_path: Path) -> None:
    for name, text in (("a.jinja", "{% for"), ("b.json", "{}"), ("c.json", "["), ("d.jinja", None)):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match=f"--chat-template .*{name}: "):
            ChatTemplate.read(tmp_path / name)
