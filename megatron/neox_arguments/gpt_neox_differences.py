"""Keys and situations that behave differently here and in GPT-NeoX.

The table of docs/coming_from_neox.md is generated from this list, and `kerple check` prints the
rows about keys of the files that it checks. `key` stands for each value that is not off, `key:
value` for that value alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron.neox_arguments.yaml_files import parse_yaml


class Difference(NamedTuple):
    """One row of the table, in Markdown."""

    what: str
    there: str
    here: str
    switch: str = ""
    """The keys with which it is as there, or as wanted."""

    @property
    def is_certain(self) -> bool:
        """Whether a key is enough for the difference; else the row names a condition as well."""
        return re.fullmatch(r"(`[^`]+`(, )?)+", self.what) is not None

    def keys(self, values: Mapping[str, Any]) -> list[str]:
        """Which keys of a config the row is about; of a row with a condition, the first key."""
        if "left out" in self.what:
            return []
        named = [text.partition(": ") for text in re.findall(r"`([^`]+)`", self.what)]
        return [
            key
            for key, stated, value in (named if self.is_certain else named[:1])
            if key in values
            and (_agrees(values[key], parse_yaml(value, self.what)) if stated else values[key])
        ]


def _agrees(value: Any, stated: Any) -> bool:
    """Whether a value is the stated one; a block may have other keys besides."""
    if isinstance(value, dict) and isinstance(stated, dict):
        return stated.items() <= value.items()
    return bool(value == stated)


DIFFERENCES = (
    Difference(
        "`load` of GPT-NeoX's checkpoint without DeepSpeed's optimizer files (or with those "
        "of fp16 without ZeRO, ZeRO 3, several pipeline stages, `round_robin_gradients` on "
        "several ranks, `elastic_checkpoint`, another optimizer than Adam)",
        "starts with the files that exist",
        "refused",
        "`finetune: true` begins a new run with the weights",
    ),
    Difference(
        "`gpt_j_residual` with `use_bias_in_mlp` off and a gated MLP",
        "attention is dropped, a bug",
        "both branches are added; such a checkpoint of GPT-NeoX's is refused",
        "`use_bias_in_mlp`",
    ),
    Difference(
        "`use_bias_in_norms: false` with layernorm",
        "ignored: norms have biases, which are trained",
        "no biases; a loaded checkpoint's weights decide",
    ),
    Difference(
        "`hidden_dropout` without MLP biases (and, with `gpt_j_residual`, of attention "
        "without biases)",
        "not applied to that branch",
        "applied",
    ),
    Difference(
        "`attention_config` with `flash` and T5's table",
        "the table is ignored",
        "added, as with `global`",
    ),
    Difference(
        "`attention_config` with `local`",
        "blocks, by `sparsity_config`",
        "the window `sliding_window_width`; its checkpoints are refused",
    ),
    Difference(
        "`apply_query_key_layer_scaling` with tables",
        "layer l's bias is l times its table",
        "the same; in runs that began here before, the key has no effect",
        "`scale_tables_by_layer: false`",
    ),
    Difference(
        "`fp32_allreduce`",
        "sums over tensor-parallel ranks in fp32",
        "averages of gradients in fp32",
    ),
    Difference(
        "`init_method: orthogonal`",
        "fails",
        "the fork's, with gain sqrt(2)",
    ),
    Difference(
        "`warmup` of less than one step",
        "the first learning rate is above the peak",
        "the same, with a warning",
        "`warmup: 0`",
    ),
    Difference(
        "`use_wandb` left out",
        "logs if wandb finds an API key",
        "does not log",
        "`use_wandb: true`",
    ),
    Difference(
        "`<|endoftext|>` in a text for `TiktokenTokenizer`",
        "an error",
        "ordinary text",
    ),
    Difference(
        "`attention_softmax_in_fp32`, `use_cpu_initialization`, "
        "`scaled_masked_softmax_fusion`, `bias_dropout_fusion`, `rope_fusion`, "
        "`layernorm_fusion`, `deepspeed_mpi`, `deepspeed_slurm`",
        "precision, speed or launching",
        "no effect: softmax is fp32, weights do not depend on the device, engines are fused, "
        "ranks come from the environment",
    ),
    Difference(
        "`seq_length`, `optimizer`, `zero_optimization` left out",
        "fails, or DeepSpeed's",
        "2048; Adam with lr 0.001; stage 0",
    ),
    Difference(
        "`gradient_accumulation_steps` left out",
        "1, or what the batch sizes require",
        "what the batch sizes require",
    ),
    Difference(
        "learning rates of the paper",
        "the fork's schedule: rate 0 in the first step, a cosine that ends above 0",
        "GPT-NeoX's of today",
        "`lr_decay_rule: kerple`",
    ),
    Difference(
        "weight decay of T5's table (and, in the fork, of kernels)",
        "`weight_decay`",
        "none",
        "`kerple_weight_decay: 0.1`",
    ),
    Difference(
        "keys that differ on resume",
        "another schedule is refused, other keys are not compared",
        "another value of any key of the model, the data, the optimizer or the schedule is refused",
        "`allow_changed: [train_batch_size]`; `override_lr_scheduler` or "
        "`use_checkpoint_lr_scheduler: true` for the schedule",
    ),
    Difference(
        "`save` of another run",
        "overwritten, unless `load` is set",
        "continued if it is this run, else refused",
        "`overwrite: true` moves the old one aside",
    ),
    Difference(
        "T5's table and kernels under pipeline parallelism",
        "a copy per stage; the copies diverge",
        "one owner, the same model in every layout",
        "`kerple_share: per_layer` for one per layer",
    ),
    Difference(
        "positions, rotary angles, softmax",
        "in the precision of the model",
        "in fp32",
        "`kerple_legacy_bf16: true` or `kerple_legacy_fp16: true` for kernels",
    ),
    Difference(
        "lengths beyond `max_position_embeddings`",
        "refused",
        "allowed for every `pos_emb` but `learned`",
    ),
    Difference(
        "initial weights",
        "depend on the layout",
        "depend only on the seed",
    ),
    Difference(
        "`fp16: {type: bfloat16}`",
        "fp16",
        "bf16",
    ),
    Difference(
        "fp16 and bf16 with ZeRO stage 0",
        "stage 0",
        "stage 1, which computes the same",
    ),
    Difference(
        "one key in two files",
        "the last one wins, if it is hyphenated",
        "an error that names both",
        "`--override FILE`, `--set key=value`",
    ),
    Difference(
        "steps with a NaN or infinite loss or gradient",
        "the run continues",
        "the run ends after 20 in a row",
        "`max_consecutive_nonfinite: 0`",
    ),
    Difference(
        "`temperature`, `top_p` left out",
        "0, 0: the most likely token",
        "0.8, 0.95: samples",
        "`temperature: 0` with `top_p: 0`",
    ),
    Difference(
        "`log_grad_norm`",
        "the norm of each parameter's gradient",
        "the norm of the whole gradient, always",
    ),
    Difference(
        "`log_grad_pct_zeros`",
        "each step, by a DeepSpeed that keeps gradients",
        "every `log_interval` steps, over all ranks",
        "`log_interval: 1`",
    ),
    Difference(
        "`train_epochs` with `train_iters`",
        "refused",
        "refused if they are different numbers of steps",
    ),
    Difference(
        "`train_epochs` with several datasets",
        "equal weights, whatever their sizes",
        "refused",
    ),
    Difference(
        "`train_epochs`, resumed",
        "the next pass repeats only what followed the resume",
        "every pass is whole",
    ),
    Difference(
        "`keep_last_n_checkpoints`",
        "older checkpoints are deleted first",
        "older checkpoints are deleted when the new one is complete",
    ),
    Difference(
        "`train_iters: 0`",
        "refused",
        "evaluates the loaded checkpoint (as the fork)",
    ),
    Difference(
        "CPUs",
        "refused",
        "everything runs on them",
        "`DS_ACCELERATOR=cpu`",
    ),
)
