"""PTX text to instructions, labels, parameters and the Triton lines they come from."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tests.ptx.findings import PtxError


@dataclass(frozen=True)
class Instruction:
    """`@!%p1 add.s32 %r1, %r2, 4;`"""

    line: int
    predicate: str | None  # a register's name
    negated: bool
    opcode: str
    operands: list[str]

    @property
    def parts(self) -> list[str]:
        """The opcode and its modifiers."""
        return self.opcode.split(".")

    @property
    def kind(self) -> str:
        """The type that the opcode names last."""
        return self.parts[-1]

    @property
    def branches(self) -> bool:
        return self.opcode.startswith("bra")


@dataclass(frozen=True)
class Parameter:
    name: str
    kind: str


@dataclass
class Module:
    """The one kernel of a PTX text."""

    name: str
    threads: int
    parameters: list[Parameter]
    items: list[Instruction | str] = field(default_factory=list)  # a label is a string
    source: dict[int, str] = field(default_factory=dict)  # line of PTX -> file:line of Triton


def split_operands(text: str) -> list[str]:
    """At commas outside of all brackets."""
    out, depth, start = [], 0, 0
    for i, character in enumerate(text):
        if character in "{[(":
            depth += 1
        elif character in "}])":
            depth -= 1
        elif character == "," and depth == 0:
            out.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*out, last] if last else out


def registers_of(text: str) -> list[str]:
    """`{%r1, %r2}` or `%r1`."""
    return split_operands(text[1:-1]) if text.startswith("{") else [text]


def parse(ptx: str) -> Module:
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), ptx, flags=re.S)
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", text)
    name = re.search(r"\.entry\s+(\w+)", text)
    if threads is None or name is None:
        raise PtxError("no kernel with a fixed number of threads")
    parameter = r"\.param\s+\.(\w+)(?:\s+\.ptr[^,\n)]*?)?\s+(\w+_param_\d+)"
    parameters = [Parameter(m[2], m[1]) for m in re.finditer(parameter, text)]
    module = Module(name[1], int(threads[1]), parameters)
    _read_body(module, text)
    branches = (i for i in module.items if isinstance(i, Instruction) and i.branches)
    targets = {i.operands[0] for i in branches}
    module.items = [x for x in module.items if isinstance(x, Instruction) or x in targets]
    return module


def _read_body(module: Module, text: str) -> None:
    files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text))
    where, inside = "", False
    statements = _Statements(module)
    for number, raw in enumerate(text.splitlines(), 1):
        line, _, comment = (part.strip() for part in raw.partition("//"))
        if not inside:
            inside = line.startswith("{")
            continue
        if line.startswith(".loc"):
            where = _triton_line(line, comment, files)
            continue
        if line.startswith("}") and not statements.open:
            continue
        if line.startswith("{") and not statements.open:
            line = line[1:].strip()
        if line.startswith((".section", ".file")):
            break
        module.source[number] = where
        if label := re.match(r"^(\$?\w[\w$]*):$", line):
            module.items.append(label[1])
        elif line and not line.startswith((".pragma", ".reg")):
            statements.add(line, number)


def _triton_line(line: str, comment: str, files: dict[str, str]) -> str:
    """file:line of a `.loc`; of an inlined function, those of its callers as well."""
    inlined = re.findall(r"(\w+\.py):(\d+):", comment)
    if len(inlined) > 1:
        return " < ".join(f"{a}:{b}" for a, b in inlined)
    if told := re.search(r"(\w+\.py):(\d+)", comment):
        return f"{told[1]}:{told[2]}"
    _, file, number, *_ = line.split()
    return f"{files.get(file, file)}:{number}"


class _Statements:
    """Several statements may share a line; one may span lines."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.open, self.line = "", 0

    def add(self, text: str, number: int) -> None:
        for piece in re.split(r"(;)", text):
            if piece == ";":
                if self.open.strip():
                    self.module.items.append(_instruction(self.open.strip(), self.line))
                self.open = ""
            elif piece.strip():
                if not self.open:
                    self.line = number
                self.open += " " + piece.strip()


def _instruction(text: str, line: int) -> Instruction:
    m = re.match(r"(?:@(!?)%(\w+)\s+)?([\w.:]+)\s*(.*)$", text, flags=re.S)
    if m is None:
        raise PtxError(f"cannot read {text!r}")
    return Instruction(line, m[2], m[1] == "!", m[3], split_operands(m[4]))
