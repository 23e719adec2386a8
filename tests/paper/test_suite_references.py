"""A name, length or setting in a suite that would have no effect is refused before any run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ReproduceError
from megatron.paper.suite import load_suite
from tests.paper.test_suite_file import TINY

SUITE: dict[str, Any] = {
    "about": "x",
    "seeds": [1],
    "models": {"tiny": {"config": TINY}, "next": {"config": TINY, "continues": "tiny.alibi"}},
    "data": {"d": {"title": "D"}},
    "sections": {
        "s": {
            "title": "S",
            "models": ["tiny"],
            "methods": ["alibi", "kerple_log"],
            "data": ["d"],
            "lengths": {"tiny": [8, 16]},
            "variants": {"v": {"methods": ["alibi"], "config": {"kerple_legacy_bf16": True}}},
            "table": {"layout": "stacked", "caption": "C", "lengths": [16], "published": "main"},
        },
        "n": {"title": "N", "models": ["next"], "methods": ["kerple_log"], "data": ["d"]},
    },
    "method_config": {"alibi": {"init_method_std": 0.1}},
    "contrasts": {
        "q": {
            "title": "Q",
            "pairs": [{"label": "p", "first": "tiny.d.alibi@v", "second": "tiny.d.kerple_log"}],
            "curve_lengths": [16],
            "curve_task": "extrapolation",
            "growth": {"g": "tiny.d.alibi"},
        }
    },
}
RUN = r"run tiny\.d\.alibi\.1: "


def loaded(folder: Path, changes: dict[str, Any]) -> int:
    """The number of runs of the suite with a value changed at each of these places."""
    content = json.loads(json.dumps(SUITE))
    for place, value in changes.items():
        *parents, last = place.split("/")
        part: Any = content
        for name in parents:
            part = part[int(name)] if isinstance(part, list) else part[name]
        part[last] = value
    path = folder / "mine.yml"
    path.write_text(json.dumps(content), encoding="utf-8")
    return len(load_suite(str(path)).runs)


def test_what_fits_together_is_accepted(tmp_path: Path) -> None:
    assert loaded(tmp_path, {}) == 3


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("contrasts/q/pairs/0/first", "tiny.d.kerple_lgo", "q: p: 'tiny.d.kerple_lgo' is unknown: "
         "Did you mean tiny.d.kerple_log?"),
        ("contrasts/q/pairs/0/second", "tiny.d.alibi.1", "q: p: 'tiny.d.alibi.1' is unknown"),
        ("contrasts/q/pairs/0/first", "tiny.d.kerple_log@v", "'tiny.d.kerple_log@v' is unknown"),
        ("contrasts/q/growth/g", "tiny.alibi", "growth: g: 'tiny.alibi' is unknown"),
        ("contrasts/q/beyond", {"b": "x"}, "beyond: b: 'x' is unknown: have next.d.kerple_log, "),
        ("contrasts/q/curve_lengths", [32], "curve_lengths: 32 is unknown: have 8, 16"),
        ("contrasts/q/curve_task", "recal", "curve_task: 'recal' is unknown"),
        ("sections/s/lengths", {"tinny": [8]}, "section s: lengths: 'tinny' is unknown: Did you "),
        ("sections/s/table/lengths", [17], "table: lengths: 17 is unknown"),
        ("sections/s/table/published", "mian", "published: 'mian' is unknown: Did you mean main"),
        ("sections/s/table/integer_methods", ["rpe"], "integer_methods: 'rpe' is unknown"),
        ("sections/s/table/methods", ["alibi"], "table: methods follows from the section"),
        ("sections/s/tasks", ["recall"], "its table shows extrapolation, which is not among"),
        ("sections/s/tasks", [], "section s: tasks is empty"),
        ("sections/s/methods", [], "variants' methods"),
        ("sections/n/seeds", [], "section n: seeds is empty"),
        ("sections/n/seeds", [7], r"run next.d.kerple_log.7: it begins from tiny.d.alibi.7, which"),
        ("seeds", [], "seeds is empty"),
        ("splits", ["vaild"], r"splits.0: Input should be 'valid' or 'test'"),
        ("data/d/published", "githbu", "published: 'githbu' is unknown: Did you mean github?"),
        ("method_config", {"alibii": {}}, "method_config: 'alibii' is unknown: Did you mean alibi"),
        ("models/tiny/config", {**TINY, "do_valid": False}, RUN + "do_valid = false, and splits"),
        ("sections/s/variants/v/config", {"kerple_legacy_bf17": True}, RUN + "variant v: .*bf17"),
        ("sections/s/variants/v/config", {"hidden_size": 16}, RUN + "variant v: hidden_size = 16, "
         "and the model is trained with 8"),
        ("sections/s/titel", "S", "sections.s: unknown key 'titel'. Did you mean title?"),
        ("sections/s/table/roundign", "x", "sections.s.table: unknown key 'roundign'. Did you "),
        ("modles", {}, "unknown key 'modles'. Did you mean models?"),
    ],
)  # fmt: skip
def test_what_would_have_no_effect_is_named(
    tmp_path: Path, place: str, value: Any, message: str
) -> None:
    with pytest.raises(ReproduceError, match=message):
        loaded(tmp_path, {place: value})
