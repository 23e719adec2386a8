"""Makes the `lm_eval` command know `--model kerple_neox`.

lm-eval 0.4.13 finds models in a table inside its own package (`lm_eval.models.MODEL_MAPPING`) and
asks neither entry points nor `--include_path` for others. So a one-line `.pth` file imports this
module when Python starts, and this module waits: once somebody imports `lm_eval.models`, our name
is added to the registry, as a reference that is followed only if the model is asked for.

    python -m megatron.evaluation.lm_eval_hook install      (once per environment)
    python -m megatron.evaluation.lm_eval_hook remove
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

WATCHED = "lm_eval.models"
MODEL = "kerple_neox"
TARGET = "megatron.evaluation.lm_eval_adapter:KerpleNeoXLM"
PTH_NAME = "kerple_neox_lm_eval.pth"
PTH_TEXT = "import megatron.evaluation.lm_eval_hook as hook; hook.watch()\n"


class _RegisteringLoader(Loader):
    """Loads a module with its own loader, then registers our model."""

    def __init__(self, own: Loader) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._own.exec_module(module)
        register()


class _Watcher(MetaPathFinder):
    """Stands in the way of one import only."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != WATCHED:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


def register() -> None:
    """Add our model to lm-eval's registry, unless it is there."""
    from lm_eval.api.registry import model_registry

    if MODEL not in model_registry:
        model_registry.register(MODEL, target=TARGET)


def watch() -> None:
    """Register as soon as lm-eval's models are imported; now, if they already are."""
    if WATCHED in sys.modules:
        register()
    elif not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher())


def main(argv: Sequence[str]) -> int:
    """Write or delete the `.pth` file of this environment."""
    import sysconfig
    from pathlib import Path

    file = Path(sysconfig.get_path("purelib")) / PTH_NAME
    if list(argv) == ["install"]:
        package = Path(__file__).resolve().parents[2]
        installed = Path(sysconfig.get_path("purelib")) == package
        file.write_text(("" if installed else f"{package}\n") + PTH_TEXT, encoding="utf-8")
        print(f"{file}: lm_eval --model {MODEL} now works in this environment")
        return 0
    if list(argv) == ["remove"]:
        file.unlink(missing_ok=True)
        print(f"{file}: removed")
        return 0
    print(
        "usage: python -m megatron.evaluation.lm_eval_hook {install,remove}\n"
        f"Adds --model {MODEL} to this environment's lm_eval command, or takes it away.",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
