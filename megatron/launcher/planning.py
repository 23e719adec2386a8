"""Launch plans: which script starts on which hosts, in how many processes.

One process on one machine runs the script itself. Everything else goes to DeepSpeed's runner as a
list of arguments; the config is encoded in one of them, so no shell interprets it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType

from megatron.atomic_files import OWNER, read_json
from megatron.backends.deepspeed_processes import RUNNER, run_runner, selected_slots
from megatron.errors import ConfigError
from megatron.launcher.environment import LOOPBACK, expand_hostlist, free_port
from megatron.machine import count_gpus
from megatron.neox_arguments import NeoXArgs, encode_config
from megatron.neox_arguments.run_keys import LauncherArgs
from megatron.terminal import PACKAGE

DEEPSPEED_DEFAULT_HOSTFILE = Path("/job/hostfile")
HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.:-]*[A-Za-z0-9_])?")
# Below critical, DeepSpeed prints the whole command, config and all.
QUIET = ["--log_level", "critical"]
LAUNCHABLE = ("train", "evaluate", "eval", "generate")


@dataclass(frozen=True)
class LaunchPlan:
    """The script, hosts and environment to start."""

    script: list[str]
    args: NeoXArgs
    world_size: int = 1
    runner_arguments: list[str] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    hosts: dict[str, int] | None = None
    warnings: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """The command as it is printed, with the config shortened."""
        payload = f"<config, {len(encode_config(self.args))} characters>"
        variables = [f"{key}={value}" for key, value in self.environment.items()]
        middle = [] if self.runner_arguments is None else ["-m", RUNNER, *self.runner_arguments]
        if self.hosts is not None:
            middle += ["--hostfile", "<" + ",".join(self.hosts) + ">"]
        words = [sys.executable, *middle, *self.script, "--megatron_config"]
        return [*variables, *(shlex.quote(word) for word in words), payload]


def read_hostfile(path: Path) -> dict[str, int]:
    """Host -> slots; ConfigError with the number of a wrong line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"hostfile = {path}: cannot be read ({error}). Remove the key to use this machine."
        ) from error
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"(\S+)\s+slots=(\d{1,6})(\s.*)?", text)
        if match is None or int(match.group(2)) < 1:
            raise ConfigError(
                f"hostfile {path}, line {number}: {line!r:.80}; expected `name slots=8`."
            )
        check_host(match.group(1), f"hostfile {path}, line {number}")
        if match.group(1) in hosts:
            raise ConfigError(f"hostfile {path}, line {number}: {match.group(1)} is listed twice.")
        hosts[match.group(1)] = int(match.group(2))
    if not hosts:
        raise ConfigError(f"hostfile {path} lists no hosts; expected lines like `name slots=8`.")
    return hosts


def check_host(name: str, where: str) -> None:
    """Refuse what is no host name or address: ssh and pdsh would take `-o...` for an option."""
    if len(name) > 253 or not HOST.fullmatch(name):
        raise ConfigError(
            f"{where}: {name!r:.80} is not a host name or address (letters, digits, dots, hyphens)."
        )


def find_script(name: str, root: Path) -> list[str]:
    """`train` or `train.py`, here or beside deepy.py: the words after `python`."""
    with_suffix = name if name.endswith(".py") else f"{name}.py"
    for candidate in (Path(name), Path(with_suffix), root / with_suffix):
        if candidate.is_file():
            return [str(candidate)]
    if with_suffix.removesuffix(".py") in LAUNCHABLE:
        # An installed package has no scripts beside it.
        return [str(PACKAGE / "commands" / "__main__.py"), with_suffix.removesuffix(".py")]
    raise ConfigError(f"{name}: no such script. Try train.py, evaluate.py or generate.py.")


def plan_launch(
    script: list[str], args: NeoXArgs, environ: Mapping[str, str] | None = None
) -> LaunchPlan:
    """Decide how many processes start where."""
    variables = dict(os.environ if environ is None else environ)
    plan, launcher = LaunchPlan(script, args), args.launcher
    # GPT-NeoX's own configs name a hostfile that does not exist, and mean this machine.
    hostfile = Path(launcher.hostfile or DEEPSPEED_DEFAULT_HOSTFILE)
    if launcher.launcher == "slurm" and not (launcher.hostfile and hostfile.exists()):
        return _plan_multi_node(plan, _slurm_hosts(launcher, variables), None)
    if hostfile.exists():
        return _plan_multi_node(plan, read_hostfile(hostfile), hostfile)
    if launcher.num_nodes > 1:
        named = f" {launcher.hostfile}" if launcher.hostfile else ""
        raise ConfigError(
            f"num_nodes = {launcher.num_nodes} but there is no hostfile{named}. Set hostfile to "
            "one with `name slots=N` a line, or launcher: slurm inside a Slurm allocation."
        )
    plan = _plan_single_node(plan, variables)
    if launcher.hostfile is None:
        return plan
    missing = f"hostfile = {launcher.hostfile} does not exist: this machine alone is used"
    return replace(plan, warnings=(missing,))


