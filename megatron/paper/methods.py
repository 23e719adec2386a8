"""How each positional embedding is called and drawn in tables and figures."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["METHODS", "Method", "method"]


@dataclass(frozen=True)
class Method:
    """Display names and line style of one `pos_emb`.

    `label` stands alone ("KERPLE-log"); `column` stands under `group` in a table's head.
    """

    name: str
    label: str
    column: str
    group: str = ""
    color: str = "#555555"
    marker: str = "o"
    dashes: str = "-"


# Okabe and Ito's palette, distinguishable with every common colour vision; markers and dashes
# repeat the information for black-and-white print.
_BLUE, _SKY, _ORANGE, _GREEN = "#0072B2", "#56B4E9", "#E69F00", "#009E73"
_VERMILION, _PURPLE, _BLACK, _GREY = "#D55E00", "#CC79A7", "#000000", "#7F7F7F"

METHODS: dict[str, Method] = {
    entry.name: entry
    for entry in (
        Method("kerple_log", "KERPLE-log", "(log)", "KERPLE", _BLUE, "o"),
        Method("kerple_power", "KERPLE-power", "(power)", "KERPLE", _SKY, "s", "--"),
        Method("alibi", "ALiBi", "ALiBi", "", _ORANGE, "^"),
        Method("rpe", "T5 bias", "T5", "", _GREEN, "D"),
        Method("rotary", "Rotary", "Rotary", "", _VERMILION, "v"),
        Method("sinusoidal", "Sinusoidal", "Sinusoidal", "", _PURPLE, "X"),
        Method("kerple_log3", "KERPLE 3-para-log", "(3-para-log)", "", _BLACK, "P", "--"),
        Method("kerple_bias_wht", "KERPLE bias+wht", "(bias+wht)", "", _GREY, "h", "-."),
        Method("gauss_wht1", "1-para-wht", "1-para-wht", "", _ORANGE, "<", ":"),
        Method("gauss_wht2", "2-para-wht", "2-para-wht", "", _VERMILION, ">", "--"),
        Method("gauss_bias2", "2-para-bias", "2-para-bias", "", _PURPLE, "p", "-."),
        Method("gauss_bias3", "3-para-bias", "3-para-bias", "", _GREEN, "*", ":"),
        Method("sandwich", "Sandwich", "Sandwich", "", _BLACK, "d", ":"),
        Method("learned", "Learned", "Learned", "", _GREY, "x", ":"),
        Method("none", "NoPE", "NoPE", "", _BLACK, "+", "-."),
    )
}


def method(name: str) -> Method:
    """Display data of a method; an embedding of the user's own is shown under its own name."""
    return METHODS.get(name) or Method(name, name, name)
