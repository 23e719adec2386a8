"""How deepy.py starts the processes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..fields import NO_EFFECT, Group, Int, PositiveInt


class LauncherArgs(Group):
    """Hosts, processes and the program that starts them."""

    hostfile: str | None = Field(
        None, description="File with one `name slots=N` per line; null: this machine only."
    )
    include: str | None = Field(
        None, description="Hosts and devices to use: worker-0@worker-1:0,2."
    )
    exclude: str | None = Field(None, description="Hosts and devices not to use.")
    num_nodes: Annotated[Int, Field(ge=-1)] = Field(
        -1, description="Use the first N hosts of the hostfile; -1 all."
    )
    num_gpus: PositiveInt | None = Field(
        None,
        description="Processes per node; null means every GPU, or one process without GPUs.",
    )
    master_port: Annotated[PositiveInt, Field(le=65535)] = Field(
        29500,
        description="Port of the first rank; if it is not set, a free one is taken on a single "
        "node.",
    )
    master_addr: str | None = Field(None, description="Address of the first rank.")
    launcher: Literal["pdsh", "openmpi", "mvapich", "slurm"] = Field(
        "pdsh", description="What starts processes on several nodes."
    )
    launcher_args: str | None = Field(
        None, description="More arguments for the launcher, as one string: --partition=a100."
    )
    account: str | None = Field(None, description="Slurm account, passed to srun.")
    comment: str | None = Field(None, description="Slurm comment, passed to srun.")
    force_multi: bool = Field(False, description="Use the launcher even for one node.")
    no_ssh_check: bool = Field(False, description="Do not try ssh to the first host.")
    deepspeed_mpi: bool = Field(
        False,
        description="Accepted for old files: MPI's variables are recognised by themselves.",
        json_schema_extra=NO_EFFECT,
    )
    deepspeed_slurm: bool = Field(
        False,
        description="Accepted for old files: Slurm's variables are recognised by themselves.",
        json_schema_extra=NO_EFFECT,
    )
