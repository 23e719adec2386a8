"""`tools/reproduce.py plan`: what a suite costs before anything is started.

Steps and tokens are exact. Everything else is an estimate with its source: GPU times from the
paper's seconds per step, small CPU runs from our own demo, tokenizing from our benchmark. Core
hours and GPU hours are never added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.data.corpora import SOURCES
from megatron.evaluation.text_tables import text_table
from megatron.model import ModelSpec
from megatron.model.outline import outline_of
from megatron.model.sizes import ModelSizes
from megatron.neox_arguments import NeoXArgs
from megatron.paper.cells import published_seconds_per_step
from megatron.paper.suite import Run, Suite
from megatron.training.progress_hooks import PEAK_FLOPS

_PAPER_BATCH_TOKENS = 32 * 512
_PAPER_LENGTH = 512
_PAPER_MODEL = ModelSpec(
    num_layers=12,
    hidden_size=768,
    num_attention_heads=12,
    seq_length=_PAPER_LENGTH,
    no_weight_tying=True,
    padded_vocab_size=50304,
)
_BYTES_PER_TOKEN_OF_TEXT = 4.0  # English with GPT-2's tokens; a rough figure for disk space
_TOKENIZING_MB_PER_CORE_SECOND = 1.95
"""docs/benchmarks.md: 3.90 MB/s of text with GPT-2's tokens on two cores."""
_GPUS = {"A100 40 GB": 40, "A100 80 GB": 80, "H100 80 GB": 80}
"""Memory in GB, by their data sheets."""
_CPU_PARAMETERS = 20_000_000
"""Below this a run in fp32 is meant for a CPU."""
_DEMO_TRAIN_FLOPS, _DEMO_EVALUATE_FLOPS = 4.7e10, 3.1e10
"""Per second and core: `make demo` on two cores of an AMD EPYC, 135 s of training (500 steps of
2,048 tokens) and 90 s of evaluation (786,432 tokens up to length 4,096) per run and core."""


@dataclass(frozen=True)
class Cost:
    """Hours are of an A100, or of one CPU core for the small models."""

    parameters: int
    """Without the few of its positional embedding."""
    steps: int
    tokens: int
    train_hours: float
    evaluate_hours: float
    longest_hours: float
    """Of evaluation, the part at the longest length."""
    checkpoint_bytes: float
    evaluation_tokens: int
    memory_bytes: float
    """Of one process while training, with its logits."""
    on_cpu: bool = False

    @property
    def hours(self) -> float:
        return self.train_hours + self.evaluate_hours


def estimate_cost(run: Run) -> Cost:
    """Steps and tokens exactly; time by FLOPs from the paper's steps, or from our demo's."""
    args = NeoXArgs.from_dict({**run.config, **_own_vocabulary(run)})
    sizes = ModelSizes(args)
    outline, counted = sizes.outline, sizes.parameters
    parameters = counted.total - counted.positions
    batch = args.batch_plan(run.gpus)
    steps = int(run.config["train_iters"])
    tokens = run.training_tokens
    on_cpu = parameters < _CPU_PARAMETERS and run.config.get("precision") == "fp32"
    if on_cpu:
        train_rate, evaluate_rate = _DEMO_TRAIN_FLOPS, _DEMO_EVALUATE_FLOPS
    else:
        train_rate = evaluate_rate = _paper_rate(run.method)

    train = tokens * outline.training_flops_per_token(run.train_length) / train_rate
    by_length = _evaluation_tokens(run, args.evaluation.eval_num_sequences)
    evaluate = {n: own * outline.flops_per_token(n) / evaluate_rate for n, own in by_length.items()}
    logits = batch.micro_batch_size * run.train_length * sizes.spec.padded_vocab_size
    logit_bytes = 8.0 * logits / args.parallel.model_parallel_size
    memory = sizes.memory(run.gpus).total + logit_bytes
    ranks = args.parallel.processes_per_replica
    replica = sizes.memory(ranks)
    checkpoint = (replica.parameters + replica.optimizer) * ranks
    kept = int(run.config.get("keep_last_n_checkpoints") or 1) + 1  # the next is written first
    return Cost(
        parameters=parameters,
        steps=steps,
        tokens=tokens,
        train_hours=train / 3600,
        evaluate_hours=sum(evaluate.values()) / 3600,
        longest_hours=evaluate.get(max(by_length, default=0), 0.0) / 3600,
        checkpoint_bytes=checkpoint * kept,
        evaluation_tokens=sum(by_length.values()),
        memory_bytes=memory,
        on_cpu=on_cpu,
    )


