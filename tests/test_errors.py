"""Errors that a user can fix are known by one base; advice names what is near."""

from __future__ import annotations

import pytest
import torch

from megatron import errors


def test_every_error_but_divergence_is_one_that_commands_print_as_a_line() -> None:
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type)}
    ours = {kind for kind in kinds if kind.__module__ == errors.__name__}
    others = {kind for kind in ours if not issubclass(kind, errors.KerpleError)}
    assert len(ours) > 10 and others == {errors.NonFiniteError}


def test_advice_names_the_nearest_or_says_where_to_look() -> None:
    known = ["train_iters", "eval_iters"]
    assert errors.did_you_mean("train_itres", known, "Look.") == "Did you mean train_iters?"
    assert errors.did_you_mean("zzz", known, "Look.") == "Look."


class Unreadable(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise errors.DataError("tokens.bin: holds id 300.\nUse another tokenizer.")


def test_an_error_in_a_worker_of_the_data_loader_is_its_message_alone() -> None:
    with pytest.raises(errors.DataError) as caught:
        next(iter(torch.utils.data.DataLoader(Unreadable(), num_workers=1)))
    assert str(caught.value) == "tokens.bin: holds id 300.\nUse another tokenizer."
