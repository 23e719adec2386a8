"""GPT-NeoX's generation modes: unconditional, from a file, and interactive.

The text is printed as it is sampled. The file gets one JSON object a line with GPT-NeoX's keys:
context, text, length, finished, message, duration_seconds (and logits, with return_logits).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from tqdm import tqdm

from megatron.atomic_files import atomic_writer, check_writable
from megatron.errors import GenerationError, KerpleError
from megatron.generation.decoding import Completion, Sampling, complete
from megatron.generation.pretrained import SelectedCheckpoint
from megatron.mpu.job import Ranks, join_evaluation
from megatron.terminal import EXIT_USER_ERROR, print_error

if TYPE_CHECKING:
    from megatron.generation.onnx_model import OnnxModel
    from megatron.model import GPTModel
    from megatron.neox_arguments import NeoXArgs
    from megatron.neox_arguments.run_keys import GenerationArgs
    from megatron.tokenizer import Tokenizer

BATCH_TOKENS = 16_384
BATCH_ROWS = 64
STREAMED = 8  # up to this many samples are printed as they are sampled; more run in batches
Record = dict[str, Any]
Answer = TypeVar("Answer")


def in_batches_by_length(
    function: Callable[[Sequence[int]], list[Answer]],
    lengths: Sequence[int],
    *,
    ranks: Ranks,
    batch_tokens: int,
    batch_rows: int,
    label: str,
    quiet: bool,
) -> list[Answer]:
    """`function` on numbers of items of similar length; the answers in the order of `lengths`.

    Long items come first, so that memory runs out early. Processes share the items.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])

    def share(numbers: Sequence[int]) -> list[Answer]:
        answers: list[Answer] = []
        hidden = quiet or not ranks.is_main or not sys.stderr.isatty()
        with tqdm(total=len(numbers), desc=label, disable=hidden) as bar:
            while rest := numbers[len(answers) :]:  # its first is the longest
                rows = min(batch_rows, max(1, batch_tokens // lengths[rest[0]]))
                answers += function(rest[:rows])
                bar.update(len(rest[:rows]))
        return answers

    answers = dict(zip(order, ranks.map(share, order), strict=True))
    return [answers[number] for number in range(len(lengths))]


def cut_at(stop_strings: Sequence[str], text: str) -> str:
    """The text before the first of the stop strings."""
    for stop in stop_strings:
        text = text.split(stop)[0]
    return text


@dataclass(frozen=True)
class TextGenerator:
    """Generates text for prompts, as records."""

    model: GPTModel | OnnxModel
    tokenizer: Tokenizer
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 64
    stop_strings: tuple[str, ...] = ()
    use_cache: bool = True
    return_logits: bool = False
    seed: int = 1234
    ranks: Ranks = field(default_factory=Ranks)

    @classmethod
    def of(
        cls,
        options: GenerationArgs,
        model: GPTModel | OnnxModel,
        tokenizer: Tokenizer,
        seed: int,
        ranks: Ranks,
    ) -> TextGenerator:
        """A generator with the values of a config's generation keys."""
        return cls(
            model,
            tokenizer,
            Sampling(options.temperature, options.top_k, options.top_p),
            options.maximum_tokens,
            tuple(options.stop_strings or ()),
            use_cache=not options.recompute,
            return_logits=options.return_logits,
            seed=seed,
            ranks=ranks,
        )

    def samples(self, prompts: Sequence[str], quiet: bool = False) -> list[Record]:
        """A record for each prompt, in order; an empty prompt starts from the end of a document.

        Prompts of similar length run together, and processes share the batches. Sample i does not
        depend on either: it has random numbers of its own.
        """
        ids = self._ids(prompts)
        return in_batches_by_length(
            partial(self.run, prompts, ids),
            [len(row) + self.max_new_tokens for row in ids],
            ranks=self.ranks,
            batch_tokens=BATCH_TOKENS,
            batch_rows=BATCH_ROWS,
            label="generating",
            quiet=quiet,
        )

    def stream(self, prompts: Sequence[str], say: Callable[[str], None]) -> Iterator[Record]:
        """The same records one after another, each text printed while it is sampled.

        Ctrl-C ends the current text: its record notes it, then the interrupt is raised.
        """
        ids = self._ids(prompts)
        for number, prompt in enumerate(prompts):
            if len(prompts) > 1:
                say(f"--- {number + 1} of {len(prompts)}\n")
            say(prompt)
            shown = TextStream(self.tokenizer.detokenize, say, self.stop_strings)
            try:
                (record,) = self.run(prompts, ids, [number], shown.show)
            except KeyboardInterrupt:
                begun = self._record(prompt, Completion(shown.tokens), 0.0)
                say("\n")
                yield {**begun, "message": "interrupted"}
                raise
            shown.end(record["text"])
            say("\n")
            yield record

    def _ids(self, prompts: Sequence[str]) -> list[list[int]]:
        return [self.tokenizer.tokenize(prompt) or [self.tokenizer.eod] for prompt in prompts]

    def run(
        self,
        prompts: Sequence[str],
        ids: Sequence[Sequence[int]],
        numbers: Sequence[int],
        show: Callable[[list[int]], None] | None = None,
    ) -> list[Record]:
        """The records of the prompts with these numbers, in one batch; `ids` are all prompts'."""
        start = time.perf_counter()

        def should_stop(tokens: list[int]) -> bool:
            if show is not None:
                show(tokens)
            if not self.stop_strings:
                return False
            text = self.tokenizer.detokenize(tokens)
            return any(stop in text for stop in self.stop_strings)

        completions = complete(
            self.model,
            [ids[number] for number in numbers],
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            stop_ids=(self.tokenizer.eod,),
            should_stop=should_stop,
            seed=self.seed,
            streams=numbers,
            use_cache=self.use_cache,
            vocab_size=self.tokenizer.vocab_size,
            keep_logits=self.return_logits,
        )
        seconds = round(time.perf_counter() - start, 3)
        return [
            self._record(prompts[number], completion, seconds)
            for number, completion in zip(numbers, completions, strict=True)
        ]

    def _record(self, prompt: str, completion: Completion, seconds: float) -> Record:
        record: Record = {
            "context": prompt,
            "text": cut_at(self.stop_strings, self.tokenizer.detokenize(completion.tokens)),
            "length": len(completion.tokens),
            "finished": completion.stopped,
            "message": None,
            "duration_seconds": seconds,
        }
        if self.return_logits:
            record["logits"] = [logits.tolist() for logits in completion.logits]
        return record


# Text on the screen as it is sampled.

UNFINISHED = "\ufffd"  # what a decoder shows for bytes that are not a whole character yet


class TextStream:
    """Turns a growing list of tokens into pieces of text, each printed once.

    A character may take several tokens, and no part of a stop string may be printed: text that may
    still change is held back until `end`.
    """

    def __init__(
        self,
        detokenize: Callable[[list[int]], str],
        say: Callable[[str], None],
        stop_strings: Sequence[str] = (),
    ) -> None:
        self._detokenize, self._write = detokenize, say
        self._stop_strings = stop_strings
        self._held_back = max((len(stop) for stop in stop_strings), default=1) - 1
        self._written = 0
        self.tokens: list[int] = []

    def show(self, tokens: list[int]) -> None:
        """All tokens so far."""
        self.tokens = list(tokens)
        text = cut_at(self._stop_strings, self._detokenize(self.tokens))
        safe = len(text.rstrip(UNFINISHED)) - self._held_back
        if safe > self._written:
            self._write(text[self._written : safe])
            self._written = safe

    def end(self, text: str) -> None:
        """The final text, of which a beginning was shown."""
        self._write(text[self._written :])


def read_prompts(path: str | Path) -> list[str]:
    """One prompt a line; empty lines are left out."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise GenerationError(f"sample_input_file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise GenerationError(f"sample_input_file {path}: not UTF-8 text ({error})") from error
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise GenerationError(f"sample_input_file {path}: holds no prompts, one a line")
    return prompts


def interactive(
    generator: TextGenerator,
    source: IO[str],
    say: Callable[[str], None],
    *,
    prompt_end: str,
    samples: int,
) -> None:
    """Answer prompts from `source` until it ends; `prompt_end` ends each of them."""

    def answer(prompt: str) -> None:
        if prompt.strip():
            for _ in generator.stream([prompt] * samples, say):
                pass

    end = prompt_end or "\n"
    buffer = ""
    say("prompt> ")
    for line in source:
        buffer += line
        while end in buffer:
            prompt, _, buffer = buffer.partition(end)
            answer(prompt)
            say("prompt> ")
    answer(buffer.rstrip("\n"))


# generate.py: from a config to samples.


def run_generation(args: NeoXArgs, local_rank: int | None = None) -> int:
    """Generate; returns the exit code."""
    minutes = args.runtime.distributed_timeout_minutes
    ranks, device = join_evaluation(args.launcher, minutes, local_rank)
    options = args.generation
    try:
        if ranks.is_main and options.text_gen_type != "interactive":
            check_writable(Path(options.sample_output_file), "sample_output_file (-o)")
        selected = SelectedCheckpoint(args, device)
        generator = TextGenerator.of(
            options, selected.model, selected.tokenizer, args.runtime.seed, ranks
        )
        _generate(options, generator)
    except KerpleError as error:
        return print_error(error) if ranks.is_main else EXIT_USER_ERROR
    return 0


def run_onnx(path: Path, options: GenerationArgs, seed: int) -> int:
    """Generate with an ONNX file and the tokenizer.json beside it; returns the exit code."""
    from megatron.checkpoints.hf.companions import tokenizer_settings
    from megatron.generation.onnx_model import OnnxModel
    from megatron.tokenizer import build_tokenizer

    model = OnnxModel(path)
    settings = tokenizer_settings(path.parent)
    if not settings:
        raise GenerationError(f"--onnx {path}: no tokenizer.json beside it")
    tokenizer = build_tokenizer(**settings)
    _generate(options, TextGenerator.of(options, model, tokenizer, seed, Ranks()))
    return 0


def _generate(options: GenerationArgs, generator: TextGenerator) -> None:
    ranks = generator.ranks
    mode = options.text_gen_type or ("input-file" if options.sample_input_file else "unconditional")
    if mode == "interactive":
        if ranks.size > 1:
            raise GenerationError(
                "text_gen_type: interactive needs a keyboard: start generate.py in one process"
            )
        interactive(
            generator, sys.stdin, _print, prompt_end=options.prompt_end, samples=options.num_samples
        )
        return
    if mode == "input-file":
        if options.sample_input_file is None:
            raise GenerationError("text_gen_type: input-file needs sample_input_file (or -i FILE)")
        prompts = read_prompts(options.sample_input_file)
    else:
        prompts = [""]
    if ranks.is_main and Path(options.sample_output_file).is_file():
        there = f"{options.sample_output_file}: exists and will be replaced"
        print(f"{there}; -o FILE keeps it", file=sys.stderr)
    asked = [prompt for prompt in prompts for _ in range(options.num_samples)]
    records: list[Record] = []
    try:
        if ranks.size == 1 and len(asked) <= STREAMED:
            for record in generator.stream(asked, _print):
                records.append(record)
        else:
            records = generator.samples(asked)
            for number, record in enumerate(records if ranks.is_main else ()):
                _print(f"--- {number + 1} of {len(records)}\n{record['context']}{record['text']}\n")
    finally:  # finished samples are written even after an error or Ctrl-C
        if records and ranks.is_main:
            _write(Path(options.sample_output_file), records)


def _write(path: Path, records: Sequence[Record]) -> None:
    """One JSON object a line; the file appears only when complete."""
    with atomic_writer(path) as handle:
        for record in records:
            handle.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
    print(f"{len(records)} sample{'s' * (len(records) != 1)}: {path}", file=sys.stderr)


def _print(text: str) -> None:
    print(text, end="", flush=True)
