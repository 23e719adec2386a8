"""kerple serve RUN: OpenAI's /v1/completions over HTTP, for a laptop or one node.

For production export the model and run it in ONNX Runtime (convert_checkpoint --to onnx), or
serve a model that vLLM knows with vLLM: this server has one model, one batch at a time and no
authentication.

A request waits in a queue that is bounded: beyond it the answer is 429. Up to --batch prompts of
any lengths and parameters run together (see model_thread.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from megatron.errors import GenerationError
from megatron.generation.model_thread import (
    CompletionRequest,
    Job,
    Limits,
    ModelThread,
    RefusedError,
)
from megatron.generation.pretrained import (
    DTYPES,
    PretrainedModel,
    check_vocabulary,
    load_pretrained,
)
from megatron.mpu.job import pick_device
from megatron.terminal import require

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

LARGEST_BODY = 4_000_000  # bytes
LOOPBACK = ("127.0.0.1", "::1", "localhost")


# HTTP.


class CompletionServer:
    """The routes, over a model and its thread."""

    def __init__(self, model: Any, tokenizer: Any, name: str, limits: Limits) -> None:
        self.tokenizer, self.name, self.limits = tokenizer, name, limits
        self.thread = ModelThread(model, tokenizer, limits)
        self.vocabulary = min(tokenizer.vocab_size, model.spec.padded_vocab_size)
        self.created = int(time.time())

    def app(self, hosts: Sequence[str] = ("*",)) -> Starlette:
        """`hosts`: names that requests may use, against DNS rebinding."""
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.routing import Route

        @asynccontextmanager
        async def lifespan(_: Any) -> AsyncIterator[None]:
            self.thread.start()
            yield
            await asyncio.to_thread(self.thread.stop)

        routes = [
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.models),
            Route("/v1/completions", self.completions, methods=["POST"]),
        ]
        guard = Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))
        handlers: Any = {RefusedError: _refusal}
        return Starlette(
            routes=routes, lifespan=lifespan, middleware=[guard], exception_handlers=handlers
        )

    async def health(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        alive = self.thread.alive
        counts = {"waiting": self.thread.waiting, "running": self.thread.running}
        return JSONResponse(
            {"status": "ok" if alive else "stopped", **counts}, 200 if alive else 503
        )

    async def models(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        facts = {"id": self.name, "object": "model", "created": self.created, "owned_by": "kerple"}
        if asked := request.path_params.get("model"):
            self._check_name(asked)
            return JSONResponse(facts)
        return JSONResponse({"object": "list", "data": [facts]})

    async def completions(self, request: Request) -> Response:
        from starlette.responses import JSONResponse, StreamingResponse

        asked = await _body(request)
        jobs = self._jobs(asked)
        self.thread.add(jobs)
        head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.name,
        }
        if asked.stream:
            events = self._events(
                jobs, head, bool((asked.stream_options or {}).get("include_usage"))
            )
            return StreamingResponse(events, media_type="text/event-stream")
        try:
            choices = [await self._choice(index, job, request) for index, job in enumerate(jobs)]
        finally:
            for job in jobs:
                job.cancelled = True
        return JSONResponse({**head, "choices": choices, "usage": _usage(jobs)})

    async def _choice(self, index: int, job: Job, request: Request) -> dict[str, Any]:
        text, finish = "", None
        while finish is None:
            try:
                piece, finish = await asyncio.wait_for(job.pieces.get(), 1.0)
            except TimeoutError:
                if await request.is_disconnected():
                    raise RefusedError(499, "the client is gone") from None
                continue
            if finish in _FAILURES:
                raise RefusedError(_FAILURES[finish], piece)
            text += piece
        return _choice(index, text, finish)

    async def _events(
        self, jobs: Sequence[Job], head: dict[str, Any], usage: bool
    ) -> AsyncIterator[str]:
        """Server-sent events: pieces of all choices as they come."""
        merged: asyncio.Queue[tuple[int, str, str | None]] = asyncio.Queue()

        async def forward(index: int, job: Job) -> None:
            finish = None
            while finish is None:
                piece, finish = await job.pieces.get()
                merged.put_nowait((index, piece, finish))

        tasks = [asyncio.create_task(forward(*each)) for each in enumerate(jobs)]
        left = len(jobs)
        try:
            while left:
                index, piece, finish = await merged.get()
                left -= finish is not None
                if finish in _FAILURES:
                    yield _event({"error": _error(piece, "server_error")})
                else:
                    yield _event({**head, "choices": [_choice(index, piece, finish)]})
            if usage:
                yield _event({**head, "choices": [], "usage": _usage(jobs)})
            yield "data: [DONE]\n\n"
        finally:  # also when the client is gone
            for job, task in zip(jobs, tasks, strict=True):
                job.cancelled = True
                task.cancel()

    def _jobs(self, asked: CompletionRequest) -> list[Job]:
        self._check_name(asked.model)
        limits, count = self.limits, asked.max_tokens or 16
        if count > limits.max_tokens:
            raise RefusedError(
                400, f"max_tokens = {count}: at most {limits.max_tokens}", "max_tokens"
            )
        prompts: Any = asked.prompt
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        rows = [self._ids(prompt, count) for prompt in prompts]
        if not rows:
            raise RefusedError(400, "prompt: an empty list", "prompt")
        loop, deadline = asyncio.get_running_loop(), time.monotonic() + limits.seconds
        each = [ids for ids in rows for _ in range(asked.n or 1)]
        return [Job(ids, asked, count, i, deadline, loop) for i, ids in enumerate(each)]

    def _ids(self, prompt: str | list[int], new: int) -> list[int]:
        ids = self.tokenizer.tokenize(prompt) if isinstance(prompt, str) else prompt
        ids = list(ids) or [self.tokenizer.eod]
        if not all(0 <= token < self.vocabulary for token in ids):
            raise RefusedError(400, f"prompt: token ids are 0 to {self.vocabulary - 1}", "prompt")
        if len(ids) + new > self.limits.max_context:
            raise RefusedError(
                400,
                f"a prompt of {len(ids)} tokens and max_tokens = {new} are more than "
                f"{self.limits.max_context} tokens; shorten one of them",
                "prompt",
            )
        return ids

    def _check_name(self, name: str) -> None:
        if name != self.name:
            raise RefusedError(404, f"model {name[:80]!r}: this server has {self.name!r}", "model")


async def _body(request: Request) -> CompletionRequest:
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind != "application/json":  # which needs a CORS preflight from another site
        raise RefusedError(415, f"content-type {kind[:80]!r}: must be application/json")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST_BODY:
            raise RefusedError(413, f"a body of more than {LARGEST_BODY:,} bytes")
    try:
        return CompletionRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = str(first["loc"][0]) if first["loc"] else None
        unknown = first["type"] == "extra_forbidden"
        said = "is not supported by this server" if unknown else first["msg"]
        raise RefusedError(400, f"{param or 'body'}: {said}", param) from None


_FAILURES = {"error": 500, "unavailable": 503}


def _choice(index: int, text: str, finish: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


def _usage(jobs: Sequence[Job]) -> dict[str, int]:
    prompt, new = sum(len(job.ids) for job in jobs), sum(len(job.tokens) for job in jobs)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _error(message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    return {"message": message, "type": kind, "param": param, "code": None}


async def _refusal(request: Request, error: RefusedError) -> Response:
    from starlette.responses import JSONResponse

    kind = "invalid_request_error" if error.status < 500 else "server_error"
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    content = {"error": _error(error.message, kind, error.param)}
    return JSONResponse(content, error.status, headers=headers)


# The command.


def serve(options: argparse.Namespace) -> int:
    """`options`: those of `kerple serve`, see megatron.commands.model_scripts."""
    for package in ("starlette", "uvicorn"):
        require(package, "kerple serve")
    model = load_pretrained(
        options.run,
        device=str(pick_device()),
        dtype=DTYPES[options.dtype],
        iteration=options.iteration,
    )
    server = CompletionServer(model, _tokenizer_of(model), *_name_and_limits(options, model))
    listening = _listen(options.host, options.port)
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"{server.name}: http://{shown}:{port}/v1 (Ctrl-C or SIGTERM ends it)", flush=True)
    if options.host not in LOOPBACK:
        print("warning: every machine that reaches this port may use it: no authentication")
    _run(server, listening, options.host in LOOPBACK)
    return 0


def _run(server: CompletionServer, listening: socket.socket, only_here: bool) -> None:
    import uvicorn

    hosts = ["localhost", "127.0.0.1", "[::1]", "::1"] if only_here else ["*"]
    config = uvicorn.Config(
        server.app(hosts),
        log_level="warning",
        timeout_graceful_shutdown=int(server.limits.seconds) + 5,
    )
    # uvicorn drains on SIGTERM, and sends the signal again when it is done: that one is not needed
    signal.signal(signal.SIGTERM, lambda *_: None)
    uvicorn.Server(config).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise GenerationError(f"--host {host} --port {port}: {reason}; choose another") from error


def _tokenizer_of(model: PretrainedModel) -> Any:
    if model.tokenizer is None:
        raise GenerationError(f"{model.source}: no tokenizer, without which no text can be served")
    check_vocabulary(model.tokenizer, model.spec.padded_vocab_size)
    return model.tokenizer


def _name_and_limits(options: argparse.Namespace, model: PretrainedModel) -> tuple[str, Limits]:
    for name in ("queue", "batch", "max_tokens", "max_context", "seconds"):
        if getattr(options, name) <= 0:
            flag = f"--{name.replace('_', '-')}"
            raise GenerationError(f"{flag} {getattr(options, name)}: must be above 0")
    context = options.max_context
    if model.spec.pos_emb == "learned":
        context = min(context, model.spec.max_position_embeddings)
    limits = Limits(options.queue, options.batch, options.max_tokens, context, options.seconds)
    return options.name or Path(options.run).resolve().name, limits
