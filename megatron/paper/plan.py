"""`tools/reproduce.py plan`: what a suite costs before anything is started.

Steps and tokens are arithmetic. Everything else is an estimate and says from what: GPU times from
the paper's seconds per step, small CPU runs from our own demo, tokenizing from our benchmark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.atomic_files import fingerprint
from megatron.evaluation.results_schema import text_table
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.estimates import count_parameters, estimate_memory
from megatron.paper.published import published_seconds_per_step
from megatron.paper.suite import Run, Suite

__all__ = ["Cost", "estimate_cost", "parameter_count", "plan_text"]

_PAPER_BATCH_TOKENS = 32 * 512
_PAPER_PARAMETERS, _PAPER_LAYERS, _PAPER_HIDDEN, _PAPER_LENGTH = 162_322_944, 12, 768, 512
_BYTES_PER_TOKEN_OF_TEXT = 4.0  # English with GPT-2's tokens; a rough figure for disk space
_TOKENIZING_MB_PER_CORE_SECOND = 1.95
"""docs/benchmarks.md: 3.90 MB/s of text with GPT-2's tokens on two cores."""
_CHECKPOINT_BYTES = {"fp32": 12, "bf16": 14, "fp16": 14}
"""Weights and Adam's state per parameter: 4+4+4, or 2 + 4+4+4."""
_GPUS = {"A100 40 GB": (312.0, 40), "A100 80 GB": (312.0, 80), "H100 80 GB": (989.0, 80)}
"""Dense bf16 TFLOP/s and memory, by their data sheets."""
_CPU_PARAMETERS = 20_000_000
"""Below this a run in fp32 is meant for a CPU."""
_DEMO_TRAIN_FLOPS, _DEMO_EVALUATE_FLOPS = 4.7e10, 3.1e10
"""Per second and core: `make demo` on two cores of an AMD EPYC, 135 s of training (500 steps of
2,048 tokens) and 90 s of evaluation (786,432 tokens up to length 4,096) per run and core."""


@dataclass(frozen=True)
class Cost:
    steps: int
    tokens: int
    train_hours: float
    """On an A100; on one CPU core for the small models."""
    evaluate_hours: float
    longest_hours: float
    """Of evaluation, the part at the longest length."""
    checkpoint_bytes: float
    evaluation_tokens: int
    memory_bytes: float
    """Of one process while training."""
    on_cpu: bool = False

    @property
    def hours(self) -> float:
        return self.train_hours + self.evaluate_hours


_SIZES: dict[str, tuple[int, float]] = {}
"""By model and what its runs have in common, so that hundreds of runs are counted once."""


def _sizes(run: Run) -> tuple[int, float]:
    """Parameters without the positions', and bytes of one process with its logits."""
    own = {key: run.config[key] for key in run.config if key not in _OF_ONE_RUN}
    key = fingerprint([run.gpus, own])
    if key not in _SIZES:
        args = NeoXArgs.from_dict(dict(run.config))
        counted = count_parameters(args)
        micro = int(run.config.get("train_micro_batch_size_per_gpu", 1))
        values = micro * run.train_length * counted.padded_vocab_size
        logits = 8.0 * values / args.parallel.model_parallel_size
        memory = estimate_memory(args, run.gpus).total + logits
        _SIZES[key] = (counted.total - counted.positions, memory)
    return _SIZES[key]


_OF_ONE_RUN = ("seed", "save", "load", "data_path", "pos_emb")


def parameter_count(run: Run) -> int:
    """Parameters of the decoder without the few of the positional embedding."""
    return _sizes(run)[0]


def _flops_per_token(parameters: int, layers: int, hidden: int, length: int) -> float:
    """Of a forward pass: 2 per parameter, and attention over half the sequence on average."""
    return 2.0 * parameters + 2.0 * layers * hidden * length


def _forward_flops(run: Run, length: int) -> float:
    config = run.config
    shape = (int(config["num_layers"]), int(config["hidden_size"]))
    return _flops_per_token(parameter_count(run), *shape, length)