def _slurm_hosts(launcher: LauncherArgs, environ: Mapping[str, str]) -> dict[str, int]:
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodes:
        raise ConfigError(
            "launcher = slurm without a hostfile needs a Slurm allocation (SLURM_JOB_NODELIST is "
            "not set). Run deepy.py inside sbatch or salloc, or set hostfile."
        )
    slots = launcher.num_gpus
    for name in ("SLURM_NTASKS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        text = environ.get(name, "")
        if slots is None and text.isdigit() and int(text) > 0:
            slots = int(text)
    hosts = expand_hostlist(nodes)
    for host in hosts:
        check_host(host, "SLURM_JOB_NODELIST")
    return dict.fromkeys(hosts, slots or 1)


def _plan_single_node(plan: LaunchPlan, environ: dict[str, str]) -> LaunchPlan:
    launcher = plan.args.launcher
    gpus = count_gpus(environ)
    other_accelerator = environ.get("DS_ACCELERATOR", "cuda") not in ("cuda", "cpu")
    on_cpu = gpus == 0 and not other_accelerator
    if on_cpu and (launcher.include or launcher.exclude):
        raise ConfigError("include/exclude name GPUs, and there are none. Use num_gpus: N.")
    if launcher.num_gpus and not on_cpu and not other_accelerator and launcher.num_gpus > gpus:
        raise ConfigError(
            f"num_gpus = {launcher.num_gpus} but {gpus} are visible. Lower it, or set "
            "DS_ACCELERATOR=cpu to use processes on the CPU."
        )
    processes = launcher.num_gpus or max(gpus, 1)
    extra = _cpu_environment(processes, environ) if on_cpu else {}
    filtered = bool(launcher.include or launcher.exclude or other_accelerator)
    if processes == 1 and not filtered:
        return replace(plan, environment=extra)
    arguments = ["--no_local_rank", *QUIET]
    arguments += _options(
        master_addr=LOOPBACK,
        master_port=launcher.chosen_port or free_port(),
        num_gpus=processes if on_cpu else launcher.num_gpus,
        include=launcher.include,
        exclude=launcher.exclude,
    )
    return replace(plan, world_size=processes, runner_arguments=arguments, environment=extra)


def _cpu_environment(processes: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Divide the cores among the processes: by default torch uses all cores in each."""
    extra = {"DS_ACCELERATOR": "cpu"}
    if "OMP_NUM_THREADS" not in environ:
        extra["OMP_NUM_THREADS"] = str(max((os.cpu_count() or 1) // processes, 1))
    return extra


def _options(**values: str | int | None) -> list[str]:
    """`--name value` for each that is set."""
    given = {name: value for name, value in values.items() if value}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def _plan_multi_node(plan: LaunchPlan, hosts: dict[str, int], hostfile: Path | None) -> LaunchPlan:
    """On the hosts of a file, or of a Slurm allocation, for which one is written."""
    launcher, address = plan.args.launcher, plan.args.launcher.master_addr
    if address is not None:
        check_host(address, "master_addr")
    if launcher.num_nodes > len(hosts):
        raise ConfigError(f"num_nodes = {launcher.num_nodes} but there are {len(hosts)} hosts.")
    names = list(hosts)[: launcher.num_nodes if launcher.num_nodes > 0 else None]
    for name in names:
        if launcher.num_gpus and hosts[name] < launcher.num_gpus:
            raise ConfigError(f"num_gpus = {launcher.num_gpus} but {name} has {hosts[name]} slots.")
    slots = {name: launcher.num_gpus or hosts[name] for name in names}
    world_size = _filtered_slots(slots, launcher)
    direct = launcher.launcher != "pdsh"
    if direct and address is None:
        # These launchers pass no address on; the ranks read it from the config.
        address = names[0]
        plan = replace(plan, args=plan.args.replace(master_addr=address))
    arguments = QUIET + _options(
        launcher=launcher.launcher,
        master_port=launcher.master_port,
        master_addr=address,
        include=launcher.include,
        exclude=launcher.exclude,
    )
    if hostfile is not None:
        counted = launcher.num_nodes if launcher.num_nodes > 0 else None
        arguments += _options(hostfile=str(hostfile), num_nodes=counted, num_gpus=launcher.num_gpus)
    if launcher.force_multi or (direct and len(names) == 1):
        arguments.append("--force_multi")
    if launcher.no_ssh_check or launcher.launcher == "slurm":
        arguments.append("--no_ssh_check")
    if launcher.launcher == "pdsh":
        arguments.append("--no_local_rank")
    allocation = slots if hostfile is None else None
    text, warnings = _launcher_arguments(launcher, allocation)
    if text:
        arguments.append(f"--launcher_args={text}")
    plan = replace(plan, hosts=allocation, warnings=warnings)
    return replace(plan, world_size=world_size, runner_arguments=arguments)


def _filtered_slots(slots: dict[str, int], launcher: LauncherArgs) -> int:
    if not (launcher.include or launcher.exclude):
        return sum(slots.values())
    try:
        return selected_slots(slots, launcher.include or "", launcher.exclude or "")
    except ValueError as error:
        raise ConfigError(f"include/exclude: {error}") from error


def _launcher_arguments(
    launcher: LauncherArgs, allocation: Mapping[str, int] | None
) -> tuple[str, tuple[str, ...]]:
    """Arguments for pdsh, mpirun or srun, and warnings about keys they have no option for."""
    try:
        words = shlex.split(launcher.launcher_args or "")
    except ValueError as error:
        raise ConfigError(
            f"launcher_args = {launcher.launcher_args!r:.80}: {error}. Close every quote."
        ) from error
    if allocation is not None:
        tasks = next(iter(allocation.values()))
        words = [f"--nodes={len(allocation)}", f"--ntasks-per-node={tasks}", *words]
    slurm = launcher.launcher == "slurm"
    warnings = []
    for key, value in (("account", launcher.account), ("comment", launcher.comment)):
        if value is None:
            continue
        if slurm:
            words.append(f"--{key}={value}")
        else:
            warnings.append(f"{key} = {value!r} has no meaning for launcher {launcher.launcher}")
    return shlex.join(words), tuple(warnings)


def run(plan: LaunchPlan) -> int:
    """Start the plan and return the job's exit code."""
    os.environ.update(plan.environment)
    script = [*plan.script, "--megatron_config", encode_config(plan.args)]
    if plan.runner_arguments is None:
        return run_script(script)
    if plan.hosts is None:
        over_pdsh = "pdsh" in plan.runner_arguments
        signal_job = (
            partial(_signal_owner, plan.args.checkpoint.save) if over_pdsh else _signal_ranks
        )
        return run_job([*plan.runner_arguments, *script], signal_job)
    # DeepSpeed's runner reads it, on this machine only.
    with tempfile.NamedTemporaryFile("w", prefix="hostfile-", encoding="utf-8") as file:
        file.writelines(f"{name} slots={count}\n" for name, count in plan.hosts.items())
        file.flush()
        return run_job([*plan.runner_arguments, "--hostfile", file.name, *script])


# Running a plan: signals are forwarded and exit codes kept.

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def run_script(arguments: Sequence[str]) -> int:
    """Replace this process by the script: signals and the exit code are its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-u", *arguments])  # noqa: S606


def run_job(arguments: Sequence[str], signal_job: Callable[[int], None] | None = None) -> int:
    """DeepSpeed's runner in this process; signals are forwarded to the ranks."""

    def forward(number: int, frame: FrameType | None) -> None:
        (signal_job or _signal_ranks)(number)

    for number in FORWARDED:
        signal.signal(number, forward)
    try:
        run_runner(arguments)
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
        if code:
            print(f"error: a process of the job ended with status {code}.", file=sys.stderr)
        return code
    except (ValueError, RuntimeError, OSError, subprocess.CalledProcessError) as error:
        print(f"error: DeepSpeed's runner: {error}", file=sys.stderr)
        return 1
    return 0


def _signal_ranks(number: int) -> None:
    """Pass a signal to the processes of the job.

    Not to DeepSpeed's launcher, their parent: on SIGTERM it kills each rank after 30 seconds, and
    its exit code hides theirs. It exits when they have.
    """
    import psutil

    for child in psutil.Process().children():
        try:
            for process in child.children() or [child]:
                process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _signal_owner(save: str | None, number: int) -> None:
    """Over pdsh: pass a signal, by ssh, to the rank that holds `save`; all stop after one step.

    Before a rank holds it there is nothing to save, and the job is ended.
    """
    import psutil

    match read_json(Path(save) / OWNER) if save else None:
        case {"host": str(host), "process": int(process)} if HOST.fullmatch(host):
            ours = f"ps -o args= -p {process} | grep -q megatron_config"  # not one that came later
            kill = f"{ours} && kill -{int(number)} {process}"
            command = ["ssh", "-o", "BatchMode=yes", host, kill]
            if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode == 0:
                return
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(signal.SIGTERM)
