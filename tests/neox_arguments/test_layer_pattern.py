"""layer_pattern: what an entry may say, and GPT-NeoX's local layers."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.allowed_code import classes_in
from megatron.neox_arguments.layer_pattern import positions_named
from tests.neox_arguments.samples import TINY, assert_refused

PATTERN = [
    {"count": 2, "pos_emb": "kerple_log", "sliding_window_width": 4},
    {"pos_emb": "none", "sliding_window_width": None, "attention_temperature": {"floor": 8}},
]


def test_a_pattern_is_kept_as_written_and_names_the_position() -> None:
    args = NeoXArgs.from_dict({**TINY, "layer-pattern": [{"sliding-window-width": 3}, *PATTERN]})
    log, none = PATTERN
    whole = {**none, "attention_temperature": {"floor": 8, "alpha": 0.1}}
    assert args.model.layer_pattern == [{"sliding_window_width": 3}, log, whole]
    assert args.model.pos_emb == "kerple_log"  # of the entry that names none, too
    assert NeoXArgs.from_dict(args.to_dict()) == args
    assert positions_named(args.to_dict()) == [None, "kerple_log", "none"]


@pytest.mark.parametrize(
    ("entry", "fragments"),
    [
        ({"count": 0}, ["layer_pattern[1]: count = 0", "1 or more"]),
        ({"count": True}, ["layer_pattern[1]: count = True"]),
        ({"windw": 3}, ["layer_pattern[1]: unknown key 'windw'", "sliding_window_width"]),
        ({"sliding_window_widht": 3}, ["Did you mean sliding_window_width"]),
        ({"hidden_size": 64}, ["layer_pattern[1]: hidden_size is the same in all layers"]),
        ({"kerple_constraint": "ste"}, ["kerple_constraint is the same in all layers"]),
        ({"pos_emb": "kerple_lgo"}, ["layer_pattern[1]: pos_emb", "Did you mean 'kerple_log'"]),
        ({"pos_emb": "learned"}, ["layer_pattern[1]: pos_emb = learned", "input of the model"]),
        ({"pos_emb": None}, ["layer_pattern[1]: pos_emb = None", "none"]),
        ({"rotary_pct": 2.0}, ["layer_pattern[1]: rotary_pct = 2.0 is wrong"]),
        ({"pos_emb": "rotary", "rotary_pct": 0.1}, ["layer_pattern[1]: rotary_pct = 0.1 leaves"]),
        ({"attention_temperature": {"alpha": 1.0}}, ["attention_temperature.floor is missing"]),
        ({"attention_temperature": {"floor": 0}}, ["attention_temperature.floor = 0 is wrong"]),
    ],
    ids=str,
)
def test_a_wrong_entry_is_one_line(entry: dict[str, Any], fragments: list[str]) -> None:
    assert_refused({"layer_pattern": [PATTERN[0], entry]}, fragments)


@pytest.mark.parametrize(
    ("values", "fragments"),
    [
        ({"layer_pattern": []}, ["layer_pattern is empty"]),
        ({"layer_pattern": [3]}, ["layer_pattern.0 = 3 is wrong"]),
        (
            {"layer_pattern": PATTERN, "pos_emb": "learned"},
            ["pos_emb = learned is added to the input", "layer_pattern"],
        ),
        (
            {
                "layer_pattern": PATTERN,
                "attention_config": [[["local"], 2]],
                "sliding_window_width": 4,
            },
            ["attention_config with `local` and layer_pattern", "Keep layer_pattern"],
        ),
    ],
    ids=["empty", "no mapping", "input", "twice"],
)
def test_a_wrong_pattern_is_one_line(values: dict[str, Any], fragments: list[str]) -> None:
    assert_refused(values, fragments)


def test_windows_may_differ_around_positions_of_the_input() -> None:
    pattern = [{"sliding_window_width": 4}, {}]
    args = NeoXArgs.from_dict({**TINY, "pos_emb": "learned", "layer_pattern": pattern})
    assert args.model.pos_emb == "learned"


def test_local_layers_of_attention_config_are_a_pattern() -> None:
    values = {**TINY, "num_layers": 5, "sliding_window_width": 4}
    config = [[["global", "local"], 2], [["flash"], 1]]
    args = NeoXArgs.from_dict({**values, "attention_config": config})
    window = {"count": 1, "sliding_window_width": 4}
    everything = {"count": 1, "sliding_window_width": None}
    assert args.model.layer_pattern == [everything, window, everything, window, everything]
    assert args.model.attention_config is not None
    assert [kind for kinds, _ in args.model.attention_config for kind in kinds] == [
        *["global"] * 4,
        "flash",
    ]
    assert NeoXArgs.from_dict(args.to_dict()) == args
    both = NeoXArgs.from_dict({**values, "attention_config": [[["global"], 5]]})
    assert both.model.layer_pattern is None  # the window of all layers, as before


def test_a_class_in_an_entry_is_asked_for_permission() -> None:
    """A checkpoint's file may not import a class by hiding it in a pattern."""
    assert classes_in({"layer_pattern": [{"pos_emb": "os.path:Evil"}]}) == ["os.path:Evil"]
