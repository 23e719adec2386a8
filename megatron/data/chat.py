"""Conversations to tokens and labels, by a chat template: only the assistant's turns have loss.

A template is a Jinja text as Hugging Face's tokenizers carry it. A conversation is rendered turn by
turn, as often as it has turns, and each turn's piece is tokenized on its own, so that no token
belongs to two of them::

    <|user|>Hi<|end|><|assistant|>   Hello!<|end|>   <|user|>Bye<|end|><|assistant|>   ...
    [--------- no loss -----------]  [--- loss ---]  [---------- no loss ----------]  [loss]

The words that open an assistant's turn (`add_generation_prompt`) are part of the piece before it: a
model that answers is given them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.data.chunks import values_of_line
from megatron.data.gpt_dataset import NO_LOSS
from megatron.errors import DataError
from megatron.tokenizer import Tokenizer

ASSISTANT = "assistant"
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, and the special tokens that it may name."""

    text: str
    source: str = "the chat template"
    bos_token: str = ""
    eos_token: str | None = None
    """None: what ends the tokenizer's documents."""

    @classmethod
    def read(cls, path: Path) -> ChatTemplate:
        """From a Jinja file, or from `chat_template` in a tokenizer_config.json."""
        try:
            text = path.read_text(encoding="utf-8")
            content = json.loads(text) if path.suffix == ".json" else {"chat_template": text}
        except (OSError, ValueError) as error:
            raise DataError(f"--chat-template {path}: cannot be read ({error})") from error
        template = content.get("chat_template") if isinstance(content, dict) else None
        if not isinstance(template, str):
            raise DataError(f"--chat-template {path}: has no text under chat_template")
        bos, eos = (_token(content.get(name)) for name in ("bos_token", "eos_token"))
        read = cls(template, str(path), bos or "", eos)
        _ = read._compiled  # so that an error of syntax is found before any data is read
        return read

    @cached_property
    def _compiled(self) -> Any:
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        # The sandbox: a template may be another author's, and is data.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        now = datetime.now()  # one time for all turns of a conversation
        environment.globals |= {"raise_exception": _refuse, "strftime_now": now.strftime}
        # transformers' own marks of the assistant's text, which `pieces` finds by its turn
        text = re.sub(r"(\{%-?\s*)generation(\s*-?%\})", r"\1if true\2", self.text)
        text = re.sub(r"(\{%-?\s*)endgeneration(\s*-?%\})", r"\1endif\2", text)
        try:
            return environment.from_string(text)
        except TemplateError as error:
            raise DataError(f"--chat-template {self.source}: {error}") from error

    def render(self, messages: Messages, *, opens_answer: bool, eos_token: str) -> str:
        """The text of a conversation; ValueError if the template refuses it."""
        from jinja2 import TemplateError

        try:
            text: str = self._compiled.render(
                messages=messages,
                add_generation_prompt=opens_answer,
                bos_token=self.bos_token,
                eos_token=eos_token if self.eos_token is None else self.eos_token,
            )
        except (TemplateError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"the chat template fails ({error})") from None
        return text

    def pieces(self, messages: Messages, eos_token: str = "") -> list[tuple[str, bool]]:
        """The text of each turn, and whether it is the assistant's."""
        pieces: list[tuple[str, bool]] = []
        before = ""
        for number, message in enumerate(messages, start=1):
            opens = number < len(messages) and messages[number]["role"] == ASSISTANT
            text = self.render(messages[:number], opens_answer=opens, eos_token=eos_token)
            if not text.startswith(before):
                raise ValueError(
                    f"the chat template writes the turns before turn {number} anew once it follows"
                )
            pieces.append((text[len(before) :], message["role"] == ASSISTANT))
            before = text
        return pieces

    def encode(
        self, messages: Messages, tokenizer: Tokenizer, end: int | None
    ) -> tuple[list[int], list[int], int]:
        """Tokens, labels (not shifted) and the length of the text; `end` ends the document."""
        tokens: list[int] = []
        labels: list[int] = []
        pieces = self.pieces(messages, tokenizer.detokenize([tokenizer.eod]))
        for ids, (_, answers) in zip(
            tokenizer.tokenize_pieces([text for text, _ in pieces]), pieces, strict=True
        ):
            tokens += ids
            labels += ids if answers else [NO_LOSS] * len(ids)
        if end is not None and tokens and tokens[-1] != end:
            tokens.append(end)
            labels.append(end if labels[-1] != NO_LOSS else NO_LOSS)
        return tokens, labels, sum(len(text) for text, _ in pieces)


def conversations_of_line(
    line: bytes, keys: Sequence[str], where: Sequence[tuple[str, str]] = ()
) -> list[Messages] | None:
    """The messages of a JSON line; None if ``where`` does not select it."""
    found: list[Messages] | None = values_of_line(line, keys, where, list, "a list of messages")
    for key, messages in zip(keys, found, strict=True) if found else ():
        if not messages:
            raise ValueError(f'key "{key}" is not a list of messages')
        for number, message in enumerate(messages, start=1):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise ValueError(f'key "{key}": message {number} has no role')
    return found


def _token(value: Any) -> str | None:
    """A special token of a tokenizer_config.json: text, or a mapping with its content."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise ValueError(message)
