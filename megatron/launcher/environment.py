"""The rank of this process from environment variables, and the network interface for gloo.

torchrun, DeepSpeed's launcher and most others set RANK and WORLD_SIZE. Under plain `srun` only
Slurm's own variables exist. A batch script's shell also has SLURM_NTASKS, but it is one process:
waiting there for the other tasks would hang, so Slurm's variables count in numbered steps only.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal

from megatron.errors import ConfigError
from megatron.neox_arguments.run_keys import LauncherArgs

LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = frozenset({LOOPBACK, "localhost", "::1"})
DEFAULT_PORT: int = LauncherArgs.model_fields["master_port"].default
MAX_HOSTS = 100_000

Source = Literal["launcher", "slurm", "mpi", "single"]


# Source -> its variables for the rank, the rank on this node, and the number of processes.
_VARIABLES: dict[Source, tuple[str, str, str]] = {
    "launcher": ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
}


@dataclass(frozen=True)
class DistributedEnvironment:
    """This process's rank, the number of ranks, and the rendezvous address."""

    rank: int
    local_rank: int
    world_size: int
    master_addr: str
    master_port: int
    source: Source


def environment_for(
    launcher: LauncherArgs,
    local_rank: int | None = None,
    environ: MutableMapping[str, str] | None = None,
) -> DistributedEnvironment:
    """Rank and address of this process, exported to `environ` (os.environ by default).

    Variables override the config's address and port, and a `local_rank` argument.
    """
    target = os.environ if environ is None else environ
    addr = target.get("MASTER_ADDR") or launcher.master_addr
    port = _integer(target, "MASTER_PORT") or launcher.chosen_port
    found = _discover(target, local_rank, addr, port)
    if not 0 <= found.rank < found.world_size:
        raise ConfigError(
            f"rank {found.rank} does not fit into a job of {found.world_size} processes "
            f"(from the {found.source} variables). Unset RANK and WORLD_SIZE, or set both."
        )
    # What torch.distributed reads.
    for name in ("rank", "local_rank", "world_size", "master_addr", "master_port"):
        target[name.upper()] = str(getattr(found, name))
    return found


def _discover(
    environ: Mapping[str, str], local_rank: int | None, addr: str | None, port: int | None
) -> DistributedEnvironment:
    # MPI before Slurm: mpirun starts its daemons with srun, so Slurm's ranks are the daemons'.
    for source, (rank, local, size) in _VARIABLES.items():
        if rank not in environ or size not in environ:
            continue
        found, processes = _integer(environ, local), _required(environ, size)
        if addr is None:
            _check_one_host(environ, processes)
        return DistributedEnvironment(
            rank=_required(environ, rank),
            local_rank=(local_rank or 0) if found is None else found,
            world_size=processes,
            master_addr=addr or LOOPBACK,
            master_port=port or DEFAULT_PORT,
            source=source,
        )
    if in_slurm_step(environ):
        return DistributedEnvironment(
            rank=_required(environ, "SLURM_PROCID"),
            local_rank=_integer(environ, "SLURM_LOCALID") or 0,
            world_size=_slurm_tasks(environ),
            master_addr=addr or _slurm_master(environ),
            master_port=port or slurm_port(environ),
            source="slurm",
        )
    # One process: no other process needs this port.
    return DistributedEnvironment(0, 0, 1, addr or LOOPBACK, port or free_port(), "single")


def _check_one_host(environ: Mapping[str, str], world_size: int) -> None:
    """Refuse a job over several hosts that names none of them: each would wait for itself."""
    here = processes_here(environ)
    if here is not None and here < world_size:
        raise ConfigError(
            f"master_addr is not set, and {world_size - here} of the job's {world_size} processes "
            "run on other hosts. Set master_addr (or MASTER_ADDR) to the host of rank 0."
        )


