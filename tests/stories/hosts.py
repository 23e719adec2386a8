"""Several hosts on one machine: namespaces with a network, process table, name and mounts each.

A switch in a namespace of its own connects them; nothing of the machine's network is touched. Every
host sees this machine's files, as on a shared file system, but for `private`, which is its own.
All of it ends with the processes that hold the namespaces. Root only, with iproute2 and util-linux.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import ModuleType

from tests.forked_ranks import ForkedRank, Server

CONTROLLER = "ctl"
NODES = ("n1", "n2", "n3")
ADDRESSES = {CONTROLLER: "10.77.0.100", "n1": "10.77.0.1", "n2": "10.77.0.2", "n3": "10.77.0.3"}
# The first process of a host: it stays, and collects the processes that lost their parents.
FIRST = """set -e
mount --make-rprivate /
hostname "$0"
mount --bind "$1" /etc/hosts
mount -t tmpfs none "$2"
touch "$3"
exec bash -c 'while :; do sleep 1000 & wait; done'
"""


def unusable() -> str | None:
    """Why this machine cannot play several hosts, if it cannot."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (iproute2, util-linux)"
    attempt = ["unshare", "--net", "--pid", "--uts", "--mount", "--ipc", "--fork", "--mount-proc"]
    bridge = ["ip", "link", "add", "br0", "type", "bridge"]
    done = subprocess.run([*attempt, *bridge], capture_output=True, text=True, check=False)
    return f"namespaces are not allowed: {done.stderr.strip()}" if done.returncode else None


@dataclass
class Host:
    """One of them: `enter` before a command runs it there."""

    name: str
    holder: subprocess.Popen[bytes]
    first: int
    """The host's process 1, as this machine numbers it."""

    @property
    def enter(self) -> list[str]:
        flags = ["--net", "--pid", "--mount", "--uts", "--ipc"]
        return ["nsenter", "--target", str(self.first), *flags, f"--wd={os.getcwd()}"]  # noqa: PTH109


class RankServer(Server):
    """The server of a host's ranks, which has a process table of its own."""

    def __init__(self, host: Host) -> None:
        super().__init__(host.enter)
        self._table = Path(f"/proc/{host.first}/ns/pid")

    def pid_here(self, pid: int) -> int:
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                numbers = re.findall(r"^NSpid:.*\s(\d+)$", (process / "status").read_text(), re.M)
                if numbers == [str(pid)] and (process / "ns/pid").samefile(self._table):
                    return int(process.name)
        raise AssertionError(f"process {pid} of a host has ended")


