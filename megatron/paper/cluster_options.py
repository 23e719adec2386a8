"""What differs between Slurm clusters: options of `submit`, or a file for its `--cluster`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron.errors import ConfigError, ReproduceError
from megatron.neox_arguments.yaml_files import parse_yaml, read_text

__all__ = ["ClusterOptions"]


class ClusterOptions(BaseModel):
    """What differs between clusters; None leaves the cluster's default.

    The same names are options of `submit` (with hyphens) and keys of a file for `--cluster`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    account: str | None = Field(None, description="account to charge")
    partition: str | None = Field(None, description="partition of the GPU nodes")
    data_partition: str | None = Field(
        None, description="partition of the data and report jobs, which need no GPU"
    )
    qos: str | None = Field(None, description="quality of service")
    constraint: str | None = Field(None, description="node features of the GPU jobs")
    gpu_type: str | None = Field(None, description="GPU type as in --gres=gpu:TYPE:N")
    gpus_per_task: Literal["all", "one"] = Field(
        "all", description="which of a job's GPUs each task sees: all of them, or its own one"
    )
    no_gpus: bool = Field(False, description="CPU nodes: one process per task")
    cpus_per_task: int = Field(8, ge=1, description="processors of each training process (8)")
    memory: str | None = Field(None, description="memory of a node, as for --mem")
    time: str = Field("24:00:00", description="limit of a training job (24:00:00)")
    evaluate_time: str = Field("4:00:00", description="limit of an evaluation job (4:00:00)")
    data_time: str = Field("24:00:00", description="limit of a data job (24:00:00)")
    data_cpus: int = Field(8, ge=1, description="processors of a data job (8)")
    grace: int = Field(300, ge=1, description="seconds before the limit at which runs save (300)")
    at_once: int | None = Field(None, ge=1, description="most array tasks at a time")
    scratch: str | None = Field(
        None,
        description="node-local directory for temporary files and compiled engines; shell "
        "variables are expanded in the job, e.g. '/scratch/$SLURM_JOB_ID'",
    )
    container: str | None = Field(
        None, description="command before python, e.g. 'apptainer exec --nv image.sif'"
    )
    python: str | None = Field(None, description="python inside the container (this one)")
    setup: tuple[str, ...] = Field((), description="shell line before python, e.g. 'module load x'")
    sbatch: tuple[str, ...] = Field((), description="further sbatch option")

    @classmethod
    def from_file(cls, path: str | None, given: Mapping[str, Any]) -> ClusterOptions:
        """A cluster's file, and what the command line says instead."""
        content: Any = {}
        try:
            if path is not None:
                content = parse_yaml(read_text(path), path) or {}
            if not isinstance(content, dict):
                raise ReproduceError(f"--cluster {path}: expected a mapping of options")
            return cls.model_validate({**content, **given})
        except ConfigError as error:
            raise ReproduceError(f"--cluster {error}") from error
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            known = ", ".join(cls.model_fields)
            raise ReproduceError(
                f"cluster option {key}: {first['msg']} (options: {known})"
            ) from error
