"""Saving and loading."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megatron.neox_arguments.values import (
    NO_EFFECT,
    Group,
    Int,
    NonNegativeInt,
    NonNegativeIntList,
    PositiveFloat,
    PositiveInt,
    TextList,
)


class CheckpointArgs(Group):
    """Where checkpoints go, how often, and what is read back."""

    save: str | None = Field(None, description="Run directory for checkpoints and metrics.")
    load: str | None = Field(None, description="Run directory to resume or evaluate.")
    checkpoint_factor: PositiveInt | PositiveFloat | None = Field(
        None,
        description="Save every this many steps (linear), or at step 1 and at the powers of this, "
        "which may be a fraction above 1 (log). `save_interval` is the old name. The last step is "
        "always saved.",
    )
    checkpoint_scale: Literal["linear", "log"] = Field(
        "linear", description="Spacing of checkpoints."
    )
    extra_save_iters: NonNegativeIntList | None = Field(
        None, description="More steps to save at; 0 is the model before the first."
    )
    async_save: bool = Field(
        False,
        description="Go on training while a checkpoint is written, from a copy in host memory (as "
        "much again as its files per rank). It becomes visible once all ranks have written it; a "
        "crash before that leaves the older one. Signals and the end of the run wait for it.",
    )
    keep_last_n_checkpoints: PositiveInt | None = Field(
        None, description="Delete older checkpoints; null keeps all."
    )
    overwrite: bool = Field(
        False,
        description="Start anew in a `save` that holds a run; the old run is moved aside, to "
        "`save`.replacedN.",
    )
    allow_changed: TextList | None = Field(
        None,
        description="Keys that a resumed run may set differently from the saved config, such as "
        "[train_batch_size]; all others that decide what is computed must be equal.",
    )
    iteration: NonNegativeInt | None = Field(
        None, description="Load this step instead of the one named in `latest`."
    )
    finetune: bool = Field(
        False, description="Load weights only and start from step 0 with a fresh optimizer."
    )
    no_save_optim: bool = Field(False, description="Leave the optimizer out of checkpoints.")
    no_save_rng: bool = Field(False, description="Leave random states out of checkpoints.")
    no_load_optim: bool = Field(False, description="Do not load the optimizer.")
    no_load_rng: bool = Field(False, description="Do not load random states.")
    checkpoint_validation_with_forward_pass: bool = Field(
        False, description="Save logits of a probe with each checkpoint and compare on load."
    )


# How deepy.py starts the processes.


class LauncherArgs(Group):
    """Hosts, processes and the program that starts them."""

    hostfile: str | None = Field(
        None,
        description="File with one `name slots=N` per line; null, or a file that is not there: "
        "this machine only. The variable DLTS_HOSTFILE sets it too.",
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


# What is written down while training.


class LoggingArgs(Group):
    """Metrics, TensorBoard, wandb, profiling."""

    log_interval: PositiveInt = Field(100, description="Log metrics every this many steps.")
    steps_per_print: PositiveInt = Field(
        10,
        description="Print a line at least this often where there is no terminal for a bar; "
        "log_interval may be shorter.",
    )
    wall_clock_breakdown: bool = Field(
        False, description="Let DeepSpeed time forward, backward and step."
    )
    log_dir: str | None = Field(None, description="Directory of per-rank text logs.")
    tensorboard_dir: str | None = Field(None, description="Write TensorBoard events here.")
    use_wandb: bool | None = Field(None, description="Log to wandb (WANDB_MODE=offline works).")
    wandb_group: str | None = Field(None, description="wandb group of this run.")
    wandb_team: str | None = Field(None, description="wandb team or user.")
    wandb_project: str = Field("neox", description="wandb project.")
    wandb_host: str = Field("https://api.wandb.ai", description="wandb server.")
    wandb_run_name: str | None = Field(None, description="wandb name of this run.")
    wandb_init_all_ranks: bool = Field(False, description="One wandb run per rank.")
    log_grad_norm: bool = Field(
        False,
        description="Accepted for old files: the norm of the whole gradient is always logged.",
        json_schema_extra=NO_EFFECT,
    )
    log_param_norm: bool = Field(False, description="Log the norm of each parameter.")
    log_optimizer_states: bool = Field(
        False, description="Log the norms of the optimizer's moments."
    )
    log_grad_pct_zeros: bool = Field(False, description="Log the share of zeros in each gradient.")
    flops_profiler: dict[str, Any] | None = Field(
        None, description="DeepSpeed's flops_profiler block, passed on."
    )
    comms_logger: dict[str, Any] | None = Field(
        None, description="DeepSpeed's comms_logger block, passed on."
    )
    dump_state: bool = Field(False, description="Let DeepSpeed print its state at start.")


# How the model is spread over processes.


class ParallelArgs(Group):
    """Tensor, pipeline and data parallelism."""

    pipe_parallel_size: NonNegativeInt = Field(
        0,
        description="Pipeline stages; 0 is a plain model without DeepSpeed's pipeline engine, "
        "1 is that engine with one stage.",
    )
    model_parallel_size: PositiveInt = Field(1, description="Tensor-parallel processes.")
    pipe_partition_method: str = Field(
        "type:transformer|mlp",
        description="How layers are dealt to pipeline stages: uniform, parameters or type:REGEX.",
    )
    distributed_backend: str = Field(
        "nccl", description="torch.distributed backend on GPUs; on CPUs it is always gloo."
    )

    @property
    def processes_per_replica(self) -> int:
        """Processes that together hold one copy of the model."""
        return max(self.pipe_parallel_size, 1) * self.model_parallel_size


# The process itself.


class RuntimeArgs(Group):
    """Seeds, timeouts, debugging."""

    seed: NonNegativeInt = Field(
        1234, le=2**32 - 1, description="Seed of weights, dropout and (see data_seed) data."
    )
    exit_interval: PositiveInt | None = Field(
        None, description="Save and stop at the first step divisible by this."
    )
    distributed_timeout_minutes: PositiveFloat = Field(
        30.0, description="Give up on a silent peer after this long."
    )
    detect_anomaly: bool = Field(
        False, description="torch's anomaly detection: slow, names the operation behind a NaN."
    )
    deepspeed_extra_args: dict[str, Any] | None = Field(
        None, description="More top-level entries for DeepSpeed's config, passed on as they are."
    )
