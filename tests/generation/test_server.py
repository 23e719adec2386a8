"""kerple serve: the official client's answers, limits, load, and a clean end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import uvicorn

from megatron.commands import run
from megatron.commands.model_scripts import SERVE_LIMITS
from megatron.generation.model_thread import Limits
from megatron.generation.server import CompletionServer, _listen
from megatron.model import GPTModel, ModelSpec
from megatron.tokenizer import build_tokenizer
from tests.conftest import REPOSITORY
from tests.evaluation.helpers import sharpened, write_run
from tests.generation.test_decoding import greedy_by_hand

TOKENIZER = build_tokenizer("CharLevelTokenizer")


def model() -> GPTModel:
    spec = ModelSpec(
        padded_vocab_size=512, num_layers=1, hidden_size=32, num_attention_heads=2, seq_length=16,
        pos_emb="kerple_log",
    )  # fmt: skip
    return sharpened(GPTModel(spec))


@contextmanager
def served(server: CompletionServer) -> Iterator[str]:
    listening = _listen("127.0.0.1", 0)
    web = uvicorn.Server(uvicorn.Config(server.app(("127.0.0.1",)), log_level="error"))
    thread = threading.Thread(target=web.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        web.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def tiny_server(**limits: Any) -> CompletionServer:
    default: Any = {name: value for name, (value, _) in SERVE_LIMITS.items()}
    return CompletionServer(model(), TOKENIZER, "tiny", Limits(**{**default, **limits}))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(tiny_server(max_tokens=40, max_context=100)) as found:
        yield found


@pytest.fixture(scope="module")
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def expected(prompt: str, count: int) -> str:
    return TOKENIZER.detokenize(greedy_by_hand(model(), TOKENIZER.tokenize(prompt), count))


def test_the_official_client_gets_greedy_text(client: openai.OpenAI) -> None:
    assert [each.id for each in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "kerple"
    prompts = ["Hello", "a much longer prompt than the first one"]
    found = client.completions.create(model="tiny", prompt=prompts, max_tokens=12, temperature=0)
    assert [choice.text for choice in found.choices] == [expected(each, 12) for each in prompts]
    assert [choice.finish_reason for choice in found.choices] == ["length"] * 2
    assert found.usage is not None and found.usage.completion_tokens == 24
    ids = client.completions.create(
        model="tiny", prompt=TOKENIZER.tokenize("Hello"), max_tokens=12, temperature=0
    )
    assert ids.choices[0].text == found.choices[0].text


def test_a_stream_has_the_same_text_and_stops(client: openai.OpenAI) -> None:
    whole = expected("Hello", 30)
    stop = whole[8:10]
    stream = client.completions.create(
        model="tiny",
        prompt="Hello",
        max_tokens=30,
        temperature=0,
        stop=stop,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces = list(stream)
    text = "".join(piece.choices[0].text for piece in pieces if piece.choices)
    assert text == whole.split(stop)[0] and len(pieces) > 3
    assert pieces[-2].choices[0].finish_reason == "stop"
    assert pieces[-1].usage is not None and pieces[-1].usage.prompt_tokens == 5


def test_samples_have_a_seed(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        found = client.completions.create(model="tiny", prompt="Hello", n=3, seed=seed)
        return [choice.text for choice in found.choices]

    assert texts(1) == texts(1) != texts(2)
    assert len(set(texts(1))) == 3


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "gpt"}, openai.NotFoundError, "this server has 'tiny'"),
        ({"max_tokens": 41}, openai.BadRequestError, "max_tokens = 41: at most 40"),
        ({"prompt": "x" * 99}, openai.BadRequestError, "more than 100 tokens"),
        ({"prompt": [600]}, openai.BadRequestError, "token ids are 0 to 511"),
        ({"temperature": -1}, openai.BadRequestError, "temperature: "),
        ({"logprobs": 3}, openai.BadRequestError, "logprobs: "),
        ({"extra_body": {"best": 1}}, openai.BadRequestError, "best: is not supported"),
    ],
)
def test_bad_requests_are_named(
    client: openai.OpenAI, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        client.completions.create(**{"model": "tiny", "prompt": "Hello", **changes})


def test_other_sites_and_other_bodies_are_refused(address: str) -> None:
    assert httpx.get(f"{address}/health").json() == {"status": "ok", "waiting": 0, "running": 0}
    foreign = httpx.get(f"{address}/health", headers={"host": "evil.example"})
    assert foreign.status_code == 400
    body = json.dumps({"model": "tiny", "prompt": "x"})
    plain = httpx.post(f"{address}/v1/completions", content=body)
    assert plain.status_code == 415
    large = httpx.post(
        f"{address}/v1/completions", content=b" " * 5_000_000,
        headers={"content-type": "application/json"},
    )  # fmt: skip
    assert large.status_code == 413


def test_a_full_queue_is_429_and_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    server = tiny_server(queue=2, batch=1, seconds=1.0)
    slow, turn = server.thread.model.next_logits, threading.Event()

    def next_logits(*arguments: Any) -> torch.Tensor:
        turn.wait(0.2)
        return slow(*arguments)

    monkeypatch.setattr(server.thread.model, "next_logits", next_logits)

    async def several() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=address, timeout=30) as client:
            body = {"model": "tiny", "prompt": "x", "max_tokens": 900}
            first = asyncio.create_task(client.post("/v1/completions", json=body))
            while not (await client.get("/health")).json()["running"]:
                await asyncio.sleep(0.01)
            more = [client.post("/v1/completions", json=body) for _ in range(4)]
            return [*await asyncio.gather(*more), await first]

    with served(server) as address:
        *waiting, first = asyncio.run(several())
    codes = sorted(found.status_code for found in waiting)
    assert codes.count(429) == 2 and codes[-1] == 503  # a place for two; the last had no turn
    assert first.json()["choices"][0]["finish_reason"] == "length"
    assert 1 <= first.json()["usage"]["completion_tokens"] < 900


def test_a_failing_model_is_500_and_the_server_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    server = tiny_server()
    whole = server.thread.model.next_logits
    with served(server) as address:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 2}
        monkeypatch.setattr(server.thread.model, "next_logits", lambda *_: 1 / 0)
        failed = httpx.post(f"{address}/v1/completions", json=body)
        assert failed.status_code == 500 and "division" in failed.json()["error"]["message"]
        monkeypatch.setattr(server.thread.model, "next_logits", whole)
        assert httpx.post(f"{address}/v1/completions", json=body).status_code == 200


def load(address: str, name: str, requests: int, workers: int) -> list[str]:
    """The texts of so many requests, of different lengths, from so many connections at a time."""

    async def all_of_them() -> list[str]:
        limit = asyncio.Semaphore(workers)
        address_of_api = f"{address}/v1"

        async def one(client: openai.AsyncOpenAI, number: int) -> str:
            async with limit:
                found = await client.completions.create(
                    model=name, prompt="ab" * (1 + number % 40), max_tokens=4, temperature=0
                )
                return found.choices[0].text

        async with openai.AsyncOpenAI(
            base_url=address_of_api, api_key="none", max_retries=0
        ) as client:
            return await asyncio.gather(*(one(client, number) for number in range(requests)))

    return asyncio.run(all_of_them())


def test_no_request_is_lost_under_load() -> None:
    requests = int(os.environ.get("KERPLE_LOAD", "60"))
    with served(tiny_server(queue=64)) as address:
        texts = load(address, "tiny", requests, 32)
    answers = {number: expected("ab" * (1 + number), 4) for number in range(min(40, requests))}
    assert texts == [answers[number % 40] for number in range(requests)]


def test_the_command_serves_and_ends_at_sigterm(tmp_path: Path) -> None:
    write_run(tmp_path)
    command = [sys.executable, "-m", "megatron.commands", "serve", str(tmp_path / "run")]
    process = subprocess.Popen(
        [*command, "--port", "0", "--dtype", "int8"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = line.split()[1].removesuffix("/v1")
        assert line.startswith("run: http://127.0.0.1:")
        found: list[str] = []

        def ask() -> None:
            client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
            answer = client.completions.create(model="run", prompt="x", max_tokens=200)
            found.append(answer.choices[0].text)

        asking = threading.Thread(target=ask)
        asking.start()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if httpx.get(f"{address}/health").json()["running"]:
                break
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        asking.join(5)
        assert found and found[0]
    finally:
        process.kill()


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    assert run("serve", [str(tmp_path / "run"), "--queue", "0"]) == 2
    assert "--queue 0: must be above 0" in capsys.readouterr().err
    with _listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert run("serve", [str(tmp_path / "run"), "--port", port]) == 2
    assert f"--port {port}: Address already in use" in capsys.readouterr().err
