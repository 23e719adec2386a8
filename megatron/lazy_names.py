"""Names of a package that are imported on first use (PEP 562).

A light module of a package can then be imported without what its heavier modules need.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of `package`; `modules` maps a module to its names, blanks between them."""
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(module_of[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    return __getattr__
