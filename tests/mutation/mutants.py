"""Small faults in a source file: one expression or statement replaced by another.

Comparisons flipped, `and` and `or` exchanged, conditions negated, numbers moved by one, arithmetic
exchanged, calls and raises left out, results dropped. Text and annotations stay.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

OPPOSITE: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
QUIET = ("print", "warn", "say")
"""Calls whose leaving out changes messages alone."""


@dataclass(frozen=True)
class Mutant:
    line: int
    start: int
    stop: int
    """Characters of the source that are replaced."""
    old: str
    new: str
    statement: range
    """The lines of its statement, of a compound one those of its head."""
    identity: str
    """What it changes in which function, and which of several: no line number, so that it stays."""

    def apply(self, source: str) -> str:
        """The broken source; all else stays on its line."""
        lost = "\n" * (self.old.count("\n") - self.new.count("\n"))
        end = len(self.new) - self.new.endswith(")")
        new = self.new[:end] + lost + self.new[end:]
        return source[: self.start] + new + source[self.stop :]

    def __str__(self) -> str:
        return f"{self.line}: {' '.join(self.old.split())[:70]}  ->  {self.new[:70]}"


def mutants_of(source: str) -> list[Mutant]:
    """Every mutant of a module, in the order of the file."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def place(line: int, column: int) -> int:
        """A character's number; the parser counts columns in bytes."""
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    tree = ast.parse(source)
    found = set()
    for node, replacement in _changes(tree):
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None and node.end_col_offset is not None
        first = place(node.lineno, node.col_offset)
        last = place(node.end_lineno, node.end_col_offset)
        new = ast.unparse(ast.fix_missing_locations(replacement))
        found.add((node.lineno, first, last, f"({new})" if isinstance(node, ast.expr) else new))
    statements, functions = _lines_of_statements(tree), _functions(tree)
    seen: Counter[str] = Counter()
    mutants = []
    for line, first, last, new in sorted(found, key=lambda item: item[1:]):
        old = source[first:last]
        change = f"{functions.get(line, '')}: {' '.join(old.split())} -> {' '.join(new.split())}"
        seen[change] += 1
        identity = change if seen[change] == 1 else f"{change} ({seen[change]})"
        mutants.append(Mutant(line, first, last, old, new, statements[line], identity))
    return mutants


def _lines_of_statements(tree: ast.AST) -> dict[int, range]:
    """For each line its innermost statement: the walk goes from the outside in."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            start = getattr(node, "lineno", None) or node.pattern.lineno  # type: ignore[union-attr]
            body = getattr(node, "body", None)
            stop = body[0].lineno if body else node.end_lineno + 1  # type: ignore[union-attr]
            lines = range(start, max(stop, start + 1))
            found |= dict.fromkeys(lines, lines)
    return found


def _functions(tree: ast.AST, outside: str = "") -> dict[int, str]:
    """For each line of a function or class its dotted name."""
    found: dict[int, str] = {}
    for node in ast.iter_child_nodes(tree):
        name = outside
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = f"{outside}.{node.name}".lstrip(".")
            assert node.end_lineno is not None
            found |= dict.fromkeys(range(node.lineno, node.end_lineno + 1), name)
        found |= _functions(node, name)
    return found


def _changes(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Nodes and what could stand in their place."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.JoinedStr):
            continue  # text
        yield from _replacements(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases"):
                continue
            children = value if isinstance(value, list) else [value]
            stack += [child for child in children if isinstance(child, ast.AST)]


def _replacements(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=others):
            yield node, ast.Compare(left, [_opposite(op)], others)
        case ast.BoolOp(op=op, values=values):
            yield node, ast.BoolOp(_opposite(op), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, operand
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPPOSITE:
            if not any(isinstance(side, ast.JoinedStr) for side in (left, right)):
                yield node, ast.BinOp(left, _opposite(op), right)
        case ast.Constant(value=bool(value)):
            yield node, ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield node, ast.Constant(value + 1)
        case ast.Expr(value=ast.Call(func=called)) if _name(called) not in QUIET:
            yield node, ast.Pass()
        case ast.Raise() | ast.AugAssign():
            yield node, ast.Pass()
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield node, ast.Return(ast.Constant(None))
    if isinstance(node, ast.If | ast.While | ast.IfExp) and _name(node.test) != "TYPE_CHECKING":
        yield node.test, ast.UnaryOp(ast.Not(), node.test)


def _opposite(op: ast.AST) -> ast.AST:
    return OPPOSITE[type(op)]()


def _name(called: ast.AST) -> str:
    return getattr(called, "attr", getattr(called, "id", ""))
