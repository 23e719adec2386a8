"""Which interface gloo is told to use when the host's name means loopback."""

from __future__ import annotations

import socket

import pytest

from megatron.launcher import interfaces
from megatron.launcher.interfaces import export_interface

HOST = {"10.0.0.1": "eth0", "192.168.7.1": "ib0"}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A Debian host with two networks; destination -> the address it is reached from."""
    routes = {"node-2": "192.168.7.1", "192.0.2.1": "10.0.0.1", "here": "127.0.0.1"}
    name = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: name)
    monkeypatch.setattr(interfaces, "interface_addresses", lambda: dict(HOST))
    monkeypatch.setattr(interfaces, "_source_address", routes.get)
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
    monkeypatch.setattr(interfaces, "interface_addresses", lambda: {"10.0.0.1": "eth0"})
    assert chosen("node-2") == "eth0"


def test_a_name_with_an_address_is_left_to_gloo(
    host: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: name)
    assert chosen("node-2") is None


def test_this_machine_lists_no_loopback() -> None:
    addresses = interfaces.interface_addresses()
    assert "127.0.0.1" not in addresses and "lo" not in addresses.values()
    assert interfaces._source_address("127.0.0.1") == "127.0.0.1"
