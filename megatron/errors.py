"""Every error that a user can fix: the message names the key or file, the value and the fix.

Entry points print any `KerpleError` as one line. What is not one of these is a defect of ours and
keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class KerpleError(ValueError):
    """The base of all errors here but `NonFiniteError`."""

    def __str__(self) -> str:
        """The message alone, where torch's DataLoader put a worker's traceback before it."""
        text = super().__str__()
        if not text.startswith("Caught "):
            return text
        return text.rpartition(f"{type(self).__module__}.{type(self).__name__}: ")[2].rstrip()


class MissingPackageError(KerpleError):
    """A package that is needed is not installed."""


class OutputError(KerpleError):
    """A file or folder cannot be written."""


class ConfigError(KerpleError):
    """A config is wrong."""


class DataError(KerpleError):
    """A data file, path or setting is unusable."""


class DownloadError(DataError):
    """A file could not be fetched, or is not the one that was expected."""


class TokenizerError(KerpleError):
    """A tokenizer, or a file of its vocabulary, is unusable."""


class EngineError(KerpleError):
    """An attention call, or a forced engine, cannot work."""


class PositionalEmbeddingError(KerpleError):
    """A positional embedding cannot be built with these options."""


class UnknownPositionalEmbeddingError(PositionalEmbeddingError):
    """No positional embedding has this name."""


class KernelAnalysisError(KerpleError):
    """A question about a kernel that has no answer."""


class CheckpointError(KerpleError):
    """A checkpoint cannot be read, placed or written."""


class NonFiniteError(RuntimeError):
    """A layer's output, or its gradient, is not finite; the run ends as diverged.

    Not a mistake of the user's, so no `KerpleError`: training/entry.py gives it a code of its own.
    """


class GenerationError(KerpleError):
    """Text cannot be generated with these options."""


class EvaluationError(KerpleError):
    """A task cannot be measured."""


class ReproduceError(KerpleError):
    """A suite, a run directory or a cluster setting is wrong."""


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """The advice after an unknown name: the nearest that exists, or `otherwise`."""
    close = get_close_matches(name, list(known), n=1)
    return f"Did you mean {close[0]}?" if close else otherwise
