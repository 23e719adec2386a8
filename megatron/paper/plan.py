"""`tools/reproduce.py plan`: what a suite costs before anything is started.

Steps and tokens are arithmetic. Everything else is an estimate and says from what: GPU times from
the paper's seconds per step, small CPU runs from our own demo, tokenizing from our benchmark. Hours
of a core and of a GPU are never added up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.atomic_files import fingerprint
from megatron.data.corpora import SOURCES
from megatron.evaluation.results_schema import text_table
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.dry_run import count_parameters, estimate_memory
from megatron.paper.suite import Run, Suite
from megatron.paper.tables import published_seconds_per_step

_PAPER_BATCH_TOKENS = 32 * 512
_PAPER_MULTIPLIED, _PAPER_LAYERS, _PAPER_HIDDEN, _PAPER_LENGTH = 123_689_472, 12, 768, 512
"""Its 162,322,944 parameters without the embedding, which is looked up and not multiplied."""
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


@dataclass(frozen=True)
class _Size:
    """Of one model, without the few parameters of its positional embedding."""

    parameters: int
    multiplied: int
    """Without the embedding, which costs no arithmetic."""
    memory_bytes: float
    """Of one process while training, with its logits."""


_SIZES: dict[str, _Size] = {}
"""By model and what its runs have in common, so that hundreds of runs are counted once."""
_OF_ONE_RUN = ("seed", "save", "load", "data_path", "pos_emb")


def _size(run: Run) -> _Size:
    own = {key: run.config[key] for key in run.config if key not in _OF_ONE_RUN}
    key = fingerprint([run.gpus, run.data, own])
    if key not in _SIZES:
        own_words = _own_vocabulary(run)
        known = {"vocab_size": own_words} if own_words else {}
        args = NeoXArgs.from_dict({**run.config, **known})
        counted = count_parameters(args)
        micro = int(run.config.get("train_micro_batch_size_per_gpu") or 1)
        values = micro * run.train_length * counted.padded_vocab_size
        logits = 8.0 * values / args.parallel.model_parallel_size
        memory = estimate_memory(args, run.gpus).total + logits
        total = counted.total - counted.positions
        _SIZES[key] = _Size(total, total - counted.embedding, memory)
    return _SIZES[key]


def _own_vocabulary(run: Run) -> int | None:
    """Entries of the vocabulary that a corpus brings itself; its files need not be there yet."""
    corpus = Path(str(run.config["data_path"])).parent
    source = SOURCES.get(corpus.name)
    beside = Path(str(run.config.get("vocab_file", ""))).parent == corpus
    return source.vocabulary if source and beside else None


def _flops_per_token(multiplied: int, layers: int, hidden: int, length: int) -> float:
    """Of a forward pass: 2 per parameter, and attention over half the sequence on average."""
    return 2.0 * multiplied + 2.0 * layers * hidden * length


def _forward_flops(run: Run, length: int) -> float:
    config = run.config
    shape = (int(config["num_layers"]), int(config["hidden_size"]))
    return _flops_per_token(_size(run).multiplied, *shape, length)


def estimate_cost(run: Run) -> Cost:
    """Steps and tokens exactly; time by FLOPs from the paper's steps, or from our demo's."""
    config = run.config
    steps = int(config["train_iters"])
    tokens = steps * _batch(run) * run.train_length
    parameters, memory = _size(run).parameters, _size(run).memory_bytes
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
    kept = (
        int(config.get("keep_last_n_checkpoints") or 1) + 1
    )  # the next is written before deleting
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
    forward = _flops_per_token(_PAPER_MULTIPLIED, _PAPER_LAYERS, _PAPER_HIDDEN, _PAPER_LENGTH)
    return 3 * _PAPER_BATCH_TOKENS * forward / seconds


def _batch(run: Run) -> int:
    config = run.config
    if config.get("train_batch_size"):
        return int(config["train_batch_size"])
    model_parallel = int(config.get("model_parallel_size") or 1)
    pipe_parallel = int(config.get("pipe_parallel_size") or 1)
    replicas = max(run.gpus // (model_parallel * pipe_parallel), 1)
    accumulation = int(config.get("gradient_accumulation_steps") or 1)
    return int(config.get("train_micro_batch_size_per_gpu") or 1) * accumulation * replicas


def _evaluation_tokens(run: Run) -> dict[int, int]:
    """By length, over valid and test."""
    splits = sum(run.config.get(key) is not False for key in ("do_valid", "do_test"))
    sequences = splits * int(run.config.get("eval_num_sequences") or 320)
    lengths = [int(length) for length in run.config.get("eval_lengths") or []]
    same_tokens = run.config.get("eval_protocol") == "fixed_tokens"
    tokens = {n: sequences * (max(lengths) if same_tokens else n) for n in lengths}
    for step in run.evaluations:
        if step.length:
            tokens[step.length] = tokens.get(step.length, 0) + sequences * step.length
    return tokens


def plan_text(suite: Suite) -> str:
    """The run matrix by section, then what it takes."""
    costs = {run.name: estimate_cost(run) for run in suite.runs}
    head = ["section", "methods", "data", "seeds", "runs", "steps/run", "tokens"]
    head += ["on", "time/run", "in all", "disk"]
    rows, counted = [], set[str]()
    for section in suite.sections:
        runs = suite.runs_of(section)
        fresh = [run for run in runs if run.name not in counted]
        counted |= {run.name for run in fresh}
        rows += _section_rows(section.name, runs, [costs[run.name] for run in fresh])
    lines = [f"Suite {suite.name}: {suite.about}", "", text_table(head, rows, ["left"])]
    lines += ["", _total_line(list(costs.values()))]
    small = {name: cost for name, cost in costs.items() if cost.on_cpu}
    large = {name: cost for name, cost in costs.items() if not cost.on_cpu}
    lines += _cpu_lines(small.values()) if small else []
    lines += _gpu_lines([run for run in suite.runs if run.name in large], large) if large else []
    lines += ["", *_data_lines(suite)]
    lines.append(
        "Disk: weights and optimizer state of the checkpoints kept, and one more while writing."
    )
    return "\n".join(lines) + "\n"


def _section_rows(name: str, runs: Sequence[Run], fresh: Sequence[Cost]) -> list[list[str]]:
    """One row; two if some of the section's runs are meant for a CPU and some for a GPU."""
    steps = sorted({int(run.config["train_iters"]) for run in runs})
    matrix = [str(len({getattr(run, key) for run in runs})) for key in ("method", "data", "seed")]
    row = [name, *matrix, str(len(runs)), "/".join(str(number) for number in steps)]
    if not fresh:
        return [[*row, "(runs of a section above)", "", "", "", ""]]
    rows = []
    for device, own in _by_device(fresh):
        hours = [cost.hours for cost in own]
        disk = _bytes(sum(cost.checkpoint_bytes for cost in own))
        tokens = _short(sum(cost.tokens for cost in own))
        rows.append([*row, tokens, device, _time(max(hours)), _time(sum(hours)), disk])
        row = ["", "", "", "", "", ""]
    return rows


