"""KERPLE-NeoX: language models that work beyond their training length.

    from kerple import attention, kernel, load_pretrained, use_kerple, warmup

Each name is imported on first use, so that `import kerple` imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.errors import MissingPackageError
from megatron.lazy_names import lazy_names
from megatron.machine import set_deepspeed_accelerator
from megatron.terminal import describe_error

if TYPE_CHECKING:
    from kerple.integrations.transformers_models import use_kerple
    from megatron.engines.cpp_build import warmup
    from megatron.engines.dispatch import attention
    from megatron.generation.pretrained import load_pretrained
    from megatron.model.position_names import kernel

__all__ = ["__version__", "attention", "kernel", "load_pretrained", "use_kerple", "warmup"]
__version__ = "0.2.0"

_lazy = lazy_names(
    __name__,
    {
        "kerple.integrations.transformers_models": "use_kerple",
        "megatron.engines.cpp_build": "warmup",
        "megatron.engines.dispatch": "attention",
        "megatron.model.position_names": "kernel",
        "megatron.generation.pretrained": "load_pretrained",
    },
)


def __getattr__(name: str) -> Any:
    """Import a public function on first use; MissingPackageError where it needs [train]."""
    try:
        if name == "load_pretrained":
            set_deepspeed_accelerator()
        return _lazy(name)
    except ModuleNotFoundError as error:
        text = describe_error(error)
        if text is None:
            raise
        raise MissingPackageError(f"kerple.{name}: {text}") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
