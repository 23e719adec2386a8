"""generate.py: from a config to samples."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from megatron.evaluation.start import join_ranks
from megatron.evaluation.subject import find_subject
from megatron.generation.decode import GenerationError
from megatron.generation.modes import TextGenerator, interactive, read_prompts, write_samples
from megatron.generation.sampling import Sampling

if TYPE_CHECKING:
    from megatron.evaluation.ranks import Ranks
    from megatron.neox_arguments import NeoXArgs

__all__ = ["run_generation"]


def run_generation(args: NeoXArgs, local_rank: int | None = None) -> int:
    """Generate as the config says; returns the exit code."""
    ranks, device = join_ranks(args, local_rank)
    try:
        _generate(args, build_generator(args, ranks, device), ranks)
    except ValueError as error:
        if ranks.is_main:
            print(f"error: {error}", file=sys.stderr)
        return 2
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
        stop_strings=tuple(getattr(options, "stop_strings", None) or ()),
        use_cache=not options.recompute,
        return_logits=options.return_logits,
        seed=args.to_dict()["seed"],
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
            lambda text: print(text, end="", flush=True),
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
    records = generator.samples([p for p in prompts for _ in range(options.num_samples)])
    if ranks.is_main:
        write_samples(options.sample_output_file, records)
        print(f"{len(records)} samples: {options.sample_output_file}")
