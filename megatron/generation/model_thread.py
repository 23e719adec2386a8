"""Jobs of an HTTP server: a bounded queue, and one thread that runs the model in batches.

A job is one prompt. It waits in the queue, beyond which requests are refused. The thread takes up
to `batch` waiting jobs of any lengths and parameters together, and the next ones when these have
ended; the pieces of text go back to the event loop of the request.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from megatron.generation.decoding import Sampling, decode, random_stream
from megatron.generation.text import TextStream, cut_at


@dataclass(frozen=True)
class Limits:
    """What one server takes on."""

    queue: int
    """Prompts that wait; a request beyond it gets 429."""
    batch: int
    max_tokens: int
    max_context: int
    seconds: float


class RefusedError(Exception):
    """An answer other than 200, with OpenAI's kind of body."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param


class CompletionRequest(BaseModel):
    """The body of /v1/completions; what is not here is refused by name."""

    model_config = ConfigDict(extra="forbid")
    model: str
    prompt: str | list[str] | list[int] | list[list[int]] = ""
    max_tokens: int | None = Field(16, ge=1)
    temperature: float | None = Field(1.0, ge=0, le=2)
    top_p: float | None = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    n: int | None = Field(1, ge=1, le=64)
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=0, le=2**40)
    stream: bool | None = False
    stream_options: dict[str, bool] | None = None
    user: str | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    logprobs: None = None
    suffix: None = None
    logit_bias: None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in given if stop)


@dataclass(eq=False)
class Job:
    """One prompt: what is asked, and the pieces of text that the model's thread sends back."""

    ids: list[int]
    request: CompletionRequest
    max_tokens: int
    number: int
    deadline: float
    loop: asyncio.AbstractEventLoop
    pieces: asyncio.Queue[tuple[str, str | None]] = field(default_factory=asyncio.Queue)
    tokens: list[int] = field(default_factory=list)
    cancelled: bool = False

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def send(self, text: str, finish: str | None = None) -> None:
        """From the model's thread; `finish` is the reason for the end, with the last piece."""
        with suppress(RuntimeError):  # the server is gone
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, (text, finish))


class ModelThread:
    """Runs waiting jobs in batches, on a thread of its own."""

    def __init__(self, model: Any, tokenizer: Any, limits: Limits) -> None:
        self.model, self.tokenizer, self.limits = model, tokenizer, limits
        self.running = 0
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the running batch."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join(timeout=self.limits.seconds)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopped

    def add(self, jobs: Sequence[Job]) -> None:
        """Queue them all, or none."""
        with self._changed:
            if not self.alive:
                raise RefusedError(503, "the server is shutting down")
            if len(jobs) > self.limits.queue:
                raise RefusedError(
                    400, f"{len(jobs)} prompts: at most {self.limits.queue}", "prompt"
                )
            if len(self._waiting) + len(jobs) > self.limits.queue:
                raise RefusedError(429, f"{self.waiting} prompts are waiting; try again later")
            self._waiting.extend(jobs)
            self._changed.notify()

    def _work(self) -> None:
        while (jobs := self._take()) is not None:
            self.running = len(jobs)
            try:
                self._run(jobs)
            except Exception as error:  # of the model: these requests fail, the server continues
                for job in jobs:
                    job.send(f"{type(error).__name__}: {error}", "error")
            self.running = 0

    def _take(self) -> list[Job] | None:
        with self._changed:
            while not self._waiting and not self._stopped:
                self._changed.wait()
            if self._stopped:
                for job in self._waiting:
                    job.send("the server is shutting down", "unavailable")
                return None
            count = min(self.limits.batch, len(self._waiting))
            taken = [self._waiting.popleft() for _ in range(count)]
        for job in taken:
            if job.late:
                job.send(f"waited in the queue for {self.limits.seconds:g} s", "unavailable")
        return [job for job in taken if not (job.late or job.cancelled)]

    @torch.inference_mode()
    def _run(self, jobs: list[Job]) -> None:
        rows = [_Row(job, self) for job in jobs]
        decode(self.model, [job.ids for job in jobs], lambda i, logits: rows[i].next_token(logits))


class _Row:
    """A job in a batch: draws its tokens and sends its text."""

    def __init__(self, job: Job, thread: ModelThread) -> None:
        request = job.request
        self.job, self.tokenizer = job, thread.tokenizer
        top_p = request.top_p if request.top_p not in (None, 1.0) else 0.0
        temperature = 1.0 if request.temperature is None else request.temperature
        self.sampling = Sampling(temperature, request.top_k, top_p or 0.0)
        self.generator = random_stream(request.seed, job.number, thread.model.device)
        self.stream = TextStream(self.tokenizer.detokenize, job.send, request.stops)

    def next_token(self, logits: torch.Tensor) -> int | None:
        """Take the next token; None if it is the last."""
        if self.job.cancelled:
            return None
        token = self.sampling.choose(logits[: self.tokenizer.vocab_size], self.generator)
        if (reason := self._taken(token)) is None:
            return token
        self.stream.end(cut_at(self.job.request.stops, self._text()))
        self.job.send("", reason)
        return None

    def _taken(self, token: int) -> str | None:
        """Why the text ends with this token, if it does."""
        job = self.job
        if token == self.tokenizer.eod:
            return "stop"
        job.tokens.append(token)
        self.stream.show(job.tokens)
        if job.request.stops and any(stop in self._text() for stop in job.request.stops):
            return "stop"
        return "length" if len(job.tokens) >= job.max_tokens or job.late else None

    def _text(self) -> str:
        return str(self.tokenizer.detokenize(self.job.tokens))
