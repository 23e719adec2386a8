"""Columns line up, in a terminal and in Markdown, and nothing global is touched."""

from __future__ import annotations

from megatron.evaluation.text_tables import text_table


def test_columns_under_a_line() -> None:
    assert text_table(["split", "ppl"], [["valid", 3.0], ["test", None]]) == (
        "split     ppl\n-----  ------\nvalid  3.0000\n test       -"
    )
    assert text_table(["a", "b"], []) == "a  b\n-  -"


def test_markdown_and_plain() -> None:
    rows = [["a", 1], ["bcd", 22]]
    assert text_table(["run", "n"], rows, ["left"], "pipe") == (
        "| run |  n |\n|:----|---:|\n| a   |  1 |\n| bcd | 22 |"
    )
    assert text_table(["run", "n"], rows, ["left", "left"], "plain") == "run  n\na    1\nbcd  22"


def test_colours_take_no_column_and_wide_letters_take_two() -> None:
    table = text_table(["x"], [["\033[1;32m7\033[0m"], ["中文"], ["±"]])
    assert table.splitlines() == ["   x", "----", "   \033[1;32m7\033[0m", "中文", "   ±"]
