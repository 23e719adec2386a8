#!/usr/bin/env python
"""A one-node Slurm on loopback for tests: munge, slurmctld and slurmd in one directory, as root.

    python tools/slurm/throwaway.py start DIR      prints the environment to use it
    python tools/slurm/throwaway.py stop DIR

Needs Debian's slurm-wlm and munge. Nothing outside DIR is written, and no system service is
touched: own ports, own munge socket and key. DIR must not be writable for others.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "sinfo")
_SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin", "/sbin"])

CONFIG = """ClusterName=throwaway
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={directory}/munge.sock,cred_expire=10
SlurmctldPort={controller_port}
SlurmdPort={node_port}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool{node}
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd{node}.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd{node}.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=20
InactiveLimit=0
MinJobAge=600
"""
NODES = """GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=16000 Gres=gpu:a100:{gpus} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
PartitionName=a100 Nodes={host} MaxTime=INFINITE State=UP
PartitionName=cpu Nodes={host} MaxTime=INFINITE State=UP
"""


class SlurmSetupError(RuntimeError):
    """The throw-away Slurm could not be started."""


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=_SEARCH) is None]


def environment(directory: Path) -> dict[str, str]:
    """Variables with which sbatch, srun and squeue find this Slurm."""
    return {"SLURM_CONF": str(directory / "slurm.conf"), "PATH": _SEARCH}


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [int(item.getsockname()[1]) for item in sockets]
    finally:
        for item in sockets:
            item.close()


def start(directory: Path, cpus: int = 4, gpus: int = 2) -> None:
    """Start the three daemons and wait until the node accepts jobs; its GPUs are names only."""
    if os.geteuid() != 0:
        raise SlurmSetupError("needs root: slurmd starts jobs for users")
    absent = missing_programs()
    if absent:
        raise SlurmSetupError(f"not found: {', '.join(absent)}; install slurm-wlm and munge")
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o755)
    for name in ("state", "spool"):
        (directory / name).mkdir(exist_ok=True)
    start_munge(directory)
    host = socket.gethostname().split(".")[0]
    nodes = NODES.format(host=host, cpus=cpus, gpus=gpus)
    write_config(directory, f"{host}(127.0.0.1)", nodes, _free_ports(2))
    for number in range(gpus):  # Slurm only asks whether a GPU's file is there
        (directory / f"gpu{number}").touch()
    gres = f"Name=gpu Type=a100 File={directory}/gpu[0-{gpus - 1}]\n"
    (directory / "gres.conf").write_text(gres, encoding="utf-8")
    daemon(directory, ["slurmctld", "-i"])
    daemon(directory, ["slurmd"])
    wait_for_nodes(directory)


def write_config(
    directory: Path, controller: str, nodes: str, ports: Sequence[int], node: str = ""
) -> None:
    """slurm.conf; `node` is %n in the names of what each of several nodes has."""
    config = CONFIG.format(
        controller=controller,
        directory=directory,
        controller_port=ports[0],
        node_port=ports[1],
        node=node,
    )
    (directory / "slurm.conf").write_text(config + nodes, encoding="utf-8")
    (directory / "cgroup.conf").write_text("CgroupAutomount=no\n", encoding="utf-8")


def start_munge(directory: Path, enter: Sequence[str] = ()) -> None:
    """munged; `enter` are words before the command, which let it run on another host."""
    key = directory / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    options = {"key-file": key, "socket": directory / "munge.sock"}
    options |= {"pid-file": directory / "munged.pid", "log-file": directory / "munged.log"}
    options |= {"seed-file": directory / "munged.seed"}
    flags = [f"--{name}={path}" for name, path in options.items()]
    daemon(directory, [*enter, "munged", "--force", "--num-threads=2", *flags])


def daemon(directory: Path, command: list[str]) -> None:
    result = subprocess.run(
        command,
        env={**os.environ, **environment(directory)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=30,
    )
    if result.returncode != 0:
        raise SlurmSetupError(f"{command[0]} failed: {result.stderr.strip()}\n{_logs(directory)}")


def ask(directory: Path, *command: str) -> str:
    """What one of Slurm's programs answers, if it does."""
    variables = {**os.environ, **environment(directory)}
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, check=False, timeout=30
    )
    return done.stdout.strip()


def wait_for_nodes(directory: Path, enter: Sequence[str] = (), seconds: float = 30.0) -> None:
    state = ""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        state = ask(directory, *enter, "sinfo", "--noheader", "--format=%T", "--partition=main")
        if state in ("idle", "mixed"):
            return
        time.sleep(0.5)
    raise SlurmSetupError(f"the nodes did not become idle (state {state!r})\n{_logs(directory)}")


def _logs(directory: Path) -> str:
    parts = []
    for path in sorted(directory.glob("*.log")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        parts.append("\n".join([f"--- {path.name}", *lines]))
    return "\n".join(parts)


def stop(directory: Path) -> None:
    """Cancel all jobs and end the daemons that this directory's pid files name."""
    if (directory / "slurmctld.pid").exists():
        ask(directory, "scancel", "--user=root", "--signal=KILL", "--full")
        ask(directory, "scancel", "--user=root")
        time.sleep(1)
    for name in ("slurmd", "slurmctld", "munged"):
        _end(directory / f"{name}.pid")


def _end(pid_file: Path) -> None:
    try:
        pid = int(pid_file.read_text(encoding="utf-8").strip())
        os.kill(pid, signal.SIGTERM)
    except (OSError, ValueError):
        return
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=["start", "stop"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--cpus", type=int, default=4, help="processors of the node (4)")
    options = parser.parse_args()
    directory = options.directory.resolve()
    if options.action == "stop":
        stop(directory)
        return 0
    try:
        start(directory, options.cpus)
    except SlurmSetupError as error:
        print(f"error: {error}", file=sys.stderr)
        stop(directory)
        return 1
    print(f"export SLURM_CONF={directory}/slurm.conf")
    return 0


if __name__ == "__main__":
    sys.exit(main())
