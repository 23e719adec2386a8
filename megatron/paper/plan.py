"""`tools/reproduce.py plan`: what a suite costs before anything is started."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megatron.paper.published import published_seconds_per_step
from megatron.paper.suite import Run, Suite

__all__ = ["Cost", "estimate_cost", "parameter_count", "plan_text", "train_flops_per_token"]

_GPT2_VOCABULARY = 50304
_BYTE_VOCABULARY = 512
_PAPER_BATCH_TOKENS = 32 * 512
_PAPER_SHAPE = {"num_layers": 12, "hidden_size": 768, "seq_length": 512}
_BYTES_PER_TOKEN_OF_TEXT = 4.0  # English with GPT-2's tokens; a rough figure for disk space
_CHECKPOINT_BYTES = {"fp32": 12, "bf16": 14, "fp16": 14}
"""Weights and Adam's state per parameter: 4+4+4, or 2 + 4+4+4."""


@dataclass(frozen=True)
class Cost:
    steps: int
    tokens: int
    gpu_hours: float
    checkpoint_bytes: float
    evaluation_tokens: int


def parameter_count(config: dict[str, Any] | Any) -> int:
    """Parameters of the decoder without the few of the positional embedding."""
    hidden, layers = int(config["hidden_size"]), int(config["num_layers"])
    byte_level = config.get("tokenizer_type") == "CharLevelTokenizer"
    vocabulary = _BYTE_VOCABULARY if byte_level else _GPT2_VOCABULARY
    embeddings = vocabulary * hidden * (2 if config.get("no_weight_tying") else 1)
    return layers * (12 * hidden**2 + 13 * hidden) + embeddings + 2 * hidden


def train_flops_per_token(config: Any) -> float:
    """Forward and backward: 6 per parameter, and attention over half the sequence on average."""
    attention = 6 * int(config["num_layers"]) * int(config["hidden_size"]) * config["seq_length"]
    return 6.0 * parameter_count(config) + attention


def _paper_flops_per_token() -> float:
    return train_flops_per_token({**_PAPER_SHAPE, "no_weight_tying": True})


def estimate_cost(run: Run) -> Cost:
    """Steps and tokens exactly; A100-hours from the paper's seconds per step, scaled by FLOPs."""
    config = run.config
    steps = int(config["train_iters"])
    tokens = steps * _batch(run) * run.train_length
    known = published_seconds_per_step()
    seconds = known.get(run.method, known["kerple_log"])
    per_flop = seconds / (_PAPER_BATCH_TOKENS * _paper_flops_per_token())
    train = tokens * train_flops_per_token(config) * per_flop
    evaluation_tokens = _evaluation_tokens(run)
    # A forward pass alone is a third of a training step.
    evaluate = evaluation_tokens * train_flops_per_token(config) / 3 * per_flop
    precision = str(config.get("precision", "fp32"))
    checkpoint = parameter_count(config) * _CHECKPOINT_BYTES.get(precision, 14)
    kept = int(config.get("keep_last_n_checkpoints", 1)) + 1  # the next is written before deleting
    return Cost(steps, tokens, (train + evaluate) / 3600, checkpoint * kept, evaluation_tokens)


