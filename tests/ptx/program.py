"""A kernel's PTX as one Python function: a loop over blocks, one line per instruction."""

from __future__ import annotations

import functools
from collections.abc import Callable
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


program_of = functools.cache(Program)
