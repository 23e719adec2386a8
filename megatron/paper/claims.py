"""The paper's claims, each with a stated criterion, and its theory, checked on our own results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from megatron.errors import KernelAnalysisError
from megatron.model.kernel_theory import cpd_margin, is_cpd, smallest_shift
from megatron.neox_arguments.catalogue import label_of
from megatron.paper.cells import Cell, compare_paired, summarize
from megatron.paper.kernel_figures import kernel_bias
from megatron.paper.run_results import ResultSet, beyond_window
from megatron.paper.suite_file import DataSet
from megatron.paper.tables import Block, Column, Entry, Row, Table

_EXPLODES = 2.0
"""A method explodes if its perplexity at the longest length is this many times that at 1x."""
_BEYOND = 8
"""T5 must be worse than log from this multiple of the training length on."""


class Verdict(str, Enum):
    AGREES = "agrees"
    PARTLY = "partly"
    DISAGREES = "disagrees"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Finding:
    claim: str
    data: str
    verdict: Verdict
    evidence: str


@dataclass(frozen=True)
class _View:
    """Perplexities of one data set by method and length."""

    results: ResultSet
    split: str
    data: DataSet

    @property
    def train_length(self) -> int:
        return self.results.train_length(self.data.name) or 1

    def seeds(self, name: str) -> dict[int, dict[int, float]]:
        return self.results.perplexities(self.split, self.data.name, name)

    def pairs(self, first: str, second: str) -> dict[int, tuple[float, float]]:
        """Means of two methods by length, over the seeds that both have."""
        result, others = {}, self.seeds(second)
        for length, one in self.seeds(first).items():
            two = others.get(length, {})
            common = sorted(set(one) & set(two))
            means = [summarize(seeds[seed] for seed in common).mean for seeds in (one, two)]
            if means[0] is not None and means[1] is not None:
                result[length] = (means[0], means[1])
        return result


_Check = Callable[[_View], tuple[Verdict, str]]
_NOTHING = (Verdict.NOT_MEASURED, "no results")


def _below_everywhere(better: str, worse: str) -> _Check:
    def check(view: _View) -> tuple[Verdict, str]:
        common = view.pairs(better, worse)
        if not common:
            return _NOTHING
        exceptions = [length for length, (one, two) in common.items() if one >= two]
        verdict = _by_exceptions(len(exceptions), len(common))
        return verdict, f"lower at {len(common) - len(exceptions)} of {len(common)} lengths" + (
            f"; not at {_listed(exceptions)}" if exceptions else ""
        )

    return check


def _by_exceptions(exceptions: int, total: int) -> Verdict:
    if exceptions == 0:
        return Verdict.AGREES
    return Verdict.PARTLY if 2 * exceptions < total else Verdict.DISAGREES


def _listed(lengths: list[int]) -> str:
    return ", ".join(str(length) for length in lengths)


def _log_not_behind_power(view: _View) -> tuple[Verdict, str]:
    """Behind means a higher mean; significantly behind means the paired test says so."""
    common = view.pairs("kerple_log", "kerple_power")
    if not common:
        return _NOTHING
    behind = [length for length, (first, second) in common.items() if first > second]
    log, power = view.seeds("kerple_log"), view.seeds("kerple_power")
    if behind and not any(len(set(log[length]) & set(power[length])) > 1 for length in behind):
        where = f"above power's at {len(behind)} of {len(common)} lengths, one seed, untested"
        return _by_exceptions(len(behind), len(common)), where
    significant = [
        length
        for length in behind
        if compare_paired(power[length], log[length]).reference_is_better
    ]
    if not behind:
        return Verdict.AGREES, f"mean not above power's at any of {len(common)} lengths"
    verdict = Verdict.DISAGREES if significant else Verdict.PARTLY
    note = f"significantly at {_listed(significant)}" if significant else "never significantly"
    return verdict, f"mean above power's at {_listed(behind)}, {note}"


def _t5_best_at_train_length(view: _View) -> tuple[Verdict, str]:
    rivals = {
        name: pair
        for name in ("kerple_log", "kerple_power", "alibi", "rotary", "sinusoidal")
        if (pair := view.pairs("rpe", name).get(view.train_length)) is not None
    }
    if not rivals:
        return _NOTHING
    name, (own, best) = max(rivals.items(), key=lambda item: item[1][0] - item[1][1])
    text = f"{label_of('rpe')} {own:.3f}, closest rival {best:.3f} ({label_of(name)})"
    return (Verdict.AGREES if own < best else Verdict.DISAGREES), text


def _t5_worse_far_out(view: _View) -> tuple[Verdict, str]:
    pairs = view.pairs("kerple_log", "rpe")
    far = {n: pair for n, pair in pairs.items() if n >= _BEYOND * view.train_length}
    if not far:
        return _NOTHING
    exceptions = [length for length, (log, t5) in far.items() if t5 <= log]
    log, t5 = label_of("kerple_log"), label_of("rpe")
    text = ", ".join(
        f"{n}: {t5} {second:.3g}, {log} {first:.3g}" for n, (first, second) in far.items()
    )
    return _by_exceptions(len(exceptions), len(far)), text


def _explodes(*names: str) -> _Check:
    def check(view: _View) -> tuple[Verdict, str]:
        factors = {}
        for name in names:
            means = {n: summarize(own.values()).mean for n, own in view.seeds(name).items()}
            longest, start = max(means, default=0), means.get(view.train_length)
            if len(means) > 1 and start is not None:
                factors[name] = ((means[longest] or 0.0) / start, longest)
        if len(factors) < len(names):
            return _NOTHING
        exploding = [name for name, (factor, _) in factors.items() if factor >= _EXPLODES]
        text = ", ".join(
            f"{label_of(name)} x{factor:.3g} at {length}"
            for name, (factor, length) in factors.items()
        )
        return _by_exceptions(len(names) - len(exploding), len(names)), text

    return check


def _no_clear_advantage(view: _View) -> tuple[Verdict, str]:
    """The paper calls 3-para-log "slightly better" at most: within two percent of log."""
    common = view.pairs("kerple_log", "kerple_log3")
    if not common:
        return _NOTHING
    gains = {length: 1 - rival / log for length, (log, rival) in common.items()}
    exceptions = [length for length, gain in gains.items() if gain > 0.02]
    best = max(gains.values())
    text = f"at most {best:.1%} below log" if best > 0 else "never below log"
    return _by_exceptions(len(exceptions), len(common)), text


def _against_window(name: str, *, below: bool) -> _Check:
    """Beyond the training length, against log's own loss in a window of that length."""

    def check(view: _View) -> tuple[Verdict, str]:
        own, log = (view.results.of(view.data.name, each) for each in (name, "kerple_log"))
        tests = beyond_window(own, log, view.split)
        apart = {length: test.mean or 0.0 for length, test in tests.items()}
        if not apart:
            return _NOTHING
        exceptions = [length for length, mean in apart.items() if (mean < 0) != below]
        text = ", ".join(f"{mean:+.4f} nats at length {length}" for length, mean in apart.items())
        return _by_exceptions(len(exceptions), len(apart)), f"loss minus the window's: {text}"

    return check