def _batch(run: Run) -> int:
    config = run.config
    if config.get("train_batch_size"):
        return int(config["train_batch_size"])
    model_parallel = int(config.get("model_parallel_size", 1))
    pipe_parallel = max(int(config.get("pipe_parallel_size", 0)), 1)
    replicas = max(run.gpus // (model_parallel * pipe_parallel), 1)
    accumulation = int(config.get("gradient_accumulation_steps", 1))
    return int(config["train_micro_batch_size_per_gpu"]) * accumulation * replicas


def _evaluation_tokens(run: Run) -> int:
    """Over valid and test."""
    sequences = int(run.config.get("eval_num_sequences", 320))
    lengths = [int(length) for length in run.config.get("eval_lengths", [])]
    if run.config.get("eval_protocol") == "fixed_tokens" and lengths:
        extrapolation = len(lengths) * sequences * max(lengths)
    else:
        extrapolation = sequences * sum(lengths)
    positions = sum(sequences * (step.length or 0) for step in run.evaluations)
    return 2 * (extrapolation + positions)


def plan_text(suite: Suite) -> str:
    """The run matrix by section, then totals."""
    lines = [f"Suite {suite.name}: {suite.about}", ""]
    head = f"{'section':<14}{'methods':>8}{'data':>6}{'seeds':>7}{'runs':>6}{'steps/run':>11}"
    lines += [head + f"{'tokens':>10}{'GPU-hours':>11}{'disk':>10}"]
    counted: set[str] = set()
    for section in suite.sections:
        runs = [run for run in suite.runs if section.name in run.sections]
        fresh = [run for run in runs if run.name not in counted]
        counted |= {run.name for run in fresh}
        lines.append(_section_line(section.name, runs, fresh))
    lines += ["", _total_line(suite), *_data_lines(suite), "", *_footnotes(suite)]
    return "\n".join(lines) + "\n"


def _section_line(name: str, runs: list[Run], fresh: list[Run]) -> str:
    costs = [estimate_cost(run) for run in fresh]
    steps = sorted({int(run.config["train_iters"]) for run in runs})
    matrix = [len({getattr(run, key) for run in runs}) for key in ("method", "data", "seed")]
    line = f"{name:<14}{matrix[0]:>8}{matrix[1]:>6}{matrix[2]:>7}{len(runs):>6}"
    line += f"{'/'.join(str(number) for number in steps):>11}"
    if not fresh:
        return line + "   (runs shared with a section above)"
    return line + (
        f"{_short(sum(cost.tokens for cost in costs)):>10}"
        f"{_hours(sum(cost.gpu_hours for cost in costs)):>11}"
        f"{_bytes(sum(cost.checkpoint_bytes for cost in costs)):>10}"
    )


def _total_line(suite: Suite) -> str:
    costs = [estimate_cost(run) for run in suite.runs]
    evaluation = sum(cost.evaluation_tokens for cost in costs)
    return (
        f"Total: {len(suite.runs)} runs, {_short(sum(cost.tokens for cost in costs))} tokens of "
        f"training, {_short(evaluation)} of evaluation, about "
        f"{_hours(sum(cost.gpu_hours for cost in costs))} A100-hours, checkpoints "
        f"{_bytes(sum(cost.checkpoint_bytes for cost in costs))}."
    )


def _data_lines(suite: Suite) -> Iterable[str]:
    for source in suite.used_data:
        if source.raw_gigabytes is None:
            yield f"Data: {source.title} in {source.prefix(suite.data_root)}.bin"
            continue
        tokens = source.raw_gigabytes * 1e9 / _BYTES_PER_TOKEN_OF_TEXT
        yield (
            f"Data: {source.title}, {source.raw_gigabytes:g} GB raw, about {_bytes(2 * tokens)} "
            f"as tokens in {source.prefix(suite.data_root)}.bin"
        )


def _footnotes(suite: Suite) -> list[str]:
    notes = [
        "GPU-hours: the paper's seconds per step (162M, A100) scaled by FLOPs; not measured.",
        "Disk: weights and optimizer state of the checkpoints kept, and one more while writing.",
    ]
    if any(run.gpus > 1 for run in suite.runs):
        counts = {run.model: run.gpus for run in suite.runs if run.gpus > 1}
        notes.append(
            "GPUs per run: " + ", ".join(f"{k} {v}" for k, v in counts.items()) + ", else 1."
        )
    return notes


def _short(number: float) -> str:
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{suffix}"
    return f"{number:.0f}"


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"


def _bytes(number: float) -> str:
    for limit, suffix in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if number >= limit:
            return f"{number / limit:.3g} {suffix}"
    return f"{number / 1e3:.0f} kB"
