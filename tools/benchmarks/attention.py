"""Attention engines against torch's own, dense paths and FlexAttention, interleaved, medians."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.engines.cpp_build import load_library
from megatron.engines.cpu import tiled_forward_with_count

from .contenders import (
    Contender,
    Inputs,
    dense_forward,
    flex_forward,
    inkling_attention,
    sdpa_causal,
    sdpa_dense_bias,
    tiled,
    with_terms,
)
from .peak_memory import measure
from .timing import Target, Timings, interleave, render_table

HEADS, DIM = 12, 64
TRAINING_SIZES = {512: 4, 1024: 2, 2048: 1, 4096: 1}  # length: batch
BIAS_KERNELS = (
    "kerple_log",
    "kerple_power",
    "kerple_log3",
    "gauss_bias2",
    "gauss_bias3",
    "alibi",
    "rpe",
    "sandwich",
)
WEIGHT_KERNELS = ("gauss_wht1", "gauss_wht2", "kerple_bias_wht")
BF16_SIZES = ((2048, 12), (4096, 4), (8192, 2), (16_384, 1))  # length and heads
LONG = 16_384
LONGEST = 65_536


@dataclass
class Report:
    """What was printed, for `--json`."""

    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)

    def add(self, title: str, rows: list[list[str]]) -> None:
        self.tables[title] = rows
        print(f"\n{title}\n\n{render_table(rows)}", flush=True)

    def keep(self, name: str, timings: Timings) -> None:
        self.seconds[name] = {key: list(value) for key, value in timings.rounds.items()}
        medians = (f"{key} {timings.median(key) * 1e3:.1f} ms" for key in timings.rounds)
        print(f"measured {name}: {', '.join(medians)}", file=sys.stderr, flush=True)

    def target(self, name: str, value: float, at_most: float) -> None:
        self.targets.append(Target(name, value, at_most))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="short lengths and few repeats")
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=int,
        choices=list(TRAINING_SIZES),
        help="of the training part (default: all; with --quick the first two)",
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="terms and bf16: count this process's CPU time, for a busy machine (--threads 1)",
    )
    parser.add_argument("--no-flex", action="store_true", help="leave FlexAttention out")
    parser.add_argument("--json", type=Path, help="also write everything measured to this file")


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    if args.quick:
        args.repeats = min(args.repeats, 3)
    report = Report()
    print(describe(args))
    for part in args.parts:
        PARTS[part](args, report)
    print("\nTargets\n\n" + "\n".join(map(str, report.targets)))
    if args.json:
        content = {
            "setting": describe(args),
            "tables": report.tables,
            "seconds": report.seconds,
            "targets": [{**asdict(t), "holds": t.holds} for t in report.targets],
        }
        args.json.write_text(json.dumps(content, indent=2) + "\n")
    return 0 if all(target.holds for target in report.targets) else 1


def describe(args: argparse.Namespace) -> str:
    backend = "PyTorch" if load_library() is None else "compiled C++"
    capability = torch.backends.cpu.get_cpu_capability()
    return (
        f"{args.threads} threads, {platform.machine()} {capability}, torch {torch.__version__},"
        f" fp32, {HEADS} heads of {DIM}, tiled: {backend}; GPU: not measured"
    )


def _clock(args: argparse.Namespace) -> Callable[[], float]:
    return time.process_time if args.cpu_time else time.perf_counter


def _ms(timings: Timings, name: str, base: str = "(c)") -> str:
    return f"{timings.median(name) * 1e3:.1f} ({timings.ratio(name, base):.2f})"


def measure_training(args: argparse.Namespace, report: Report) -> None:
    """Forward and backward against (a), (b) and (c)."""
    rows = [["length (batch)", "(a) dense", "(b) SDPA, bias", "(c) SDPA, none", "tiled, log"]]
    for length in args.lengths or list(TRAINING_SIZES)[: 2 if args.quick else None]:
        batch = TRAINING_SIZES[length]
        inputs = Inputs(batch, HEADS, length, DIM, train=True)
        contenders: dict[str, Contender] = {
            "(c)": sdpa_causal(inputs),
            "tiled": tiled(inputs, "kerple_log"),
            "(b)": sdpa_dense_bias(inputs),
            "(a)": dense_forward(inputs),
        }
        few = 1 if length > 2048 else 3
        timings = interleave(contenders, args.repeats, slow={"(a)": few, "(b)": few})
        report.keep(f"training {length}", timings)
        rows.append([f"{length} ({batch})", *(_ms(timings, n) for n in ("(a)", "(b)", "(c)"))])
        rows[-1].append(_ms(timings, "tiled"))
        report.target(f"forward+backward at {length}: over (c)", timings.ratio("tiled", "(c)"), 1.1)
        if length == 2048:
            dense = timings.ratio("tiled", "(a)")
            report.target(f"forward+backward at {length}: over (a)", dense, 0.18)
    report.add("Forward+backward, ms (times (c))", rows)


def measure_kernels(args: argparse.Namespace, report: Report) -> None:
    """All positional embeddings that are tables, at one length, without pruning."""
    length, batch = (512, 1) if args.quick else (1024, 2)
    inputs = Inputs(batch, HEADS, length, DIM, train=True)
    names = (*BIAS_KERNELS, *WEIGHT_KERNELS)
    contenders = {name: tiled(inputs, name, pruning=False) for name in names}
    timings = interleave(contenders, 5 * args.repeats)
    report.keep(f"kernels {length}", timings)
    rows = [["positional embedding", "tables", "ms (times log)"]]
    for name in names:
        tables = "bias" if name in BIAS_KERNELS else "weight, or both"
        rows.append([name, tables, _ms(timings, name, "kerple_log")])
    report.add(f"Forward+backward at {length} (batch {batch}) by kernel, no pruning", rows)
    over_log = [timings.ratio(name, "kerple_log") for name in BIAS_KERNELS]
    report.target("bias kernels: slowest over fastest", max(over_log) / min(over_log), 1.05)
    weighted = max(timings.ratio(name, "kerple_log") for name in WEIGHT_KERNELS)
    report.target("weight kernels: slowest over log", weighted, 1.30)


def measure_terms(args: argparse.Namespace, report: Report) -> None:
    """What key biases, sinks, packed documents and grouped heads cost beside the plain log bias."""
    length = 1024 if args.quick else 4096
    inputs = Inputs(1, HEADS, length, DIM, train=True)
    at_most = {
        **{"key_bias": 1.05, "sink": 1.05, "packed": 0.3, "grouped": 1.0},
        "features 16": 1.25,
    }
    others = ("features 64", "row_scale")
    contenders = {name: with_terms(inputs, name) for name in ("plain", *at_most, *others)}
    timings = interleave(contenders, args.repeats, clock=_clock(args))
    report.keep(f"terms {length}", timings)
    says = {
        "plain": "log bias alone",
        "key_bias": "a bias for each key and head",
        "sink": "a sink for each head",
        "packed": f"eight documents of {length // 8}",
        "grouped": f"{HEADS} query heads on {HEADS // 3} key heads",
        "features 16": "16 query features, distances below 1,024",
        "features 64": "64 query features, distances below 1,024",
        "row_scale": "a factor of each query's scores",
    }
    rows = [["", "ms (times plain)", "fastest round (times plain)"]]
    for name, text in says.items():
        fastest = timings.best(name) / timings.best("plain")
        row = f"{timings.best(name) * 1e3:.1f} ({fastest:.2f})"
        rows.append([text, _ms(timings, name, "plain"), row])
        if name in at_most:
            report.target(f"{text} at {length}: over plain", fastest, at_most[name])
    report.add(f"Forward+backward at {length}, batch 1, with the log bias and", rows)
    sizes = {"length": length, "heads": HEADS, "dim": DIM, "threads": args.threads}
    plain, features = (
        measure("terms", term=term, **sizes)["above_inputs"] for term in ("plain", "features 16")
    )
    rows = [["", "MB above the inputs"]]
    rows += [["log bias alone", f"{plain / 1e6:.0f}"], ["16 features", f"{features / 1e6:.0f}"]]
    report.add(f"Peak memory of forward+backward at {length}, in processes of their own", rows)
    report.target(f"memory of 16 features at {length}: over plain", features / plain, 1.3)


def measure_inkling(args: argparse.Namespace, report: Report) -> None:
    """Inkling's bias by transformers' own dense attention and by ours, forward and backward."""
    length = 512 if args.quick else 2048
    inputs = Inputs(1, HEADS, length, DIM, train=True)
    contenders = {
        "transformers": inkling_attention(inputs, dense=True),
        "tiled": inkling_attention(inputs, dense=False),
    }
    timings = interleave(contenders, args.repeats, clock=_clock(args))
    report.keep(f"inkling {length}", timings)
    rows = [["", "ms (times transformers)"]]
    rows += [[name, _ms(timings, name, "transformers")] for name in contenders]
    report.add(f"Forward+backward at {length}, batch 1, Inkling's bias", rows)
    over = timings.ratio("tiled", "transformers")
    report.target(f"Inkling's bias at {length}: over transformers", over, 0.15)
    rows = [["", "CPU s of the fastest step", "GB above model and optimizer", "loss"]]
    for name, ours in (("transformers' attention", False), ("our engine", True)):
        found = measure("inkling_step", ours=ours, length=length, rounds=2, threads=args.threads)
        numbers = (found["seconds"], found["above_model"] / 1e9, found["loss"])
        rows.append([name, *(f"{number:.2f}" for number in numbers)])
    report.add(f"A training step of a transformers Inkling of six layers at {length}", rows)


def measure_bf16(args: argparse.Namespace, report: Report) -> None:
    """bf16 inputs against fp32 ones; at most 0.6 where the CPU multiplies bf16."""
    rows = [["length", "heads", "fp32 ms", "bf16 ms (times fp32)", "fastest round (times fp32)"]]
    for length, heads in BF16_SIZES[: 1 if args.quick else None]:
        contenders = {}
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            inputs = Inputs(1, heads, length, DIM, train=True, dtype=dtype)
            contenders[name] = tiled(inputs, "kerple_log")
        timings = interleave(contenders, args.repeats, clock=_clock(args))
        report.keep(f"bf16 {length}", timings)
        fastest = timings.best("bf16") / timings.best("fp32")
        row = f"{timings.best('bf16') * 1e3:.1f} ({fastest:.2f})"
        milliseconds = f"{timings.median('fp32') * 1e3:.1f}"
        rows.append([str(length), str(heads), milliseconds, _ms(timings, "bf16", "fp32"), row])
        report.target(f"bf16 at {length}: over fp32", fastest, 0.6)
    report.add("Forward+backward, batch 1, log bias, in bf16", rows)


def measure_forward_pass(args: argparse.Namespace, report: Report) -> None:
    """Forward only, with FlexAttention where it runs."""
    rows = [["length (batch)", "(c) SDPA, none", "tiled, log", "(d) FlexAttention, log"]]
    for length in (1024,) if args.quick else (1024, 4096):
        inputs = Inputs(1, HEADS, length, DIM, train=False)
        contenders = {"(c)": sdpa_causal(inputs), "tiled": tiled(inputs, "kerple_log")}
        flex = None if args.no_flex or args.quick else _flex_or_none(inputs)
        if flex is not None:
            contenders["(d)"] = flex
        timings = interleave(contenders, args.repeats)
        report.keep(f"forward {length}", timings)
        beside = _ms(timings, "(d)") if flex is not None else "not run"
        rows.append([f"{length} (1)", _ms(timings, "(c)"), _ms(timings, "tiled"), beside])
    report.add("Forward, ms (times (c))", rows)


def _flex_or_none(inputs: Inputs) -> Contender | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return flex_forward(inputs)
    except Exception as error:  # torch.compile fails in many ways where there is no compiler
        print(f"(d) FlexAttention does not run here: {str(error).splitlines()[0]}")
        return None


def measure_long(args: argparse.Namespace, report: Report) -> None:
    """Forward at a long length: no pruning to be had (log), pruning (ALiBi, power), memory."""
    length = 4096 if args.quick else LONG
    inputs = Inputs(1, HEADS, length, DIM, train=False)
    names = ("kerple_log", "alibi", "kerple_power")
    contenders: dict[str, Contender] = {"(c)": sdpa_causal(inputs)}
    contenders |= {name: tiled(inputs, name) for name in names}
    timings = interleave(contenders, min(5, args.repeats))
    report.keep(f"long {length}", timings)
    rows = [["", "ms (times (c))", "tiles visited"], ["(c) SDPA, none", _ms(timings, "(c)"), ""]]
    for name in names:
        with torch.no_grad():
            bias = inputs.kernel(name)(length).bias
        _, count = tiled_forward_with_count(inputs.q, inputs.k, inputs.v, bias)
        rows.append([f"tiled, {name}", _ms(timings, name), f"{count.share:.0%}"])
    report.add(f"Forward at {length}, batch 1, with pruning", rows)
    for name, bound in zip(names, (1.2, 0.45, 0.7), strict=True):
        report.target(f"forward at {length}, {name}: over (c)", timings.ratio(name, "(c)"), bound)
    memory = measure("forward", length=length, heads=HEADS, dim=DIM, threads=args.threads)
    above = memory["above_inputs"] / 1e9
    report.target(f"forward at {length}: GB above the inputs", above, 1.0)


def measure_longest(args: argparse.Namespace, report: Report) -> None:
    """Forward at a length where one dense score matrix would be 17 GB a head."""
    length = 8192 if args.quick else LONGEST
    memory = measure("forward", length=length, heads=HEADS, dim=DIM, threads=args.threads)
    rows = [["length", "seconds", "GB above the inputs", "GB at peak"]]
    sizes = [f"{memory[key] / 1e9:.2f}" for key in ("above_inputs", "peak")]
    rows.append([str(length), f"{memory['seconds']:.1f}", *sizes])
    report.add("Forward, batch 1, log bias, in a process of its own", rows)
    report.target(f"forward at {length}: GB at peak", memory["peak"] / 1e9, 24.0)


PARTS: dict[str, Callable[[argparse.Namespace, Report], Any]] = {
    "training": measure_training,
    "kernels": measure_kernels,
    "terms": measure_terms,
    "inkling": measure_inkling,
    "bf16": measure_bf16,
    "forward": measure_forward_pass,
    "long": measure_long,
    "longest": measure_longest,
}
