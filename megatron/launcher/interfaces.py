"""The network interface for gloo, if the host's own name resolves to loopback or to nothing.

Gloo listens on the address of the host's name. Debian and Ubuntu write `127.0.1.1 NAME` into
/etc/hosts, and some hosts have no address for their name: no other host can connect to either.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import MutableMapping

VARIABLE = "GLOO_SOCKET_IFNAME"
ELSEWHERE = "192.0.2.1"  # reserved for documentation: packets to it take the default route
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def export_interface(master_addr: str, environ: MutableMapping[str, str] | None = None) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface with a route to the other hosts, if it is needed.

    Left alone: what a user has set, a name with an address of its own, and a host that has no
    interface but loopback.
    """
    target = os.environ if environ is None else environ
    if VARIABLE in target or not name_is_loopback():
        return
    chosen = interface_towards(master_addr)
    if chosen is not None:
        target[VARIABLE] = chosen


def name_is_loopback() -> bool:
    """Whether this host's name has no address, or its first one is a loopback address."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return ipaddress.ip_address(str(found[0][4][0]).partition("%")[0]).is_loopback


def interface_towards(master_addr: str) -> str | None:
    """The interface of the route to the master; on the master, of the default route.

    Without a default route: the only one with an address beside loopback.
    """
    addresses = interface_addresses()
    for destination in (master_addr, ELSEWHERE):
        own = _source_address(destination)
        if own in addresses:
            return addresses[own]
    return next(iter(addresses.values())) if len(addresses) == 1 else None


def _source_address(destination: str) -> str | None:
    """This host's address on packets to `destination`; nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((destination, 9))
        return str(probe.getsockname()[0])
    return None


def interface_addresses() -> dict[str, str]:
    """IPv4 address -> interface, without loopback; empty on systems other than Linux."""
    addresses = {}
    with contextlib.suppress(ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_:
        import fcntl

        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(any_.fileno(), _SIOCGIFADDR, request)
                addresses[socket.inet_ntoa(answer[20:24])] = name
    return {a: name for a, name in addresses.items() if not ipaddress.ip_address(a).is_loopback}