def estimate_cost(run: Run) -> Cost:
    """Steps and tokens exactly; time by FLOPs from the paper's steps, or from our demo's."""
    config = run.config
    steps = int(config["train_iters"])
    tokens = steps * _batch(run) * run.train_length
    parameters, memory = _sizes(run)
    on_cpu = parameters < _CPU_PARAMETERS and config.get("precision") == "fp32"
    if on_cpu:
        train_rate, evaluate_rate = _DEMO_TRAIN_FLOPS, _DEMO_EVALUATE_FLOPS
    else:
        train_rate = evaluate_rate = _paper_rate(run.method)
    train = 3 * tokens * _forward_flops(run, run.train_length) / train_rate
    by_length = _evaluation_tokens(run)
    evaluate = {n: t * _forward_flops(run, n) / evaluate_rate for n, t in by_length.items()}
    precision = str(config.get("precision", "fp32"))
    checkpoint = parameters * _CHECKPOINT_BYTES.get(precision, 14)
    kept = int(config.get("keep_last_n_checkpoints", 1)) + 1  # the next is written before deleting
    return Cost(
        steps,
        tokens,
        train / 3600,
        sum(evaluate.values()) / 3600,
        evaluate.get(max(by_length, default=0), 0.0) / 3600,
        checkpoint * kept,
        sum(by_length.values()),
        memory,
        on_cpu,
    )


def _paper_rate(method: str) -> float:
    """FLOP/s of the paper's training on an A100."""
    known = published_seconds_per_step()
    seconds = known.get(method, known["kerple_log"])
    forward = _flops_per_token(_PAPER_PARAMETERS, _PAPER_LAYERS, _PAPER_HIDDEN, _PAPER_LENGTH)
    return 3 * _PAPER_BATCH_TOKENS * forward / seconds