def _by_device(costs: Sequence[Cost]) -> list[tuple[str, list[Cost]]]:
    """Those of one CPU core and those of an A100, each if there are some."""
    small, large = [c for c in costs if c.on_cpu], [c for c in costs if not c.on_cpu]
    return [(name, own) for name, own in (("one core", small), ("an A100", large)) if own]


def _total_line(costs: Sequence[Cost]) -> str:
    evaluation = sum(cost.evaluation_tokens for cost in costs)
    times = " and ".join(
        f"{_time(sum(cost.hours for cost in own))} on {device}" for device, own in _by_device(costs)
    )
    return (
        f"Total: {len(costs)} runs, {_short(sum(cost.tokens for cost in costs))} tokens of "
        f"training, {_short(evaluation)} of evaluation; estimate: {times}, checkpoints "
        f"{_bytes(sum(cost.checkpoint_bytes for cost in costs))}."
    )


def _cpu_lines(costs: Iterable[Cost]) -> list[str]:
    total = sum(cost.hours for cost in costs)
    return [
        f"With -j 2 on two cores about {_time(total / 2)}. Time: estimate by FLOPs from `make "
        "demo` on two cores of an AMD EPYC; other machines differ."
    ]


def _gpu_lines(runs: Sequence[Run], costs: dict[str, Cost]) -> list[str]:
    """Hours and memory on the GPUs that clusters have."""
    total = sum(cost.hours for cost in costs.values())
    evaluate = sum(cost.evaluate_hours for cost in costs.values())
    longest = sum(cost.longest_hours for cost in costs.values())
    rows = []
    for name, (teraflops, gigabytes) in _GPUS.items():
        faster = _GPUS["A100 40 GB"][0] / teraflops
        row = [name, _time(total * faster), _time(evaluate * faster), _time(longest * faster)]
        for model in dict.fromkeys(run.model for run in runs):
            own = [run for run in runs if run.model == model]
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
