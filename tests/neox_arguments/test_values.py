"""Values of config keys: strict, except where YAML gives no choice."""

from __future__ import annotations

import pytest

from megatron.errors import ConfigError
from megatron.neox_arguments import NeoXArgs
from tests.neox_arguments.samples import TINY


@pytest.mark.parametrize(
    ("values", "fragments"),
    [
        ({"num_layers": "12"}, ["num_layers", "'12'", "integer"]),
        ({"num_layers": True}, ["num_layers", "True", "integer"]),
        ({"num_layers": 2.5}, ["num_layers", "2.5"]),
        ({"no_weight_tying": "yes please"}, ["no_weight_tying", "boolean"]),
        ({"hidden_dropout": 1.5}, ["hidden_dropout", "1.5", "less than or equal to 1"]),
        ({"optimizer": {"params": {"lr": float("nan")}}}, ["optimizer.params.lr", "finite"]),
        ({"wandb_run_name": 5}, ["wandb_run_name", "string"]),
    ],
)
def test_a_slip_is_not_converted(values: dict[str, object], fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        NeoXArgs.from_dict({**TINY, **values})
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("group", "key", "written", "read"),
    [
        ("optimization", "train_iters", 5e4, 50_000),
        ("evaluation", "eval_lengths", "16, 32", [16, 32]),
        ("evaluation", "eval_lengths", 16, [16]),
        ("evaluation", "eval_tasks", "passkey", ["passkey"]),
        ("evaluation", "do_train", 1, True),
        ("checkpoint", "checkpoint_factor", 2.0, 2),
        ("checkpoint", "checkpoint_factor", 1.5, 1.5),
    ],
)
def test_loose_spellings_load(group: str, key: str, written: object, read: object) -> None:
    changes = {"pos_emb": "alibi", "checkpoint_scale": "log"}
    args = NeoXArgs.from_dict({**TINY, **changes, key: written})
    found = getattr(getattr(args, group), key)
    assert found == read and type(found) is type(read)
    assert NeoXArgs.from_dict(args.to_dict()) == args
