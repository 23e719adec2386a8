"""How each positional embedding is called and drawn in tables and figures."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LineStyle", "label_of", "line_style"]

_LABELS = {
    "kerple_log": "KERPLE-log",
    "kerple_power": "KERPLE-power",
    "alibi": "ALiBi",
    "rpe": "T5 bias",
    "rotary": "Rotary",
    "sinusoidal": "Sinusoidal",
    "kerple_log3": "KERPLE 3-para-log",
    "kerple_bias_wht": "KERPLE bias+wht",
    "gauss_wht1": "1-para-wht",
    "gauss_wht2": "2-para-wht",
    "gauss_bias2": "2-para-bias",
    "gauss_bias3": "3-para-bias",
    "sandwich": "Sandwich",
    "learned": "Learned",
    "none": "NoPE",
}


def label_of(name: str) -> str:
    """The one name a person reads; an embedding of the user's own is shown under its own."""
    return _LABELS.get(name, name)


@dataclass(frozen=True)
class LineStyle:
    color: str = "#555555"
    marker: str = "o"
    dashes: str = "-"


# Okabe and Ito's palette, distinguishable with every common colour vision; markers and dashes
# repeat the information for black-and-white print.
_BLUE, _SKY, _ORANGE, _GREEN = "#0072B2", "#56B4E9", "#E69F00", "#009E73"
_VERMILION, _PURPLE, _BLACK, _GREY = "#D55E00", "#CC79A7", "#000000", "#7F7F7F"

_STYLES = {
    "kerple_log": LineStyle(_BLUE, "o"),
    "kerple_power": LineStyle(_SKY, "s", "--"),
    "alibi": LineStyle(_ORANGE, "^"),
    "rpe": LineStyle(_GREEN, "D"),
    "rotary": LineStyle(_VERMILION, "v"),
    "sinusoidal": LineStyle(_PURPLE, "X"),
    "kerple_log3": LineStyle(_BLACK, "P", "--"),
    "kerple_bias_wht": LineStyle(_GREY, "h", "-."),
    "gauss_wht1": LineStyle(_ORANGE, "<", ":"),
    "gauss_wht2": LineStyle(_VERMILION, ">", "--"),
    "gauss_bias2": LineStyle(_PURPLE, "p", "-."),
    "gauss_bias3": LineStyle(_GREEN, "*", ":"),
    "sandwich": LineStyle(_BLACK, "d", ":"),
    "learned": LineStyle(_GREY, "x", ":"),
    "none": LineStyle(_BLACK, "+", "-."),
}


def line_style(name: str) -> LineStyle:
    return _STYLES.get(name, LineStyle())