def _own_vocabulary(run: Run) -> dict[str, int]:
    """Entries of the vocabulary that a corpus brings itself; its files need not be there yet."""
    corpus = Path(str(run.config["data_path"])).parent
    source = SOURCES.get(corpus.name)
    beside = Path(str(run.config.get("vocab_file", ""))).parent == corpus
    return {"vocab_size": source.vocabulary} if source and beside and source.vocabulary else {}


def _paper_rate(method: str) -> float:
    """FLOP/s of the paper's training on an A100."""
    known = published_seconds_per_step()
    seconds = known.get(method, known["kerple_log"])
    per_token = outline_of(_PAPER_MODEL).training_flops_per_token(_PAPER_LENGTH)
    return _PAPER_BATCH_TOKENS * per_token / seconds


def _evaluation_tokens(run: Run, num_sequences: int) -> dict[int, int]:
    """By length, over valid and test."""
    splits = sum(run.config.get(key) is not False for key in ("do_valid", "do_test"))
    sequences = splits * num_sequences
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
    head += ["on", "longest run", "in all", "disk"]
    rows, counted = [], set[str]()
    for section in suite.sections:
        runs = suite.runs_of(section)
        fresh = [run for run in runs if run.name not in counted]
        counted |= {run.name for run in fresh}
        rows += _section_rows(section.name, runs, [costs[run.name] for run in fresh])
    lines = [f"Suite {suite.name}: {suite.file.about}", "", text_table(head, rows, ["left"])]
    lines += ["", _total_line(list(costs.values()))]
    if small := [cost for cost in costs.values() if cost.on_cpu]:
        lines.append(
            f"With -j 2 on two cores about {_time(sum(cost.hours for cost in small) / 2)}. Time: "
            "estimate by FLOPs from `make demo` on two cores of an AMD EPYC; other machines differ."
        )
    if large := [(run, costs[run.name]) for run in suite.runs if not costs[run.name].on_cpu]:
        lines += _gpu_lines(large)
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


def _gpu_lines(costs: Sequence[tuple[Run, Cost]]) -> list[str]:
    """Hours and memory on the GPUs that clusters have."""
    total = sum(cost.hours for _, cost in costs)
    evaluate = sum(cost.evaluate_hours for _, cost in costs)
    longest = sum(cost.longest_hours for _, cost in costs)
    rows = []
    for name, gigabytes in _GPUS.items():
        faster = PEAK_FLOPS["A100"] / PEAK_FLOPS[name.split()[0]]
        row = [name, _time(total * faster), _time(evaluate * faster), _time(longest * faster)]
        for model, count in dict.fromkeys((run.model, run.gpus) for run, _ in costs):
            own = [cost for run, cost in costs if run.model == model]
            memory = max(cost.memory_bytes for cost in own)
            hours = max(cost.hours for cost in own) * faster
            fits = "" if memory < 0.9e9 * gigabytes else ", does not fit"
            gpus = f" on {count} GPUs" if count > 1 else ""
            rows.append([*row, model, f"{_time(hours / count)}{gpus}", f"{_bytes(memory)}{fits}"])
            row = ["", "", "", ""]
    head = ["GPU (estimates)", "all runs", "evaluation", "at the longest length"]
    head += ["model", "longest run", "memory/GPU"]
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
