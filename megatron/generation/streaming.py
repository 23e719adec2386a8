"""Text on the screen as it is sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["TextStream"]

UNFINISHED = "\ufffd"  # what a decoder shows for bytes that are not a whole character yet


class TextStream:
    """Turns a growing list of tokens into pieces of text, each said once.

    A character may be spread over several tokens, and a stop string must not be half shown before
    it is cut off: what may still change is held back until `end`.
    """

    def __init__(
        self,
        detokenize: Callable[[list[int]], str],
        say: Callable[[str], None],
        stop_strings: Sequence[str] = (),
    ) -> None:
        self._detokenize, self._say = detokenize, say
        self._stop_strings = stop_strings
        self._held_back = max((len(stop) for stop in stop_strings), default=1) - 1
        self._said = 0
        self.tokens: list[int] = []

    def show(self, tokens: list[int]) -> None:
        """All tokens so far."""
        self.tokens = list(tokens)
        text = self._detokenize(self.tokens)
        for stop in self._stop_strings:
            text = text.split(stop)[0]
        safe = len(text.rstrip(UNFINISHED)) - self._held_back
        if safe > self._said:
            self._say(text[self._said : safe])
            self._said = safe

    def end(self, text: str) -> None:
        """The final text, of which a beginning was shown."""
        self._say(text[self._said :])
        self._said = len(text)
