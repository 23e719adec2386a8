"""Does the emulator see broken code? Change one line of PTX at a time and look.

A change is seen if a number leaves its tolerance or a check finds something. Some changes are
harmless, and must not be seen; `UNSEEN` says why a kind may be.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.ptx.comparison import AttentionCase, Outcome, run_case

CASE = AttentionCase(160, 200, 64, heads=1)
KERNELS = ("forward", "dkdv", "dq", "band")


@dataclass(frozen=True)
class Mutation:
    """`pattern` in one line of PTX becomes `new`."""

    name: str
    pattern: str
    new: str
    unseen: str  # why a change of this kind may go unseen
    arch: int = 80


MUTATIONS = (
    Mutation(
        "barrier removed", r"^\s*bar\.sync\s+0;", "",
        "another barrier stands between the same write and read",
    ),
    Mutation(
        "wait for cp.async removed", r"^\s*cp\.async\.wait_group\s+\d+;", "",
        "a later wait comes before the first read",
    ),
    Mutation(
        "wait for one group less", r"^(\s*cp\.async\.wait_group\s+)0;", r"\g<1>1;",
        "no group is under way there: the wait before the end of the kernel",
    ),
    Mutation(
        "mma with swapped operand registers",
        r"(mma\.sync\S+ \{[^}]*\}, \{ )(%r\d+), (%r\d+)", r"\1\3, \2", "-",
    ),
    Mutation(
        "ldmatrix not transposed", r"x4\.trans\.shared", "x4.shared", "-",
    ),
    Mutation(
        "predicate of a load dropped", r"^(\s*)@%p\d+ (ld\.global)", r"\1\2",
        "rows beyond the end lie in padded workspaces: the load is legal, and its value masked",
    ),
    Mutation(
        "zero fill of cp.async dropped", r"(cp\.async\.c[ag]\S+ .*0x10), %r\d+;", r"\1;",
        "all rows of that copy exist in this case, or lie in padded workspaces",
    ),
    Mutation(
        "butterfly shuffle with another lane",
        r"(shfl\.sync\.bfly\.b32 \s*%r\d+, %r\d+, )2,", r"\g<1>1,",
        "the row's maximum: any finite reference gives the same softmax",
    ),
    Mutation(
        "wait for wgmma removed", r"^\s*wgmma\.wait_group[^;]*;", "",
        "nothing uses the result before a later wait, and the operands are not overwritten", 90,
    ),
    Mutation(
        "proxy fence removed", r"^\s*fence\.proxy[^;]*;", "",
        "another fence stands between the same write and product", 90,
    ),
)  # fmt: skip


def run_mutations(each: int, seed: int, show: Callable[[str], None] = print) -> str:
    """`each` changes of every kind in every kernel; a table of how many were seen."""
    rows = [("change", "GPU", "seen", "unseen ones"), ("---",) * 4]
    seen = total = 0
    for mutation in MUTATIONS:
        results = [
            result
            for kernel in KERNELS
            for result in _run_kind(mutation, kernel, each, random.Random(seed), show)
        ]
        seen, total = seen + sum(results), total + len(results)
        unseen = "-" if all(results) else mutation.unseen
        share = f"{sum(results)} of {len(results)}"
        rows.append((mutation.name, f"sm_{mutation.arch}", share, unseen))
    rows.append(("all", "", f"{seen} of {total}", ""))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _run_kind(
    mutation: Mutation, kernel: str, each: int, draw: random.Random, show: Callable[[str], None]
) -> list[bool]:
    case = replace(CASE, arch=mutation.arch)
    text = _ptx_of(kernel, mutation.arch).splitlines()
    places = [n for n, line in enumerate(text) if re.search(mutation.pattern, line)]
    results = []
    for at in sorted(draw.sample(places, min(each, len(places)))):
        line = re.sub(mutation.pattern, mutation.new, text[at], count=1)
        changed = "\n".join([*text[:at], line, *text[at + 1 :]])
        outcome = _run_changed(case, kernel, changed)
        results.append(not outcome.good)
        told = [*outcome.findings, *outcome.wrong, "NOT SEEN"][0]
        show(f"{kernel} sm_{case.arch} line {at + 1}, {mutation.name}: {told[:120]}")
    return results


def _run_changed(case: AttentionCase, kernel: str, ptx: str) -> Outcome:
    def mutate(name: str, old: str) -> str:
        return ptx if name == kernel else old

    return run_case(case, mutate=mutate, track_all=True)


_known: dict[tuple[str, int], str] = {}


def _ptx_of(kernel: str, arch: int) -> str:
    if (kernel, arch) not in _known:

        def note(name: str, ptx: str) -> str:
            _known[name, arch] = ptx
            return ptx

        run_case(replace(CASE, arch=arch), mutate=note)
    return _known[kernel, arch]