def _batch(run: Run) -> int:
    config = run.config
    if config.get("train_batch_size"):
        return int(config["train_batch_size"])
    model_parallel = int(config.get("model_parallel_size", 1))
    pipe_parallel = max(int(config.get("pipe_parallel_size", 0)), 1)
    replicas = max(run.gpus // (model_parallel * pipe_parallel), 1)
    accumulation = int(config.get("gradient_accumulation_steps", 1))
    return int(config["train_micro_batch_size_per_gpu"]) * accumulation * replicas


def _evaluation_tokens(run: Run) -> dict[int, int]:
    """By length, over valid and test."""
    sequences = int(run.config.get("eval_num_sequences", 320))
    lengths = [int(length) for length in run.config.get("eval_lengths", [])]
    same_tokens = run.config.get("eval_protocol") == "fixed_tokens"
    tokens = {n: 2 * sequences * (max(lengths) if same_tokens else n) for n in lengths}
    for step in run.evaluations:
        if step.length:
            tokens[step.length] = tokens.get(step.length, 0) + 2 * sequences * step.length
    return tokens


def plan_text(suite: Suite) -> str:
    """The run matrix by section, then what it takes."""
    costs = {run.name: estimate_cost(run) for run in suite.runs}
    on_cpu = all(cost.on_cpu for cost in costs.values())
    head = ["section", "methods", "data", "seeds", "runs", "steps/run", "tokens"]
    head += ["GPU-time/run" if not on_cpu else "time/run", "in all", "disk"]
    rows, counted = [], set[str]()
    for section in suite.sections:
        runs = suite.runs_of(section)
        fresh = [run for run in runs if run.name not in counted]
        counted |= {run.name for run in fresh}
        rows.append(_section_row(section.name, runs, [costs[run.name] for run in fresh]))
    lines = [f"Suite {suite.name}: {suite.about}", "", text_table(head, rows, ["left"])]
    lines += ["", _total_line(list(costs.values()), on_cpu)]
    lines += _cpu_lines(costs.values()) if on_cpu else _gpu_lines(suite, costs)
    lines += ["", *_data_lines(suite)]
    lines.append(
        "Disk: weights and optimizer state of the checkpoints kept, and one more while writing."
    )
    return "\n".join(lines) + "\n"


def _section_row(name: str, runs: Sequence[Run], fresh: Sequence[Cost]) -> list[str]:
    steps = sorted({int(run.config["train_iters"]) for run in runs})
    matrix = [str(len({getattr(run, key) for run in runs})) for key in ("method", "data", "seed")]
    row = [name, *matrix, str(len(runs)), "/".join(str(number) for number in steps)]
    if not fresh:
        return [*row, "(runs of a section above)", "", "", ""]
    hours = [cost.hours for cost in fresh]
    disk = _bytes(sum(cost.checkpoint_bytes for cost in fresh))
    tokens = _short(sum(cost.tokens for cost in fresh))
    return [*row, tokens, _time(max(hours)), _time(sum(hours)), disk]


def _total_line(costs: Sequence[Cost], on_cpu: bool) -> str:
    evaluation = sum(cost.evaluation_tokens for cost in costs)
    unit = "on one core" if on_cpu else "on one A100 (GPU-hours)"
    return (
        f"Total: {len(costs)} runs, {_short(sum(cost.tokens for cost in costs))} tokens of "
        f"training, {_short(evaluation)} of evaluation; estimate: "
        f"{_time(sum(cost.hours for cost in costs))} {unit}, checkpoints "
        f"{_bytes(sum(cost.checkpoint_bytes for cost in costs))}."
    )


def _cpu_lines(costs: Iterable[Cost]) -> list[str]:
    total = sum(cost.hours for cost in costs)
    return [
        f"With -j 2 on two cores about {_time(total / 2)}. Time: estimate by FLOPs from `make "
        "demo` on two cores of an AMD EPYC; other machines differ."
    ]


def _gpu_lines(suite: Suite, costs: dict[str, Cost]) -> list[str]:
    """Hours and memory on the GPUs that clusters have."""
    total = sum(cost.hours for cost in costs.values())
    evaluate = sum(cost.evaluate_hours for cost in costs.values())
    longest = sum(cost.longest_hours for cost in costs.values())
    rows = []
    for name, (teraflops, gigabytes) in _GPUS.items():
        faster = _GPUS["A100 40 GB"][0] / teraflops
        row = [name, _time(total * faster), _time(evaluate * faster), _time(longest * faster)]
        for model in dict.fromkeys(run.model for run in suite.runs):
            own = [run for run in suite.runs if run.model == model]
            memory = max(costs[run.name].memory_bytes for run in own)
            hours = max(costs[run.name].hours for run in own) * faster
            fits = "" if memory < 0.9e9 * gigabytes else ", does not fit"
            count = own[0].gpus
            gpus = f" on {count} GPUs" if count > 1 else ""
            rows.append([*row, model, f"{_time(hours / count)}{gpus}", f"{_bytes(memory)}{fits}"])
            row = ["", "", "", ""]
    head = ["GPU (estimates)", "all runs", "evaluation", "at the longest length"]
    head += ["model", "time/run", "memory/GPU"]
    return [
        "",
        text_table(head, rows, ["left", "right", "right", "right", "left"]),
        "",
        "Times: the paper's seconds per step (162M, A100) scaled by FLOPs; H100 by the ratio of "
        "peak rates, so at best. Memory: arithmetic, and a rule of thumb for activations. Nothing "
        "of this was measured on a GPU by us.",
    ]


def _data_lines(suite: Suite) -> Iterable[str]:
    for source in suite.used_data:
        place = f"{source.prefix(suite.data_root)}.bin"
        if source.raw_gigabytes is None:
            yield f"Data: {source.title} in {place}"
            continue
        tokens = source.raw_gigabytes * 1e9 / _BYTES_PER_TOKEN_OF_TEXT
        hours = source.raw_gigabytes * 1e3 / _TOKENIZING_MB_PER_CORE_SECOND / 3600
        yield (
            f"Data: {source.title}, {source.raw_gigabytes:g} GB raw, about {_bytes(2 * tokens)} "
            f"as tokens in {place}; tokenizing about {_time(hours)} on one core, "
            f"{_time(hours / 16)} on 16 (estimate from our benchmark's 1.95 MB/s per core)"
        )


def _short(number: float) -> str:
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{suffix}"
    return f"{number:.0f}"


def _time(hours: float) -> str:
    if hours >= 10:
        return f"{hours:,.0f} h"
    return f"{hours:.1f} h" if hours >= 1.5 else f"{max(hours * 60, 0.1):.2g} min"


def _bytes(number: float) -> str:
    for limit, suffix in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if number >= limit:
            return f"{number / limit:.3g} {suffix}"
    return f"{number / 1e3:.0f} kB"
