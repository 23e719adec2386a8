"""Operands as Python source: what the handlers of instructions build their lines from.

A register `%r1` is the variable `r1`, an array of unsigned integers of its width (`%rd` 64 bits,
`%rs` 16, others 32) or of bool (`%p`), one element per thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.arithmetic import BITS, DTYPE, WIDTH, code_of, f4, f8, u4, u8
from tests.ptx.findings import PtxError
from tests.ptx.parsing import Instruction, Parameter

SPECIAL = {
    "%tid.x": "gang.tid", "%tid.y": "full(T, u4(0))", "%tid.z": "full(T, u4(0))",
    "%ctaid.x": "gang.ctaid[0]", "%ctaid.y": "gang.ctaid[1]", "%ctaid.z": "gang.ctaid[2]",
    "%nctaid.x": "full(T, u4(grid[0]))", "%nctaid.y": "full(T, u4(grid[1]))",
    "%nctaid.z": "full(T, u4(grid[2]))", "%laneid": "gang.lane",
    "%ntid.x": "full(T, u4(gang.block.threads))",
}  # fmt: skip
# registers that hold what nobody has set: NaN, or an address that belongs to nothing
_UNSET = {8: "u8(0x7FF8DEADDEADDEAD)", 4: "u4(0x7FC0DEAD)", 2: "u2(0x7FFD)", 1: "False"}

Handler = Callable[["Translator", Instruction], list[str]]
HANDLERS: dict[str, Handler] = {}


def handles(*opcodes: str) -> Callable[[Handler], Handler]:
    """Register a function that writes the lines of an instruction."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(opcodes, handler))
        return handler

    return register


def is_hex_float(text: str) -> bool:
    return re.match(r"0[fFdD]", text) is not None


def bits_of(kind: str) -> str:
    """The untyped kind of the same width: f32 -> b32."""
    return f"b{8 * WIDTH[kind]}"


def register_width(name: str) -> int:
    """Bytes, by a register's name without its %."""
    if name.startswith("p"):
        return 1
    return {"rd": 8, "rs": 2}.get(name[:2], 4)


def unset(name: str) -> str:
    return _UNSET[register_width(name)]


class Translator:
    """Expressions for one kernel, and the constants they name."""

    def __init__(self, parameters: list[Parameter], labels: dict[str, int]) -> None:
        self.parameters = [parameter.name for parameter in parameters]
        self.labels = labels  # label -> block of the generated code
        self.constants: dict[tuple[str, str], tuple[str, Any]] = {}

    def lines(self, instruction: Instruction) -> list[str]:
        handler = HANDLERS.get(instruction.parts[0])
        if handler is None:
            raise PtxError(f"no {instruction.opcode} (ptx line {instruction.line})")
        return handler(self, instruction)

    def constant(self, kind: str, value: Any) -> str:
        """The name of a NumPy scalar."""
        key = (kind, repr(value))
        if key not in self.constants:
            self.constants[key] = (f"K{len(self.constants)}", value)
        return self.constants[key][0]

    def _bits_constant(self, kind: str, value: int) -> str:
        width = WIDTH[kind]
        return self.constant(kind, BITS[width](value & ((1 << 8 * width) - 1)))

    def _immediate(self, text: str, kind: str) -> str:
        """A constant of the kind's dtype."""
        if kind == "pred":
            return self.constant(kind, np.bool_(int(text, 0) != 0))
        if m := re.match(r"0[fF]([0-9a-fA-F]{8})$", text):
            bits = u4(int(m[1], 16))
            value = bits.view(f4) if DTYPE[kind] is f4 else bits.astype(DTYPE[kind])
            return self.constant(kind, value)
        if m := re.match(r"0[dD]([0-9a-fA-F]{16})$", text):
            return self.constant(kind, u8(int(m[1], 16)).view(f8))
        width = WIDTH[kind]
        bits = BITS[width](int(text.rstrip("U"), 0) & ((1 << 8 * width) - 1))
        return self.constant(kind, bits.view(DTYPE[kind]) if kind in DTYPE else bits)

    def value(self, text: str, kind: str) -> str:
        """An operand as an array, or a scalar constant, of the kind's dtype."""
        if text in SPECIAL:
            return SPECIAL[text]
        if not text.startswith("%"):
            if text == "global_smem":  # where dynamic shared memory begins
                return self.constant("b32", u4(0))
            return self._immediate(text, kind)
        name = text[1:]
        if kind == "pred":
            return name
        own, width = register_width(name), WIDTH[kind]
        if own < width:
            raise PtxError(f"{text} as {kind}")
        if own > width:
            name = f"{name}.astype(u{width})"
        dtype = DTYPE[kind]
        return name if dtype is BITS[width] else f"{name}.view({code_of(dtype)})"

    def array(self, text: str, kind: str) -> str:
        """The same, an array even for a constant."""
        value = self.value(text, kind)
        return value if text.startswith("%") else f"full(T, {value})"

    def bits(self, text: str, kind: str) -> str:
        """An operand of an untyped kind, where a float may be written as well."""
        if is_hex_float(text):
            return self._bits_constant(kind, int(text[2:], 16))
        return self.value(text, kind)

    def arrays(self, texts: list[str], kind: str) -> str:
        return "[" + ", ".join(self.array(text, kind) for text in texts) + "]"

    def active(self, instruction: Instruction) -> str:
        if not instruction.predicate:
            return "None"
        return ("~" if instruction.negated else "") + instruction.predicate

    def assign(
        self, instruction: Instruction, register: str, expression: str, kind: str
    ) -> list[str]:
        """Set a register to an expression of the kind's dtype, where the predicate holds."""
        if register.strip() in ("_", "%_"):
            return []
        name = register[1:]
        if kind != "pred" and DTYPE.get(kind, u4) is not BITS[WIDTH[kind]]:
            expression = f"({expression}).view(u{WIDTH[kind]})"
        if instruction.predicate:
            expression = f"where({self.active(instruction)}, {expression}, {name})"
        return [f"{name} = {expression}"]

    def address(self, text: str, kind: str) -> str:
        """`[%rd1 + 16]`"""
        m = re.match(r"^([%\w$.]+)\s*(?:\+\s*(-?\d+))?$", text.strip()[1:-1].strip())
        if m is None:
            raise PtxError(f"address {text}")
        base, offset = self.array(m[1], kind), int(m[2] or 0)
        return f"({base} + {self._bits_constant(kind, offset)})" if offset else base
