"""Ranks from launchers, from Slurm, and from nothing; the network interface for gloo."""

from __future__ import annotations

import contextlib
import socket

import pytest

from megatron.errors import ConfigError
from megatron.launcher import environment
from megatron.launcher.environment import (
    DistributedEnvironment,
    environment_for,
    expand_hostlist,
    export_interface,
    rank_place,
)
from megatron.neox_arguments.run_keys import LauncherArgs

SLURM_STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_NODELIST": "gpu[03-04]",
}


def discover(environ: dict[str, str], **keys: str) -> DistributedEnvironment:
    return environment_for(LauncherArgs(**keys), environ=environ)


def test_nothing_set_is_one_process() -> None:
    environ: dict[str, str] = {}
    found = discover(environ)
    assert (found.rank, found.world_size, found.source) == (0, 1, "single")
    assert environ["RANK"] == "0" and environ["MASTER_ADDR"] == "127.0.0.1"


def test_a_second_single_process_finds_another_port() -> None:
    with socket.socket() as busy:
        with contextlib.suppress(OSError):  # somebody else holds it, which serves as well
            busy.bind(("127.0.0.1", 29500))
        assert discover({}).master_port != 29500


def test_launcher_variables_win_over_slurm() -> None:
    environ = {
        **SLURM_STEP, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "1234",
        "MASTER_ADDR": "there",
    }  # fmt: skip
    found = discover(environ)
    assert (found.rank, found.world_size, found.local_rank) == (1, 2, 1)
    assert (found.master_addr, found.master_port, found.source) == ("there", 1234, "launcher")


def test_srun_task() -> None:
    environ = dict(SLURM_STEP)
    found = discover(environ)
    assert (found.rank, found.local_rank, found.world_size) == (5, 1, 8)
    assert found.master_addr == "gpu03"
    assert environ["WORLD_SIZE"] == "8"
    assert environ["MASTER_PORT"] == str(found.master_port)
    others = dict(SLURM_STEP, SLURM_PROCID="0", SLURM_LOCALID="0")
    assert discover(others).master_port == found.master_port


def test_srun_on_one_node_uses_loopback() -> None:
    assert discover({**SLURM_STEP, "SLURM_NODELIST": "n1"}).master_addr == "127.0.0.1"


@pytest.mark.parametrize("step", [None, "", "batch", "4294967291", "4294967290"])
def test_batch_and_interactive_shells_are_one_process(step: str | None) -> None:
    """sbatch sets SLURM_NTASKS and SLURM_PROCID=0 in a shell that is not a task: no waiting."""
    environ = {key: value for key, value in SLURM_STEP.items() if key != "SLURM_STEP_ID"}
    environ["SLURM_PROCID"] = "0"
    if step is not None:
        environ["SLURM_STEP_ID"] = step
    found = discover(environ)
    assert (found.world_size, found.source) == (1, "single")


def test_mpi_variables_win_over_those_of_the_step_that_started_its_daemons() -> None:
    found = discover(
        {
            **SLURM_STEP,
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        },
        master_addr="head",
    )
    assert (found.rank, found.local_rank, found.world_size) == (3, 1, 4)
    assert found.master_addr == "head"


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "", "WORLD_SIZE": "2"},
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"},
    ],
)
def test_broken_variables(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        discover(environ)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("gpu[08-10,3],login", ["gpu08", "gpu09", "gpu10", "gpu3", "login"]),
        ("r[1-2]n[01-02]-ib", ["r1n01-ib", "r1n02-ib", "r2n01-ib", "r2n02-ib"]),
    ],
)
def test_hostlists(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize("text", ["n[1-", "n]1", "n[a-b]", "n[1-999999999]"])
def test_broken_hostlists(text: str) -> None:
    with pytest.raises(ConfigError):
        expand_hostlist(text)


@pytest.mark.parametrize(
    "environ",
    [
        {
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        },
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
    ],
)
def test_several_hosts_need_an_address(environ: dict[str, str]) -> None:
    """Every host would look for rank 0 on itself, until the timeout."""
    with pytest.raises(ConfigError, match="master_addr is not set, and 2 of the job's 4 processes"):
        discover(dict(environ))
    found = discover(dict(environ), master_addr="node-1")
    assert (found.rank, found.master_addr) == (3, "node-1")
    name = next(name for name in environ if "LOCAL" in name)
    assert discover({**environ, name: "4"}).master_addr == "127.0.0.1"


def test_a_rank_is_named_with_its_host_if_there_are_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert rank_place(1) == "rank 1"
    monkeypatch.setenv("MASTER_ADDR", "node-1")
    assert rank_place(1) == f"rank 1 on {socket.gethostname()}"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert rank_place(1) == "rank 1"


# The network interface for gloo.

HOST = {"10.0.0.1": "eth0", "192.168.7.1": "ib0"}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A Debian host with two networks; destination -> the address it is reached from."""
    routes = {"node-2": "192.168.7.1", "192.0.2.1": "10.0.0.1", "here": "127.0.0.1"}
    name = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: name)
    monkeypatch.setattr(environment, "interface_addresses", lambda: dict(HOST))
    monkeypatch.setattr(environment, "_source_address", routes.get)
    return routes


def chosen(master: str, **environ: str) -> str | None:
    export_interface(master, environ)
    return environ.get("GLOO_SOCKET_IFNAME")


def test_the_route_to_the_master_decides(host: dict[str, str]) -> None:
    assert chosen("node-2") == "ib0"
    assert chosen("here") == "eth0"  # the master itself: the default route
    assert chosen("node-2", GLOO_SOCKET_IFNAME="eth9") == "eth9"


def test_without_a_route_only_a_single_interface_is_taken(
    host: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host.clear()
    assert chosen("node-2") is None
    monkeypatch.setattr(environment, "interface_addresses", lambda: {"10.0.0.1": "eth0"})
    assert chosen("node-2") == "eth0"


def test_a_name_with_an_address_is_left_to_gloo(
    host: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: name)
    assert chosen("node-2") is None


def test_this_machine_lists_no_loopback() -> None:
    addresses = environment.interface_addresses()
    assert "127.0.0.1" not in addresses and "lo" not in addresses.values()
    assert environment._source_address("127.0.0.1") == "127.0.0.1"
