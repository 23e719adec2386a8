"""A model for lm-eval (0.4.13): `--model kerple_neox --model_args pretrained=PATH`.

Requests are sorted by length and run in batches of a number of tokens rather than of rows. A
context that several continuations share is read once. With several processes each computes a share
and all get every answer, so lm-eval itself sees a single process and the scores do not depend on
how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron.errors import EvaluationError
from megatron.evaluation.losses import score_continuations
from megatron.evaluation.tasks import DEFAULT_BATCH_TOKENS
from megatron.generation import Sampling
from megatron.generation.pretrained import check_vocabulary, load_pretrained
from megatron.generation.text import TextGenerator, in_batches_by_length
from megatron.mpu.job import Ranks, pick_device

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from megatron.model import GPTModel
    from megatron.tokenizer import Tokenizer

DEFAULT_NEW_TOKENS = 256
Pair = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("kerple_neox")
class KerpleNeoXLM(TemplateLM):
    """Any checkpoint that `kerple.load_pretrained` reads."""

    def __init__(
        self,
        pretrained: str | GPTModel,
        *,
        tokenizer: Tokenizer | None = None,
        max_length: int | None = None,
        iteration: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        batch_tokens: int = DEFAULT_BATCH_TOKENS,
        device: str | None = None,
        ranks: Ranks | None = None,
        seed: int = 1234,
    ) -> None:
        """`max_length` is the context in tokens, the training length by default.

        Any length that the positional embedding supports. `batch_size` (rows) is a limit beside
        `batch_tokens`; "auto" and 1, lm-eval's default, leave the choice to `batch_tokens`.
        """
        super().__init__()
        self.model = self._loaded(pretrained, device, iteration)
        found = tokenizer or getattr(self.model, "tokenizer", None)
        if found is None:
            raise EvaluationError(
                "lm-eval needs a tokenizer: set tokenizer_type, vocab_file and merge_file in the "
                "checkpoint's config, or put its files beside the checkpoint"
            )
        self.model_tokenizer: Tokenizer = found
        check_vocabulary(found, self.model.spec.padded_vocab_size)
        self.max_length = int(max_length or self.model.spec.seq_length)
        rows = str(batch_size or max_batch_size or "auto")
        self._in_batches = partial(
            in_batches_by_length,
            ranks=ranks or Ranks.current(),
            batch_tokens=int(batch_tokens),
            # A row has at least one token: as many rows as tokens are no limit.
            batch_rows=int(rows) if rows.isdigit() and int(rows) > 1 else int(batch_tokens),
        )
        self.seed = seed
        self._device = self.model.device

    @staticmethod
    def _loaded(pretrained: str | GPTModel, device: str | None, iteration: int | None) -> GPTModel:
        if not isinstance(pretrained, str):
            return pretrained
        # lm-eval's own default is cuda:0 on every machine, so only an explicit choice that exists
        # here is taken.
        here = str(pick_device())
        chosen = device if device and not (device.startswith("cuda") and here == "cpu") else here
        return load_pretrained(pretrained, device=chosen, iteration=iteration)

    @property
    def eot_token_id(self) -> int:
        return self.model_tokenizer.eod

    @property
    def tokenizer_name(self) -> str:
        return self.model_tokenizer.name

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids; our tokenizers never add special ones."""
        return self.model_tokenizer.tokenize(string)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of whole texts, in windows of the context length."""
        texts = [cast(str, request.args[0]) for request in requests]
        windows: list[list[Pair]] = []
        for text in texts:
            found = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows.append([(None, *make_disjoint_window(window)) for window in found])
        pairs = [pair for own in windows for pair in own]
        scores = iter(self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm))
        totals = [sum(score for score, _ in islice(scores, len(own))) for own in windows]
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """(log-probability, is it what greedy decoding gives) of each continuation."""
        pairs = [self._fitted(context, continuation) for _, context, continuation in requests]

        alike: dict[tuple[int, ...], list[int]] = {}  # the choices of a question share its text
        for number, (context, _) in enumerate(pairs):
            alike.setdefault(tuple(context), []).append(number)
        groups = list(alike.values())

        def answer(places: Sequence[int]) -> list[list[tuple[float, bool]]]:
            numbers = [number for place in places for number in groups[place]]
            scores = score_continuations(self.model, [pairs[number] for number in numbers])
            found = {
                number: (float(score.log_probs.double().sum()), bool(score.greedy.all()))
                for number, score in zip(numbers, scores, strict=True)
            }
            for number, answer in found.items():
                if (texts := requests[number][0]) is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, answer)
            return [[found[number] for number in groups[place]] for place in places]

        lengths = [
            sum(len(context) + len(continuation) - 1 for context, continuation in own)
            for own in ([pairs[number] for number in group] for group in groups)
        ]
        by_group = self._in_batches(answer, lengths, label="loglikelihood", quiet=disable_tqdm)
        answers = {
            number: found
            for group, own in zip(groups, by_group, strict=True)
            for number, found in zip(group, own, strict=True)
        }
        return [answers[number] for number in range(len(pairs))]

    def _fitted(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """The pair with its context cut at the left so that the input fits."""
        if not continuation:
            raise EvaluationError("an empty continuation cannot be scored")
        allowed = self.max_length + 1 - len(continuation)
        if allowed < 1:
            raise EvaluationError(
                f"a continuation of {len(continuation)} tokens does not fit into a context of "
                f"{self.max_length}; raise eval_context_length (max_length)"
            )
        return context[-allowed:] or [self.prefix_token_id], continuation

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts up to a stop string, an end of document, or the most tokens allowed."""
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        answers: dict[int, str] = {}
        for numbers in alike.values():
            texts = self._generate_alike([requests[i].args for i in numbers], disable_tqdm)
            answers |= zip(numbers, texts, strict=True)
        return [answers[number] for number in range(len(requests))]

    def _generate_alike(self, requests: list[Any], quiet: bool) -> list[str]:
        """Answers to requests that all have the same generation options."""
        options: Any = normalize_gen_kwargs(requests[0][1], DEFAULT_NEW_TOKENS)
        new_tokens, sampled = options["max_gen_toks"], options["do_sample"]
        allowed = self.max_length - new_tokens
        if allowed < 1:
            raise EvaluationError(
                f"max_gen_toks = {new_tokens} leaves no tokens for a prompt in a context of "
                f"{self.max_length}; raise eval_context_length (max_length)"
            )
        prompts = [text for text, _ in requests]
        ids = [(self.tok_encode(text) or [self.eot_token_id])[-allowed:] for text in prompts]
        generator = TextGenerator(
            self.model,
            self.model_tokenizer,
            Sampling(
                options["temperature"] if sampled else 0.0,
                int(options.get("top_k", 0)),
                float(options.get("top_p", 0.0)),
            ),
            max_new_tokens=new_tokens,
            stop_strings=tuple(stop for stop in options["until"] if stop),
            seed=self.seed,
        )

        def answer(numbers: Sequence[int]) -> list[str]:
            texts = [record["text"] for record in generator.run(prompts, ids, numbers)]
            if not sampled:
                for number, text in zip(numbers, texts, strict=True):
                    self.cache_hook.add_partial("generate_until", requests[number], text)
            return texts

        lengths = [len(row) + new_tokens for row in ids]
        return self._in_batches(answer, lengths, label="generate_until", quiet=quiet)
