"""Ranks with other data, another config or a directory of their own are refused, by name."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from megatron.neox_arguments import NeoXArgs
from megatron.training import same_everywhere
from megatron.training.same_everywhere import differences, facts_of
from tests.processes import REPOSITORY
from tests.training.cases import tiny_config, write_data
from tests.training.runs import finish, losses, run_config, start_run

PROGRAM = str(REPOSITORY / "tests" / "training" / "rank_of_its_own.py")


def test_what_differs_is_named_with_hosts_and_ranks() -> None:
    same = ("a", {"the config": "1", "data x": "2"})
    assert differences([same, same]) == []
    found = differences([same, ("b", {"the config": "1", "data x": "3"}), ("c", {"data x": "2"})])
    assert found == [
        "the config on rank 2 on c is not that of rank 0 on a. Give all hosts the same.",
        "data x on rank 1 on b is not that of rank 0 on a. Give all hosts the same.",
    ]


def test_a_host_with_another_version_of_the_code_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same path on each host: one changed number in one file is enough."""
    args = NeoXArgs.from_dict(tiny_config(write_data(tmp_path)))
    monkeypatch.setattr(same_everywhere, "PACKAGE", tmp_path)
    (tmp_path / "part").mkdir()
    hosts = []
    for source in ("x = 1", "x = 1", "x = 2"):
        (tmp_path / "part" / "module.py").write_text(source)
        hosts.append((f"node-{len(hosts)}", facts_of(args.config_hash(), args.data)))
    assert differences(hosts) == [
        f"the code in {tmp_path} on rank 2 on node-2 is not that of rank 0 on node-0. "
        "Give all hosts the same."
    ]


def start(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> tuple[list[int], str]:
    monkeypatch.setenv("KERPLE_TEST_RANK_1", json.dumps(changes))
    codes, outputs = finish(start_run(config, tmp_path, 2, program=[PROGRAM]), timeout=240)
    return codes, "\n".join(outputs)


def test_a_rank_with_other_data_or_another_config_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same number of tokens, other ones: nothing else would notice."""
    (tmp_path / "own").mkdir()
    data, own = write_data(tmp_path), write_data(tmp_path / "own", seed=1)
    config = run_config(data, tmp_path / "run", train_iters=2)
    # Another path is another config; the same path with other bytes is a mount of its own.
    codes, text = start(config, tmp_path, monkeypatch, data_path=own, seed=7)
    assert codes == [2, 2], text
    host = socket.gethostname()
    assert f"the config on rank 1 on {host} is not that of rank 0 on {host}" in text
    assert f"data {own} on rank 1" in text
    assert not losses_of(tmp_path / "run")


def test_a_directory_of_its_own_is_noticed_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(write_data(tmp_path), tmp_path / "run", train_iters=2)
    codes, text = start(config, tmp_path, monkeypatch, save=str(tmp_path / "elsewhere"))
    assert codes == [2, 2], text
    assert f"is not seen by rank 1 on {socket.gethostname()} (1 in all)" in text
    assert not losses_of(tmp_path / "run")


def losses_of(save: Path) -> dict[int, float]:
    return losses(save) if (save / "metrics.jsonl").exists() else {}