def processes_here(environ: Mapping[str, str]) -> int | None:
    """Processes of the job on this host, if the launcher states it."""
    for name in ("OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        if (found := _integer(environ, name)) is not None and found > 0:
            return found
    return None


def spans_hosts(environ: Mapping[str, str]) -> bool:
    """Whether other hosts may take part in the job of this process (`environment_for` has run)."""
    here = str(processes_here(environ))
    loopback = environ.get("MASTER_ADDR", LOOPBACK) in LOOPBACK_NAMES
    return not loopback and here != environ.get("WORLD_SIZE", "1")


def rank_place(rank: int | str) -> str:
    """`rank 3`, in a job over several hosts `rank 3 on node-2`."""
    return f"rank {rank} on {socket.gethostname()}" if spans_hosts(os.environ) else f"rank {rank}"


def free_port() -> int:
    """A free port.

    Not the default one even if it is free: two runs that start together would both choose it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """True in a task that srun started; false in a batch or interactive shell of the job."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    # Slurm numbers the batch script, interactive shells and extern steps from 0xfffffffa up.
    return step.isdigit() and int(step) < 0xFFFFFFFA and "SLURM_PROCID" in environ


def _slurm_tasks(environ: Mapping[str, str]) -> int:
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"):
        value = _integer(environ, name)
        if value is not None:
            return value
    raise ConfigError("SLURM_PROCID is set but SLURM_NTASKS is not; start with srun --ntasks=N.")


def _slurm_master(environ: Mapping[str, str]) -> str:
    names = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    hosts = expand_hostlist(next(filter(None, map(environ.get, names)), ""))
    return hosts[0] if len(hosts) > 1 else LOOPBACK


def slurm_port(environ: Mapping[str, str]) -> int:
    """A port that two jobs on one node are unlikely to share, the same on every task."""
    job = _integer(environ, "SLURM_JOB_ID") or 0
    step = environ.get("SLURM_STEP_ID", "0")
    return 20000 + (job * 7 + int(step)) % 10000


def expand_hostlist(text: str) -> list[str]:
    """Slurm's `gpu[01-03,7],login` -> gpu01, gpu02, gpu03, gpu7, login."""
    hosts: list[str] = []
    for item in re.split(r",(?![^\[]*\])", text.strip()):
        hosts += _expand_item(item) if item else []
        if len(hosts) > MAX_HOSTS:
            raise ConfigError(f"node list {text!r:.80} names too many hosts.")
    return hosts


def _expand_item(item: str) -> list[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]*)\](.*)", item)
    if match is None:
        if "[" in item or "]" in item:
            raise ConfigError(f"node list entry {item!r:.80} has unbalanced brackets.")
        return [item]
    prefix, ranges, rest = match.groups()
    tails = _expand_item(rest)
    return [f"{prefix}{middle}{tail}" for middle in _expand_ranges(ranges) for tail in tails]


def _expand_ranges(ranges: str) -> list[str]:
    names: list[str] = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ConfigError(f"node list range {part!r:.80} is not a number or first-last.")
        stop = int(last) if dash else int(first)
        if stop - int(first) > MAX_HOSTS:
            raise ConfigError(f"node list range {part!r:.80} names too many hosts.")
        names += [str(number).zfill(len(first)) for number in range(int(first), stop + 1)]
    return names


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"environment variable {name} = {text!r:.80} is not a number.") from error


def _required(environ: Mapping[str, str], name: str) -> int:
    value = _integer(environ, name)
    if value is None:
        raise ConfigError(f"environment variable {name} is empty. Unset it, or set a number.")
    return value


# The network interface for gloo, if the host's own name resolves to loopback or to nothing.
#
# Gloo listens on the address of the host's name. Debian and Ubuntu write `127.0.1.1 NAME` into
# /etc/hosts, and some hosts have no address for their name: no other host can connect to either.

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
EXTERNAL_ADDRESS = "192.0.2.1"  # reserved for documentation: packets to it take the default route
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def export_interface(master_addr: str, environ: MutableMapping[str, str] | None = None) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface with a route to the other hosts, if it is needed.

    Left alone: what a user has set, a name with an address of its own, and a host that has no
    interface but loopback.
    """
    target = os.environ if environ is None else environ
    if GLOO_INTERFACE in target or not name_is_loopback():
        return
    chosen = interface_towards(master_addr)
    if chosen is not None:
        target[GLOO_INTERFACE] = chosen


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
    for destination in (master_addr, EXTERNAL_ADDRESS):
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