_Claim = tuple[str, tuple[str, ...], _Check]
"""Text of the claim, the methods that a suite needs for it, and its check."""


def _claims() -> tuple[_Claim, ...]:
    log, power, alibi, t5 = (label_of(n) for n in ("kerple_log", "kerple_power", "alibi", "rpe"))
    weight, bias, log3 = (label_of(n) for n in ("gauss_wht2", "gauss_bias3", "kerple_log3"))
    worse = f"at least x{_EXPLODES:g}"
    return (
        (f"{log} is below {alibi} at every length",
               ("kerple_log", "alibi"), _below_everywhere("kerple_log", "alibi")),
        (f"{log} is at least as good as {power}",
               ("kerple_log", "kerple_power"), _log_not_behind_power),
        (f"{t5} is best at the training length",
               ("rpe", "kerple_log"), _t5_best_at_train_length),
        (f"{t5} is worse than {log} from {_BEYOND}x the training length on",
               ("rpe", "kerple_log"), _t5_worse_far_out),
        *((f"{label_of(name)} explodes ({worse} at the longest length)",
                 (name,), _explodes(name))
          for name in ("rotary", "sinusoidal")),
        (f"{log3} has no clear advantage over {log} (within 2%)",
               ("kerple_log3", "kerple_log"), _no_clear_advantage),
        (f"Gaussian-like biases fail to extrapolate ({worse})",
               ("gauss_bias2", "gauss_bias3"), _explodes("gauss_bias2", "gauss_bias3")),
        (f"a Gaussian-like weight ({weight}) beats the bias ({bias})",
               ("gauss_wht2", "gauss_bias3"), _below_everywhere("gauss_wht2", "gauss_bias3")),
        (f"{log} uses what lies beyond the training length: below its own window",
               ("kerple_log",), _against_window("kerple_log", below=True)),
        (f"{alibi} lies above {log} in a window",
               ("alibi", "kerple_log"), _against_window("alibi", below=False)),
    )  # fmt: skip


