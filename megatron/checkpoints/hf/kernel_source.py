"""The source of a positional embedding of the user's own, cut out to travel with an export.

An exported folder is loaded without our package and without the user's: it holds the class and
those top-level statements of its module that the class needs, nothing else of the file. What would
not be there on another machine (another module of the user's, a part of our package that does not
travel) is refused by name.
"""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path

from megatron.errors import CheckpointError
from megatron.model.position_base import PositionalEmbedding

__all__ = ["OWN_KERNEL", "standalone_source"]

OWN_KERNEL = "own_kernel.py"
TRAVELLING = ("position_base", "positional_embeddings", "rotary", "input_positions")
ON_ANY_MACHINE = ("torch", "numpy", "einops")  # transformers needs torch and numpy itself


def standalone_source(cls: type[PositionalEmbedding], pos_emb: str) -> str:
    """A module with the class and what it needs, registered under the config's `pos_emb`."""
    path = inspect.getsourcefile(cls)
    if path is None:
        raise CheckpointError(f"pos_emb: {pos_emb!r}: its source is not in a file")
    text = Path(path).read_text(encoding="utf-8")
    tree = ast.parse(text)
    needed = _needed(tree, cls, pos_emb)
    # A class's segment begins after its decorators: `@register(...)` stays behind, the export
    # registers by the name in its config.
    parts = [_travelling(ast.get_source_segment(text, node) or "", node, path) for node in needed]
    return "\n\n".join(
        [
            f'"""{cls.__name__}, taken from {Path(path).name} when this folder was exported."""',
            "from __future__ import annotations",
            "from .position_base import POSITIONAL_EMBEDDINGS",
            *parts,
            f"POSITIONAL_EMBEDDINGS[{pos_emb!r}] = {cls.__name__}\n",
        ]
    )


def _needed(tree: ast.Module, cls: type, pos_emb: str) -> list[ast.stmt]:
    """The class, after every statement that binds a name it uses, in the file's order."""
    bound: dict[str, ast.stmt] = {}
    for node in tree.body:
        for name in _bindings(node):
            bound[name] = node
    own = bound.get(cls.__name__)
    if not isinstance(own, ast.ClassDef):
        raise CheckpointError(
            f"pos_emb: {pos_emb!r} is not defined at the top of its file; only such a class can "
            "travel with an export"
        )
    if any(not _is_register(decorator) for decorator in own.decorator_list):
        raise CheckpointError(
            f"pos_emb: {pos_emb!r}: decorators other than @register do not travel"
        )
    own.decorator_list = []
    chosen: set[ast.stmt] = set()
    waiting: list[ast.stmt] = [own]
    while waiting:
        node = waiting.pop()
        if node in chosen:
            continue
        chosen.add(node)
        used = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        waiting += [bound[name] for name in used if name in bound]
    return [*(node for node in tree.body if node in chosen and node is not own), own]


def _is_register(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else None
    return isinstance(called, ast.Name) and called.id == "register"


def _bindings(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [name.id for t in targets for name in ast.walk(t) if isinstance(name, ast.Name)]
    return []


def _travelling(text: str, node: ast.stmt, path: str) -> str:
    """The statement as it is; imports of our formulas made relative, others checked."""
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return text
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        home = module.removeprefix("megatron.model.")
        if node.level == 0 and module.startswith("megatron.model.") and home in TRAVELLING:
            return text.replace(f"from {module} ", f"from .{home} ", 1)
        modules = [module if node.level == 0 else "."]
    else:
        modules = [alias.name for alias in node.names]
    for module in modules:
        top = module.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ON_ANY_MACHINE:
            raise CheckpointError(
                f"{path}: the class needs `{text.splitlines()[0]}`, which does not travel with an "
                f"export. Use torch, the standard library and megatron.model.{TRAVELLING[1]} only."
            )
    return text
