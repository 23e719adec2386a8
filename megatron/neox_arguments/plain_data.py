"""Config values are plain data: nested mappings and lists of text, numbers, booleans and null."""

from __future__ import annotations

from typing import Any

from .errors import ConfigError

MAX_DEPTH = 16
MAX_NODES = 100_000


class _Copier:
    def __init__(self, source: str) -> None:
        self.source = source
        self.nodes = 0

    def copy(self, value: Any, where: str, depth: int) -> Any:
        self.nodes += 1
        if depth > MAX_DEPTH:
            raise ConfigError(
                f"{self.source}: {where[:80]} is nested more than {MAX_DEPTH} levels deep."
            )
        if self.nodes > MAX_NODES:
            raise ConfigError(f"{self.source}: more than {MAX_NODES} values; is this a config?")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int | float):
            return self._number(value, where)
        if isinstance(value, str):
            return self._text(value, where)
        if isinstance(value, dict):
            return {
                self._key(key, where): self.copy(item, f"{where}.{key}", depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [
                self.copy(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)
            ]
        raise ConfigError(
            f"{self.source}: {where[:80]} is a {type(value).__name__}; only text, numbers, "
            "booleans, null, lists and mappings are allowed."
        )

    def _number(self, value: float, where: str) -> int | float:
        if isinstance(value, float):
            return float(value)
        if abs(value) > 2**63:
            raise ConfigError(f"{self.source}: {where[:80]} is a number beyond 64 bits.")
        return int(value)

    def _key(self, key: Any, where: str) -> str:
        if not isinstance(key, str):
            raise ConfigError(
                f"{self.source}: {key!r:.80} in {where[:80]} is not a text key; quote it."
            )
        return self._text(key, where)

    def _text(self, value: str, where: str) -> str:
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{self.source}: {ascii(where)[:80]} holds characters that are not Unicode text."
            ) from error
        return str(value)


def copy_plain(values: Any, source: str) -> dict[str, Any]:
    """A deep copy of a mapping of plain data; ConfigError for anything else."""
    if not isinstance(values, dict):
        raise ConfigError(
            f"{source}: a config is a mapping of keys to values, this is a "
            f"{type(values).__name__}. Write lines like `train_iters: 1000`."
        )
    copied = _Copier(source).copy(values, "config", 0)
    assert isinstance(copied, dict)
    return copied