def check_claims(results: ResultSet, split: str, data: tuple[DataSet, ...]) -> list[Finding]:
    """Every claim about methods that the suite has; those without results say "not measured"."""
    findings = []
    for claim, methods, check in _claims():
        for item in data:
            here = {found.run.method for found in results.runs if found.run.data == item.name}
            if here.issuperset(methods):
                verdict, evidence = check(_View(results, split, item))
                findings.append(Finding(claim, item.title, verdict, evidence))
    return findings


# The theory, on the kernels that a suite has trained: a section of its report.

POINTS = (4, 16, 64, 128)
_TOO_STEEP = 2.1
_CAPTION = (
    "Every head of every trained kernel (how many, in brackets) on that many points: is it "
    "conditionally positive definite (CPD, Corollary 1: no negative eigenvalue on coefficients "
    "that sum to zero), and the largest c that a head needs for c + kernel to be positive definite "
    "(Lemma 1). c grows with the number of points, without end where a kernel has no lower bound; "
    "nothing is computed with it, as softmax cancels it. Last, -d^2.1: an exponent above 2 is not "
    "CPD (Proposition 1). `tools/check_kernel.py` does the same for any kernel."
)


def cpd_table(results: ResultSet, methods: Sequence[str], heads: int) -> Table | None:
    """Rows of the suite's kernels and of the counterexample; None without a trained kernel."""
    rows = []
    for name in dict.fromkeys(methods):
        tables = list(_biases(results, name, heads))
        if tables:
            rows.append(_row(f"{label_of(name)} ({len(tables)})", tables))
    if not rows:
        return None
    steep = -torch.arange(max(POINTS), dtype=torch.float64).pow(_TOO_STEEP)
    rows.append(_row(f"power with exponent {_TOO_STEEP:g}", [steep]))
    columns = tuple(Column(f"{points} points") for points in POINTS)
    return Table("cpd", _CAPTION, (Block("", "", columns, tuple(rows)),))


def _biases(results: ResultSet, name: str, heads: int) -> Iterable[Tensor]:
    """A table per head of every run that logged its kernel."""
    for item in results.runs:
        if item.run.method == name and item.kernel:
            bias = kernel_bias(name, item.kernel, heads, max(POINTS))
            yield from torch.from_numpy(bias) if bias is not None else ()


def _row(label: str, tables: Sequence[Tensor]) -> Row:
    return Row(label, tuple(Entry(_cell(tables, points)) for points in POINTS))


def _cell(tables: Sequence[Tensor], points: int) -> Cell:
    broken = [table for table in tables if not is_cpd(table.float(), points)]
    if broken:
        worst = min(float(cpd_margin(table, points)) for table in broken)
        text = f"not CPD ({len(broken)} of {len(tables)}), eigenvalue {worst:.2g}"
        return Cell(worst, seeds=len(tables), words=text.replace("-", "−"))
    shifts = [shift for table in tables if (shift := _shift(table, points)) is not None]
    none = len(tables) - len(shifts)
    text = f"CPD, c {max(shifts):.3g}" if shifts else "CPD"
    text += f" ({none} not strictly: none)" if none else ""
    return Cell(max(shifts, default=0.0), seeds=len(tables), words=text)


def _shift(table: Tensor, points: int) -> float | None:
    """None where the kernel is CPD but not strictly so, to the rounding of its table."""
    try:
        return smallest_shift(table, points, 0.05)
    except KernelAnalysisError:
        return None
