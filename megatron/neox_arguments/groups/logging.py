"""What is written down while training."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ..fields import Group, PositiveInt


class LoggingArgs(Group):
    """Metrics, TensorBoard, wandb, profiling."""

    log_interval: PositiveInt = Field(100, description="Log metrics every this many steps.")
    steps_per_print: PositiveInt = Field(
        10,
        description="Accepted for old files: DeepSpeed's own lines are silenced, log_interval "
        "sets ours.",
        json_schema_extra={"effect": "none"},
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
    log_grad_norm: bool = Field(False, description="Log the gradient norm of each parameter.")
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
