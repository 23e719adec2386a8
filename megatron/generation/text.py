"""GPT-NeoX's ways of asking for text: unconditional, from a file, and interactive.

The text appears on the screen as it is sampled. The file gets one JSON object a line with
GPT-NeoX's keys: context, text, length, finished, message, duration_seconds (and logits, if asked).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tqdm import tqdm

from megatron.atomic_files import atomic_writer, check_writable
from megatron.errors import GenerationError, KerpleError
from megatron.generation.decoding import Completion, Sampling, complete
from megatron.generation.pretrained import find_subject
from megatron.mpu.job import Ranks, join_ranks
from megatron.terminal import EXIT_USER_ERROR, print_error

if TYPE_CHECKING:
    from megatron.model import GPTModel
    from megatron.neox_arguments import NeoXArgs
    from megatron.tokenizer import Tokenizer

BATCH_TOKENS = 16_384
BATCH_ROWS = 64
STREAMED = 8  # more samples than anybody reads as they come are faster in batches
Record = dict[str, Any]


@dataclass(frozen=True)
class TextGenerator:
    """Texts in, records out."""

    model: GPTModel
    tokenizer: Tokenizer
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 64
    stop_strings: tuple[str, ...] = ()
    use_cache: bool = True
    return_logits: bool = False
    seed: int = 1234
    ranks: Ranks = field(default_factory=Ranks)

    def samples(self, prompts: Sequence[str], quiet: bool = False) -> list[Record]:
        """A record for each prompt, in order; an empty prompt starts from the end of a document.

        Prompts of similar length run together, and processes share the batches. Sample i does not
        depend on either: it has random numbers of its own.
        """
        ids = [self.tokenizer.tokenize(prompt) or [self.tokenizer.eod] for prompt in prompts]
        batches = list(self._batches(ids))

        def share(groups: Sequence[list[int]]) -> list[list[Record]]:
            hidden = quiet or not self.ranks.is_main
            found = []
            bar = tqdm(
                total=sum(map(len, groups)),
                desc="generating",
                disable=hidden or not sys.stderr.isatty(),
            )
            with bar:
                for group in groups:
                    found.append(self._run(group, prompts, ids))
                    bar.update(len(group))
            return found

        records: list[Record] = [{}] * len(ids)
        for group, found in zip(batches, self.ranks.map(share, batches), strict=True):
            for number, record in zip(group, found, strict=True):
                records[number] = record
        return records

    def stream(self, prompts: Sequence[str], say: Callable[[str], None]) -> Iterator[Record]:
        """The same records one after another, each text said while it is sampled.

        Ctrl-C ends the text at hand: its record says so, and then the interrupt goes on.
        """
        ids = [self.tokenizer.tokenize(prompt) or [self.tokenizer.eod] for prompt in prompts]
        for number, prompt in enumerate(prompts):
            if len(prompts) > 1:
                say(f"--- {number + 1} of {len(prompts)}\n")
            say(prompt)
            shown = TextStream(self.tokenizer.detokenize, say, self.stop_strings)
            try:
                (record,) = self._run([number], prompts, ids, shown.show)
            except KeyboardInterrupt:
                partial = self._record(prompt, Completion(shown.tokens), 0.0)
                say("\n")
                yield {**partial, "message": "interrupted"}
                raise
            shown.end(record["text"])
            say("\n")
            yield record

    def _batches(self, ids: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        batch: list[int] = []
        for number in sorted(range(len(ids)), key=lambda number: len(ids[number])):
            tokens = (len(batch) + 1) * (len(ids[number]) + self.max_new_tokens)
            if batch and (tokens > BATCH_TOKENS or len(batch) == BATCH_ROWS):
                yield batch
                batch = []
            batch.append(number)
        if batch:
            yield batch

    def _run(
        self,
        group: list[int],
        prompts: Sequence[str],
        ids: Sequence[Sequence[int]],
        show: Callable[[list[int]], None] | None = None,
    ) -> list[Record]:
        start = time.perf_counter()

        def should_stop(tokens: list[int]) -> bool:
            if show is not None:
                show(tokens)
            return bool(self.stop_strings) and self._meets_stop_string(tokens)

        completions = complete(
            self.model,
            [ids[number] for number in group],
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            stop_ids=(self.tokenizer.eod,),
            should_stop=should_stop,
            seed=self.seed,
            streams=group,
            use_cache=self.use_cache,
            vocab_size=self.tokenizer.vocab_size,
            keep_logits=self.return_logits,
        )
        seconds = round(time.perf_counter() - start, 3)
        return [
            self._record(prompts[number], completion, seconds)
            for number, completion in zip(group, completions, strict=True)
        ]

    def _meets_stop_string(self, tokens: list[int]) -> bool:
        text = self.tokenizer.detokenize(tokens)
        return any(stop in text for stop in self.stop_strings)

    def _record(self, prompt: str, completion: Completion, seconds: float) -> Record:
        text = self.tokenizer.detokenize(completion.tokens)
        for stop in self.stop_strings:
            text = text.split(stop)[0]
        record: Record = {
            "context": prompt,
            "text": text,
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
    """Turns a growing list of tokens into pieces of text, each said once.

    A character may be spread over several tokens, and a stop string must not be half shown before
    it is cut off: what may still change is held back until `end`.
    """

    def __init__(
        self,
        detokenize: Callable[[list[int]], str],
        say: Callable[[str], None],
        stop_strings: Sequence[str] = (),
    ) -> None:
        self._detokenize, self._say = detokenize, say
        self._stop_strings = stop_strings
        self._held_back = max((len(stop) for stop in stop_strings), default=1) - 1
        self._said = 0
        self.tokens: list[int] = []

    def show(self, tokens: list[int]) -> None:
        """All tokens so far."""
        self.tokens = list(tokens)
        text = self._detokenize(self.tokens)
        for stop in self._stop_strings:
            text = text.split(stop)[0]
        safe = len(text.rstrip(UNFINISHED)) - self._held_back
        if safe > self._said:
            self._say(text[self._said : safe])
            self._said = safe

    def end(self, text: str) -> None:
        """The final text, of which a beginning was shown."""
        self._say(text[self._said :])
        self._said = len(text)


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


def write_samples(path: str | Path, records: Sequence[Record]) -> None:
    """One JSON object a line; the file appears only when complete."""
    with atomic_writer(Path(path)) as handle:
        for record in records:
            handle.write((json.dumps(record, ensure_ascii=False) + "\n").encode())


def interactive(
    generator: TextGenerator,
    source: IO[str],
    say: Callable[[str], None],
    *,
    prompt_end: str = "\n",
    num_samples: int = 1,
) -> None:
    """Answer prompts from `source` until it ends; `prompt_end` ends each of them."""
    for prompt in _read_until(source, prompt_end, say):
        for _ in generator.stream([prompt] * num_samples, say):
            pass


def _read_until(source: IO[str], prompt_end: str, say: Callable[[str], None]) -> Iterator[str]:
    end = prompt_end or "\n"
    buffer = ""
    say("prompt> ")
    for line in source:
        buffer += line
        while end in buffer:
            prompt, _, buffer = buffer.partition(end)
            if prompt.strip():
                yield prompt
            say("prompt> ")
    if buffer.strip():
        yield buffer.rstrip("\n")


# generate.py: from a config to samples.


def run_generation(args: NeoXArgs, local_rank: int | None = None) -> int:
    """Generate as the config says; returns the exit code."""
    ranks, device = join_ranks(args, local_rank)
    try:
        if ranks.is_main and args.generation.text_gen_type != "interactive":
            check_writable(Path(args.generation.sample_output_file), "sample_output_file (-o)")
        _generate(args, build_generator(args, ranks, device), ranks)
    except KerpleError as error:
        return print_error(error) if ranks.is_main else EXIT_USER_ERROR
    return 0


def build_generator(args: NeoXArgs, ranks: Ranks, device: str) -> TextGenerator:
    """The checkpoint's model and tokenizer with the config's sampling."""
    subject = find_subject(args, device)
    options = args.generation
    return TextGenerator(
        model=subject.model,
        tokenizer=subject.tokenizer(),
        sampling=Sampling(options.temperature, options.top_k, options.top_p),
        max_new_tokens=options.maximum_tokens,
        stop_strings=tuple(options.stop_strings or ()),
        use_cache=not options.recompute,
        return_logits=options.return_logits,
        seed=args.runtime.seed,
        ranks=ranks,
    )


def _generate(args: NeoXArgs, generator: TextGenerator, ranks: Ranks) -> None:
    options = args.generation
    mode = options.text_gen_type or ("input-file" if options.sample_input_file else "unconditional")
    if mode == "interactive":
        if ranks.size > 1:
            raise GenerationError(
                "text_gen_type: interactive needs a keyboard: start generate.py in one process"
            )
        interactive(
            generator,
            sys.stdin,
            _say,
            prompt_end=options.prompt_end,
            num_samples=options.num_samples,
        )
        return
    if mode == "input-file":
        if options.sample_input_file is None:
            raise GenerationError("text_gen_type: input-file needs sample_input_file (or -i FILE)")
        prompts = read_prompts(options.sample_input_file)
    else:
        prompts = [""]
    asked = [prompt for prompt in prompts for _ in range(options.num_samples)]
    if ranks.size == 1 and len(asked) <= STREAMED:
        _stream_to_screen_and_file(generator, asked, options.sample_output_file)
        return
    records = generator.samples(asked)
    if ranks.is_main:
        for number, record in enumerate(records):
            _say(f"--- {number + 1} of {len(records)}\n{record['context']}{record['text']}\n")
        write_samples(options.sample_output_file, records)
        _say_where(records, options.sample_output_file)


def _stream_to_screen_and_file(generator: TextGenerator, prompts: list[str], path: str) -> None:
    """What was sampled is kept, whatever ends it."""
    records: list[Record] = []
    try:
        for record in generator.stream(prompts, _say):
            records.append(record)
    finally:
        if records:
            write_samples(path, records)
            _say_where(records, path)


def _say(text: str) -> None:
    print(text, end="", flush=True)


def _say_where(records: Sequence[Record], path: str) -> None:
    print(f"{len(records)} sample{'s' * (len(records) != 1)}: {path}", file=sys.stderr)