class Hosts:
    """ctl, n1, n2 and n3 with a Slurm over them, in one directory."""

    def __init__(self, directory: Path, slurm: ModuleType) -> None:
        self.directory, self.tool = directory, slurm
        self.private = directory / "private"
        self.private.mkdir()
        self.switch = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self.hosts: dict[str, Host] = {}
        self.servers: dict[str, RankServer] = {}
        self._ports = count(29611)
        self._starting = threading.Lock()

    def start(self) -> None:
        self._wait(lambda: _namespace(self.switch.pid) != _namespace(os.getpid()))
        self._on_switch("ip", "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        self._on_switch("ip", "link", "set", "br0", "up")
        for name in ADDRESSES:
            self.hosts[name] = self._boot(name)
        self._start_slurm()

    def stop(self) -> None:
        """The death of a host's process 1 ends all others there, daemons too."""
        for name in list(self.hosts):
            self.kill(name)
        self.switch.kill()
        self.switch.wait()

    def kill(self, name: str) -> None:
        """The host loses power."""
        host = self.hosts.pop(name)
        os.kill(host.first, signal.SIGKILL)
        host.holder.wait(timeout=30)

    def link(self, name: str, state: str) -> None:
        """Pull (`down`) or put back (`up`) the host's network cable."""
        self._on_switch("ip", "link", "set", f"v-{name}", state)

    def names_file(self, name: str, own: str | None = None) -> None:
        """/etc/hosts of a host; `own` is what it takes for its own address."""
        known = {**ADDRESSES, name: own or ADDRESSES[name]}
        lines = ["127.0.0.1 localhost", *(f"{address} {host}" for host, address in known.items())]
        (self.directory / f"hosts-{name}").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def run(
        self, name: str, *command: str, seconds: float = 120, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """A command on a host to its end, with Slurm's programs at hand."""
        return subprocess.run(
            [*self.hosts[name].enter, *command],
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
        )

    def start_ranks(self, names: Sequence[str], *arguments: str) -> list[ForkedRank]:
        """One rank of a job on each host, as torchrun would start it, forked with its imports."""
        with self._starting:
            self._start_servers()
            ranks, port = [], str(next(self._ports))
            for rank, name in enumerate(names):
                variables = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(len(names))}
                variables |= {"MASTER_ADDR": names[0], "MASTER_PORT": port}
                environment = {**self.environment, **variables}
                ranks.append(ForkedRank(arguments, environment, self.servers[name]))
            return ranks

    def _start_servers(self) -> None:
        new = [name for name in NODES if name not in self.servers]
        self.servers |= {name: RankServer(self.hosts[name]) for name in new}
        for name in new:
            self.servers[name].connection()  # all at once; the first rank waits for the imports
        for name in new:
            ForkedRank([os.devnull], self.environment, self.servers[name]).wait(timeout=120)

    def start_sshd(self) -> None:
        """ssh between all hosts without a password, by a key of this directory."""
        keys = self.directory / "ssh"
        keys.mkdir(mode=0o700)
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / "id_ed25519")]
        subprocess.run(key, check=True)
        shutil.copy(keys / "id_ed25519.pub", keys / "authorized_keys")
        known = "StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"
        (keys / "config").write_text(known, encoding="utf-8")
        options = {"PermitRootLogin": "yes", "StrictModes": "no", "UsePAM": "no", "PidFile": "none"}
        for name in self.hosts:
            listen = {**options, "ListenAddress": ADDRESSES[name]}
            flags = " ".join(f"-o {option}={value}" for option, value in listen.items())
            script = f"""set -e
mkdir -p ~/.ssh /run/sshd
mount --bind {keys} ~/.ssh
mount -t tmpfs -o mode=755 none /run/sshd
/usr/sbin/sshd -f /dev/null -h {keys}/id_ed25519 {flags}"""
            done = self.run(name, "bash", "-c", script)
            assert done.returncode == 0, done.stdout

    @property
    def environment(self) -> dict[str, str]:
        own = {**os.environ, **self.tool.environment(self.directory), "OMP_NUM_THREADS": "1"}
        for name in [n for n in own if n.startswith(("SLURM_J", "SLURM_S", "GLOO_", "NCCL_"))]:
            del own[name]
        return {**own, "PYTHONPATH": os.getcwd(), "DS_ACCELERATOR": "cpu"}  # noqa: PTH109

    def _boot(self, name: str) -> Host:
        ready = self.directory / f"ready-{name}"
        self.names_file(name)
        flags = ["--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--mount-proc"]
        places = [str(self.directory / f"hosts-{name}"), str(self.private), str(ready)]
        with (self.directory / f"{name}.log").open("w") as log:
            command = ["unshare", *flags, "bash", "-c", FIRST, name, *places]
            holder = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._wait(ready.exists)
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        host = Host(name, holder, int(children[0]))
        veth = ["ip", "link", "add", f"v-{name}", "type", "veth", "peer", "name", "eth0"]
        self._on_switch(*veth, "netns", str(host.first))
        self._on_switch("ip", "link", "set", f"v-{name}", "master", "br0", "up")
        for command in (
            ["addr", "add", f"{ADDRESSES[name]}/24", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
            ["link", "set", "lo", "up"],
        ):
            subprocess.run([*host.enter, "ip", *command], check=True)
        return host

    def _on_switch(self, *command: str) -> None:
        subprocess.run(["nsenter", "--target", str(self.switch.pid), "--net", *command], check=True)

    @staticmethod
    def _wait(ready: object, seconds: float = 20) -> None:
        assert callable(ready)
        deadline = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < deadline, "a host did not start"
            time.sleep(0.05)

    def _start_slurm(self) -> None:
        self.directory.chmod(0o755)
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.directory / name).mkdir()
        nodes = "SlurmdTimeout=10\nTreeWidth=16\nGresTypes=gpu\n"
        own = "CPUs=32 RealMemory=16000 Gres=gpu:a100:1 State=UNKNOWN"  # a GPU's name only
        for name in NODES:
            nodes += f"NodeName={name} NodeAddr={ADDRESSES[name]} {own}\n"
        for partition in ("main Default=YES", "a100", "cpu"):
            nodes += f"PartitionName={partition} Nodes={','.join(NODES)} State=UP\n"
        (self.directory / "gpu0").touch()
        gres = f"NodeName=n[1-3] Name=gpu Type=a100 File={self.directory}/gpu0\n"
        (self.directory / "gres.conf").write_text(gres, encoding="utf-8")
        controller = f"{CONTROLLER}({ADDRESSES[CONTROLLER]})"
        self.tool.write_config(self.directory, controller, nodes, (6817, 6818), node="-%n")
        enter = self.hosts[CONTROLLER].enter
        self.tool.start_munge(self.directory, enter)
        self.tool.daemon(self.directory, [*enter, "slurmctld", "-i"])
        for name in NODES:
            self.tool.daemon(self.directory, [*self.hosts[name].enter, "slurmd", "-N", name])
        self.tool.wait_for_nodes(self.directory, enter)


def _namespace(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")  # noqa: PTH115


TRAIN = [sys.executable, "-u", "train.py"]
