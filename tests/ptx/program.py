"""A kernel's PTX as one Python function: a loop over blocks, one line per instruction."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

from tests.ptx import arithmetic, machine_instructions, number_instructions  # noqa: F401
from tests.ptx.expressions import Translator, unset
from tests.ptx.matrix_units import mma
from tests.ptx.parsing import Instruction, parse, registers_of

_HEAD = """\
def run(machine, parameters, grid):
    gang, block = machine.gang, 0
    T, full, where = gang.threads, np.full, np.where"""
_WRITE_NOTHING = ("st", "bar", "cp", "red", "stmatrix")
_OPEN = -1  # a product that no commit_group has closed
# registers that wgmma is still writing: commit_groups since the one that closed their product
Pending = dict[str, int]


class Program:
    """The translated kernel of one PTX module."""

    def __init__(self, ptx: str) -> None:
        self.text = ptx.splitlines()
        self.module = parse(ptx)
        self.file = f"<{self.module.name}>"  # by which tracebacks name the generated code
        self.ptx_line: dict[int, int] = {}  # line of the generated code -> line of PTX
        self.run = self._compile()

    def source_of(self, line: int) -> str:
        return self.module.source.get(line, "?")

    def describe(self, generated_line: int | None) -> str:
        """The PTX behind a line of generated code, for an error."""
        at = self.ptx_line.get(generated_line or 0)
        text = self.text[at - 1].strip() if at else "?"
        return f"ptx line {at} ({self.source_of(at or 0)}): {text}"

    def _compile(self) -> Callable[..., None]:
        blocks, labels = self._blocks()
        translator = Translator(self.module.parameters, labels)
        code = _HEAD.splitlines()
        for name in self._set_under_predicates():
            code.append(f"    {name} = full(T, {unset(name)})")
        code.append("    while True:")
        for number, block in enumerate(blocks):
            code.append(f"        {'if' if number == 0 else 'elif'} block == {number}:")
            for instruction in block:
                for line in translator.lines(instruction):
                    code.append("            " + line)
                    self.ptx_line[len(code)] = instruction.line
            code.append(f"            block = {number + 1}; continue")
        code.append("        else: raise PtxError('ran past the end')")
        names: dict[str, Any] = {**vars(arithmetic), "mma": mma}
        names |= dict(translator.constants.values())
        exec(compile("\n".join(code), self.file, "exec"), names)
        run: Callable[..., None] = names["run"]
        return run

    def _blocks(self) -> tuple[list[list[Instruction]], dict[str, int]]:
        """Instructions between labels and branches; the block that each label begins."""
        blocks: list[list[Instruction]] = [[]]
        labels = {}
        for item in self.module.items:
            if isinstance(item, str):
                blocks.append([])
                labels[item] = len(blocks) - 1
                continue
            blocks[-1].append(item)
            if item.branches:
                blocks.append([])
        return blocks, labels

    @functools.cached_property
    def unwaited(self) -> list[int]:
        """Lines that use what wgmma writes, before a wait_group has ended it on every path."""
        if "wgmma." not in "".join(self.text):
            return []
        blocks, labels = self._blocks()
        found: set[int] = set()
        known: dict[int, Pending] = {0: {}}  # at the beginning of each block
        changed = [0]
        while changed:
            number = changed.pop()
            pending = dict(known[number])
            for instruction in blocks[number]:
                if _uses(instruction) & pending.keys():
                    found.add(instruction.line)
                _pass(instruction, pending)
            for follower in _followers(blocks[number], number, labels):
                before = known.get(follower)
                both = dict(before or {})
                for name, age in pending.items():
                    both[name] = min(age, both.get(name, age))
                if both != before and follower < len(blocks):
                    known[follower] = both
                    changed.append(follower)
        return sorted(found)

    def _set_under_predicates(self) -> list[str]:
        """Registers that some threads may leave unset."""
        names: dict[str, None] = {}
        for item in self.module.items:
            if isinstance(item, Instruction) and item.predicate and not item.branches:
                names |= dict.fromkeys(_written(item))
        return list(names)


def _written(instruction: Instruction) -> list[str]:
    if not instruction.operands or instruction.parts[0] in _WRITE_NOTHING:
        return []
    names = [x for part in registers_of(instruction.operands[0]) for x in part.split("|")]
    return [name.strip()[1:] for name in names if name.strip().startswith("%")]


def _uses(instruction: Instruction) -> set[str]:
    """Registers that it reads or writes; of wgmma, not those of its sum, which it may add to."""
    operands = instruction.operands
    if instruction.opcode.startswith("wgmma.mma_async"):
        operands = operands[1:]
    return set(re.findall(r"%\w+", " ".join(operands)))


def _pass(instruction: Instruction, pending: Pending) -> None:
    """What is under way after an instruction."""
    if instruction.opcode.startswith("wgmma.mma_async"):
        pending |= dict.fromkeys(registers_of(instruction.operands[0]), _OPEN)
    elif instruction.opcode.startswith("wgmma.commit_group"):
        for name in pending:
            pending[name] += 1
    elif instruction.opcode.startswith("wgmma.wait_group"):
        allowed = int(instruction.operands[0], 0)
        for name in [name for name, age in pending.items() if age >= allowed]:
            del pending[name]


def _followers(block: list[Instruction], number: int, labels: dict[str, int]) -> Iterator[int]:
    last = block[-1] if block else None
    if last is not None and last.branches:
        yield labels[last.operands[0]]
    if last is None or last.predicate or not (last.branches or last.opcode == "ret"):
        yield number + 1


program_of = functools.cache(Program)
