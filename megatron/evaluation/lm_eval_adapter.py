"""A model for lm-eval (0.4.13): `--model kerple_neox --model_args pretrained=PATH`.

Requests are sorted by length and run in batches of a number of tokens rather than of rows. With
several processes each computes a share and all get every answer, so lm-eval itself sees a single
process and the scores do not depend on how many there are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from megatron.errors import EvaluationError
from megatron.evaluation.losses import score_continuations
from megatron.generation import Sampling, complete
from megatron.generation.pretrained import check_vocabulary
from megatron.mpu.job import Ranks

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from megatron.model import GPTModel
    from megatron.tokenizer import Tokenizer

DEFAULT_BATCH_TOKENS = 16_384
DEFAULT_NEW_TOKENS = 256
Item = TypeVar("Item")
Pair = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("kerple_neox")
class KerpleNeoXLM(TemplateLM):
    """Any checkpoint that `megatron.load_pretrained` reads."""

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

        It may be any length the positional embedding can do. `batch_size` (rows) is a limit beside
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
        self.max_length = int(max_length or self._train_length())
        self.batch_tokens = int(batch_tokens)
        rows = str(batch_size or max_batch_size or "auto")
        self.max_rows = int(rows) if rows.isdigit() and int(rows) > 1 else None
        self.ranks = ranks or Ranks.current()
        self.seed = seed
        self._device = self.model.device

    @staticmethod
    def _loaded(pretrained: str | GPTModel, device: str | None, iteration: int | None) -> GPTModel:
        if not isinstance(pretrained, str):
            return pretrained
        from megatron.generation.pretrained import load_pretrained
        from megatron.mpu.job import pick_device

        # lm-eval's own default is cuda:0 on every machine, so only an explicit choice that exists
        # here is taken.
        here = str(pick_device())
        chosen = device if device and not (device.startswith("cuda") and here == "cpu") else here
        return load_pretrained(pretrained, device=chosen, iteration=iteration)

    def _train_length(self) -> int:
        config = getattr(self.model, "config", None)
        if config is not None:
            return int(config.model.seq_length)
        return self.model.spec.position_rows

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
        pairs: list[Pair] = []
        counts: list[int] = []
        for text in texts:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            found = [make_disjoint_window(window) for window in windows]
            pairs += [(None, context, predicted) for context, predicted in found]
            counts.append(len(found))
        scores = iter(self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm))
        totals = []
        for text, count in zip(texts, counts, strict=True):
            totals.append(sum(next(scores)[0] for _ in range(count)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), totals[-1])
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """(log-probability, is it what greedy decoding gives) of each continuation."""
        fitted = [self._fitted(context, continuation) for _, context, continuation in requests]

        def score(group: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
            return [
                (float(found.log_probs.double().sum()), bool(found.greedy.all()))
                for found in score_continuations(self.model, group)
            ]

        def remember(place: int, answer: tuple[float, bool]) -> None:
            if (texts := requests[place][0]) is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)

        return self._in_batches(
            fitted,
            lambda pair: len(pair[0]) + len(pair[1]) - 1,
            score,
            "loglikelihood",
            disable_tqdm,
            remember,
        )

    def _fitted(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """The pair with its context cut at the left so that the input fits."""
        if not continuation:
            raise EvaluationError("an empty continuation cannot be scored")
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            raise EvaluationError(
                f"a continuation of {len(continuation)} tokens does not fit into a context of "
                f"{self.max_length}; raise eval_context_length (max_length)"
            )
        return context[-room:], continuation

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts up to a stop string, an end of document, or the most tokens allowed."""
        answers: list[str | None] = [None] * len(requests)
        groups: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(place)
        for places in groups.values():
            texts = self._generate_alike([requests[place].args for place in places], disable_tqdm)
            for place, text in zip(places, texts, strict=True):
                answers[place] = text
        return cast(list[str], answers)

    def _generate_alike(self, requests: list[Any], quiet: bool) -> list[str]:
        """Answers to requests that all have the same generation options."""
        options = normalize_gen_kwargs(requests[0][1], DEFAULT_NEW_TOKENS)
        new_tokens = options["max_gen_toks"]
        room = self.max_length - new_tokens
        if room < 1:
            raise EvaluationError(
                f"max_gen_toks = {new_tokens} leaves no room for a prompt in a context of "
                f"{self.max_length}; raise eval_context_length (max_length)"
            )
        prompts = [(self.tok_encode(text) or [self.eot_token_id])[-room:] for text, _ in requests]

        def length(prompt: list[int]) -> int:
            return len(prompt) + new_tokens

        def remember(place: int, text: str) -> None:
            if not options["do_sample"]:
                self.cache_hook.add_partial("generate_until", requests[place], text)

        answer = partial(self._complete, options)
        return self._in_batches(prompts, length, answer, "generate_until", quiet, remember)

    def _complete(self, options: Any, prompts: list[list[int]]) -> list[str]:
        stops = [stop for stop in options["until"] if stop]
        tokenizer = self.model_tokenizer

        def stopped(tokens: list[int]) -> bool:
            text = tokenizer.detokenize(tokens)
            return any(stop in text for stop in stops)

        sampling = Sampling(
            options["temperature"] if options.get("do_sample") else 0.0,
            int(options.get("top_k", 0)),
            float(options.get("top_p", 0.0)),
        )
        completions = complete(
            self.model,
            prompts,
            max_new_tokens=options["max_gen_toks"],
            sampling=sampling,
            stop_ids=(tokenizer.eod,),
            should_stop=stopped if stops else None,
            seed=self.seed,
            vocab_size=tokenizer.vocab_size,
        )
        return [
            postprocess_generated_text(tokenizer.detokenize(completion.tokens), stops, None)
            for completion in completions
        ]

    def _in_batches(
        self,
        items: Sequence[Item],
        length: Callable[[Item], int],
        function: Callable[[list[Item]], list[Any]],
        label: str,
        quiet: bool,
        remember: Callable[[int, Any], None],
    ) -> list[Any]:
        """`function` on batches of similar length, longest first so that memory runs out early."""
        order = sorted(range(len(items)), key=lambda place: -length(items[place]))

        def share(places: Sequence[int]) -> list[Any]:
            found: list[Any] = []
            hidden = quiet or not self.ranks.is_main or not sys.stderr.isatty()
            with tqdm(total=len(places), desc=label, disable=hidden) as bar:
                for group in self._batches(places, lambda place: length(items[place])):
                    answers = function([items[place] for place in group])
                    for place, answer in zip(group, answers, strict=True):
                        remember(place, answer)
                    found += answers
                    bar.update(len(group))
            return found

        results: list[Any] = [None] * len(items)
        for place, answer in zip(order, self.ranks.map(share, order), strict=True):
            results[place] = answer
        return results

    def _batches(self, places: Sequence[int], length: Callable[[int], int]) -> Iterator[list[int]]:
        batch: list[int] = []
        for place in places:  # the first of a batch is its longest
            rows = len(batch) + 1
            full = batch and rows * length(batch[0]) > self.batch_tokens
            if full or (self.max_rows is not None and rows > self.max_rows):
                yield batch
                batch = []
            batch.append(place)
        if batch:
            yield batch
