"""What a run reads, writes and prints: data, tokenizer, evaluation, generation, checkpoints, logs.

And where it runs: the launcher, the layout over processes, the process itself.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from megatron.neox_arguments.position_keys import PositionKeys
from megatron.neox_arguments.values import (
    Changes,
    Flag,
    Fraction,
    Group,
    Int,
    NonNegativeFloat,
    NonNegativeInt,
    NonNegativeIntList,
    PositiveFloat,
    PositiveInt,
    PositiveIntList,
    PositiveNumber,
    TextList,
    WeightList,
    accepted,
    key,
)


class DataArgs(Group):
    """Datasets, blending and splits."""

    data_path: str | None = key(
        None, "Prefix of one .bin/.idx pair, divided by `split`.", path=True
    )
    train_data_paths: TextList | None = key(
        None, "Training prefixes to blend, not with data_path.", path=True
    )
    valid_data_paths: TextList | None = key(
        None, "Prefixes of validation datasets.", changes="evaluation", resume="same", path=True
    )
    test_data_paths: TextList | None = key(
        None, "Prefixes of test datasets.", changes="evaluation", resume="same", path=True
    )
    train_label_data_paths: TextList | None = key(
        None,
        "Labels of the training data, a prefix for each of train_data_paths (label_data_paths is "
        "the same key): a label for each token, not shifted; below 0 (-100) it carries no loss.",
        path=True,
    )
    valid_label_data_paths: TextList | None = key(
        None, "Labels of the validation data.", changes="evaluation", resume="same", path=True
    )
    test_label_data_paths: TextList | None = key(
        None, "Labels of the test data.", changes="evaluation", resume="same", path=True
    )
    train_data_weights: WeightList | None = key(None, "Shares of training datasets; null: equal.")
    valid_data_weights: WeightList | None = key(
        None, "Share of each validation dataset.", changes="evaluation", resume="same"
    )
    test_data_weights: WeightList | None = key(
        None, "Share of each test dataset.", changes="evaluation", resume="same"
    )
    weight_by_num_documents: bool = key(False, "Blend by documents^alpha, not by given weights.")
    weighted_sampler_alpha: NonNegativeFloat = key(
        1.0, "The alpha of weight_by_num_documents; below 1 lifts small datasets."
    )
    data_impl: Literal["infer", "mmap"] = key(
        "infer",
        "Dataset format; .bin/.idx files are memory-mapped either way.",
        changes="execution",
    )
    pack_impl: Literal["packed", "pack_until_overflow", "unpacked"] = key(
        "packed",
        "What a sample is: tokens of the documents end to end (packed), as many whole documents "
        "as fit (pack_until_overflow), or one document (unpacked); the rest is padding.",
    )
    allow_chopped: bool = key(
        True,
        "With whole documents: cut those that are longer than a sample; false leaves them out.",
    )
    mmap_warmup: bool = key(False, "Read the files once before training.", changes="execution")
    split: str = key("969, 30, 1", "Shares of train, valid and test in data_path, e.g. 949,50,1.")
    num_workers: NonNegativeInt = key(2, "Data-loading processes per rank.", changes="execution")
    eod_mask_loss: bool = key(False, "No loss at end-of-document tokens: what follows is new.")
    reset_attention_mask: bool = key(
        False,
        "Documents packed into one sequence do not see each other, and what would "
        "predict the next one's first token has no loss (as with eod_mask_loss). A document ends "
        "with its end-of-document token.",
    )
    reset_position_ids: bool = key(
        False, "Absolute and rotary positions start at 0 in every document of a sequence."
    )
    randomized_positions: PositiveInt | None = key(
        None,
        "In training only: the positions of a sequence are drawn from this many (sorted, none "
        "twice; learned, sinusoidal, rotary, xpos), so that longer inputs have positions that were "
        "trained. null: consecutive.",
    )
    data_seed: NonNegativeInt | None = key(
        None,
        "Seed of the sample order; null means `seed`. Set it to compare training "
        "seeds on the same documents.",
    )
    data_cache_dir: str | None = key(
        None, "Folder of sample-index caches; null: beside the data.", changes="execution"
    )

    def label_paths(self, split: str) -> list[str]:
        """The label files of `train`, `valid` or `test`."""
        return list(getattr(self, f"{split}_label_data_paths") or ())

    @property
    def tells_documents_apart(self) -> bool:
        """Whether the model gets the places where the documents of a sequence begin."""
        return self.reset_attention_mask or self.reset_position_ids


class TokenizerArgs(Group):
    """Tokenizer and vocabulary."""

    tokenizer_type: Literal[
        "GPT2BPETokenizer",
        "HFTokenizer",
        "HFGPT2Tokenizer",
        "SPMTokenizer",
        "CharLevelTokenizer",
        "TiktokenTokenizer",
    ] = key("GPT2BPETokenizer", "Kind of tokenizer.")
    vocab_file: str | None = key(None, "Vocabulary or tokenizer file.", path=True)
    merge_file: str | None = key(None, "BPE merges (GPT2BPETokenizer).", path=True)
    vocab_size: PositiveInt | None = key(
        None, "This vocabulary size instead of the tokenizer's.", resume="free"
    )


class EvaluationArgs(Group):
    """Validation while training; perplexity by length, passkey and lm-eval tasks after it."""

    changes: ClassVar[Changes] = "evaluation"

    do_train: Flag | None = key(
        None, "Train; null means train_iters > 0.", changes="training", resume="free"
    )
    do_valid: Flag | None = key(None, "Use the validation data; null: if any.")
    do_test: Flag | None = key(None, "Use the test data; null: if any.")
    eval_interval: PositiveInt = key(1000, "Validate every this many steps.")
    eval_iters: NonNegativeInt = key(100, "Batches per validation.")
    eval_tasks: TextList | None = key(
        None,
        "What evaluate.py runs: tasks that docs/evaluation.md names, classes of your own as "
        "module:Class, or names of lm-eval tasks.",
    )
    eval_results_prefix: str = key("", "Start of result file names; empty: <load>/results/step<N>.")
    char_level_ppl: bool = key(False, "Report perplexity per character and per word too.")
    eval_lengths: PositiveIntList | None = key(
        None, "Sequence lengths to evaluate; null means 1x to 32x seq_length."
    )
    eval_protocol: Literal["fixed_sequences", "fixed_tokens"] = key(
        "fixed_sequences",
        "Same number of sequences at every length (the official code) or the same "
        "tokens (as the paper describes).",
    )
    eval_num_sequences: PositiveInt = key(
        16,
        "Sequences per length (fixed_sequences) or at the longest (fixed_tokens); "
        "the paper's tables use 320.",
    )
    eval_last: PositiveInt | None = key(
        None, "Extrapolation: the loss of the last this many tokens of each sequence; null: of all."
    )
    eval_window: PositiveInt | None = key(None, "Window of attention while evaluating; null: none.")
    inference_dtype: Literal["fp32", "bf16", "fp16", "int8"] | None = key(
        None,
        "Precision of evaluate.py and generate.py; null: fp32 on a CPU, `precision` on a GPU. "
        "int8: weights of 8 bits in bf16, on a CPU.",
    )
    eval_context_length: PositiveInt | None = key(None, "lm-eval: the context; null: seq_length.")
    eval_stride: PositiveInt | None = key(
        None, "Sliding-window perplexity: new tokens per window; null: half of each length."
    )
    eval_batch_tokens: PositiveInt | None = key(None, "Tokens evaluated at a time; null: 16,384.")
    eval_limit: PositiveFloat | None = key(
        None, "lm-eval: documents per task (or the share, below 1); null: all."
    )
    eval_include_path: str | None = key(None, "lm-eval: directory of task definitions of your own.")
    num_fewshot: NonNegativeInt | None = key(
        None, "lm-eval: examples in the prompt; null: the task's own number."
    )
    positionwise_buckets: Literal["log", "linear"] | None = key(
        None, "Spacing of the buckets of position-wise loss; null means log."
    )
    positionwise_bucket_count: PositiveInt | None = key(None, "How many buckets; null chooses.")
    passkey_lengths: PositiveIntList | None = key(None, "Prompt lengths; null: eval_lengths.")
    passkey_depths: PositiveInt = key(10, "Depths the key is hidden at.")
    passkey_samples: PositiveInt = key(10, "Prompts per length and depth.")
    passkey_digits: PositiveInt = key(5, "Digits of the key.")
    ruler_tasks: TextList | None = key(
        None,
        "RULER's tasks: niah_single_1, niah_multikey_1, niah_multikey_2, "
        "niah_multivalue, vt, cwe; null means all.",
    )
    ruler_lengths: PositiveIntList | None = key(
        None, "Prompt lengths of ruler, answers included; null means eval_lengths."
    )
    ruler_samples: PositiveInt = key(20, "Prompts per task and length of ruler.")
    longppl_short_context: PositiveInt | None = key(
        None, "Tokens of longppl's short context; null means seq_length."
    )
    longppl_evaluator: str | None = key(
        None,
        "Run or checkpoint that decides which tokens need a long context; null means "
        "the model itself.",
    )
    recall_samples: PositiveInt = key(64, "Sequences per task and length of recall.")


class GenerationArgs(Group):
    """Sampling text."""

    changes: ClassVar[Changes] = "generation"

    text_gen_type: Literal["unconditional", "input-file", "interactive"] | None = key(
        None, "unconditional, input-file or interactive."
    )
    temperature: NonNegativeFloat = key(0.8, "0 takes the most likely token (GPT-NeoX's default).")
    top_p: Fraction = key(0.95, "Nucleus sampling; 0 is off (GPT-NeoX's default).")
    top_k: NonNegativeInt = key(0, "Sample from the k best tokens; 0 is off.")
    maximum_tokens: PositiveInt = key(64, "Tokens to generate.")
    prompt_end: str = key("\n", "What ends a prompt in interactive mode.")
    sample_input_file: str | None = key(None, "Prompts for generate.py, one a line.")
    sample_output_file: str = key("samples.txt", "Where generate.py writes samples.")
    stop_strings: TextList | None = key(
        None, "Stop strings: they end a sample and are removed from it."
    )
    num_samples: PositiveInt = key(1, "Samples per prompt.")
    recompute: bool = key(False, "Do not use the key-value cache.")
    return_logits: bool = key(False, "Write logits of generated tokens too.")


class CheckpointArgs(Group):
    """Where checkpoints go, how often, and what is read back."""

    changes: ClassVar[Changes] = "execution"

    save: str | None = key(None, "Run directory for checkpoints and metrics.")
    load: str | None = key(None, "Run directory to resume or evaluate.")
    checkpoint_factor: PositiveNumber | None = key(
        None,
        "Save every this many steps (linear), or at step 1 and at the powers of this, "
        "which may be a fraction above 1 (log). `save_interval` is the old name. The last step is "
        "always saved.",
    )
    checkpoint_scale: Literal["linear", "log"] = key("linear", "Spacing of checkpoints.")
    extra_save_iters: NonNegativeIntList | None = key(
        None, "More steps to save at; 0 is the model before the first."
    )
    async_save: bool = key(
        False,
        "Continue training while a checkpoint is written, from a copy in host memory (as "
        "large as the rank's files). It becomes visible once all ranks have written it; a crash "
        "before that leaves the older one. Signals and the end of the run wait for it.",
    )
    keep_last_n_checkpoints: PositiveInt | None = key(None, "Delete older ones; null keeps all.")
    overwrite: bool = key(
        False,
        "Start a new run in a `save` that holds a run; the old run is moved to `save`.replacedN.",
    )
    allow_changed: TextList | None = key(
        None,
        "Keys that a resumed run may set differently from the saved config, such as "
        "[train_batch_size]; all others that decide what is computed must be equal.",
    )
    iteration: NonNegativeInt | None = key(None, "Load this step instead of the one in `latest`.")
    finetune: bool = key(
        False,
        "Load weights only and start from step 0 with a fresh optimizer.",
        changes="training",
        resume="free",
    )
    load_positions: Literal["same", "fresh"] = key(
        "same",
        "fresh: the checkpoint in `load` may have another pos_emb; its weights of positions are "
        "dropped, and those of this config are initialised (kerple_init); optimizer, schedule and "
        "step start at 0. same: another pos_emb is refused.",
        ours=True,
        changes="training",
        resume="free",
    )
    no_save_optim: bool = key(
        False,
        "Leave the optimizer out of checkpoints.",
        refused="optimizer states are always saved; --to hf exports weights alone",
    )
    no_save_rng: bool = key(False, "Leave random states out of checkpoints.")
    no_load_optim: bool = key(False, "Do not load the optimizer.")
    no_load_rng: bool = key(False, "Do not load random states.")
    checkpoint_validation_with_forward_pass: bool = key(
        False,
        "Save logits of a probe with each checkpoint and compare on load.",
        refused="checkpoints are verified by checksums instead",
    )


class LauncherArgs(Group):
    """Hosts, processes and the program that starts them."""

    changes: ClassVar[Changes] = "execution"

    hostfile: str | None = key(
        None,
        "File with one `name slots=N` per line; null, or a file that is not there: "
        "this machine only. The variable DLTS_HOSTFILE sets it too.",
    )
    include: str | None = key(None, "Hosts and devices to use: worker-0@worker-1:0,2.")
    exclude: str | None = key(None, "Hosts and devices not to use.")
    num_nodes: Annotated[Int, Field(ge=-1)] = key(-1, "The first N hosts of the hostfile; -1: all.")
    num_gpus: PositiveInt | None = key(
        None, "Processes per node; null means every GPU, or one process without GPUs."
    )
    master_port: Annotated[PositiveInt, Field(le=65535)] = key(
        29500, "Port of the first rank; if it is not set, a free one is taken on a single node."
    )
    master_addr: str | None = key(None, "Address of the first rank.")
    launcher: Literal["pdsh", "openmpi", "mvapich", "slurm"] = key(
        "pdsh", "What starts processes on several nodes."
    )
    launcher_args: str | None = key(None, "More arguments of the launcher, e.g. --partition=a100.")
    account: str | None = key(None, "Slurm account, passed to srun.")
    comment: str | None = key(None, "Slurm comment, passed to srun.")
    force_multi: bool = key(False, "Use the launcher even for one node.")
    no_ssh_check: bool = key(False, "Do not try ssh to the first host.")
    deepspeed_mpi: bool = accepted("MPI's variables are recognised by themselves.")
    deepspeed_slurm: bool = accepted("Slurm's variables are recognised by themselves.")

    @property
    def chosen_port(self) -> int | None:
        """master_port if it is not the default, which saved configs hold too."""
        default = type(self).model_fields["master_port"].default
        return None if self.master_port == default else self.master_port


class LoggingArgs(Group):
    """Metrics, TensorBoard, wandb, profiling."""

    changes: ClassVar[Changes] = "logging"

    log_interval: PositiveInt = key(100, "Log metrics every this many steps.")
    steps_per_print: PositiveInt = key(
        10,
        "Print a line at least this often where there is no terminal for a bar; "
        "log_interval may be shorter.",
    )
    wall_clock_breakdown: bool = key(False, "Let DeepSpeed time forward, backward and step.")
    log_dir: str | None = key(None, "Directory of per-rank text logs.")
    tensorboard_dir: str | None = key(None, "Write TensorBoard events here.")
    use_wandb: bool | None = key(None, "Log to wandb (WANDB_MODE=offline works).")
    wandb_group: str | None = key(None, "wandb group of this run.")
    wandb_team: str | None = key(None, "wandb team or user.")
    wandb_project: str = key("neox", "wandb project.")
    wandb_host: str = key("https://api.wandb.ai", "wandb server.")
    wandb_run_name: str | None = key(None, "wandb name of this run.")
    wandb_init_all_ranks: bool = key(False, "A wandb run per rank.", refused="rank 0 logs for all")
    log_grad_norm: bool = accepted("the norm of the whole gradient is always logged.")
    log_param_norm: bool = key(
        False, "Log the norm of each parameter, `parameter_norms/NAME`, every log_interval steps."
    )
    log_optimizer_states: bool = key(
        False,
        "Log the norms of the optimizer's moments.",
        refused="optimizer states are not logged",
    )
    log_grad_pct_zeros: bool = key(
        False,
        "Log the percentage of zeros in each parameter's gradient, `pct_grad_zeros/NAME`, every "
        "log_interval steps.",
    )
    profile: bool = key(
        False,
        "Record the steps after profile_step_start up to profile_step_stop with torch.profiler, on "
        "every rank: <save>/profile/trace_rank<R>.json.gz, which Perfetto opens.",
    )
    profile_step_start: NonNegativeInt = key(10, "The recording begins after this step.")
    profile_step_stop: PositiveInt = key(12, "The recording ends with this step.")
    memory_profiling: bool = key(
        False,
        "Record the GPU's allocations over the same steps, for torch's memory viewer; a CPU's are "
        "not recorded.",
    )
    memory_profiling_path: str | None = key(
        None, "Folder of the memory snapshots; null: <save>/profile."
    )
    flops_profiler: dict[str, Any] | None = key(None, "DeepSpeed's flops_profiler, passed on.")
    comms_logger: dict[str, Any] | None = key(None, "DeepSpeed's comms_logger, passed on.")
    dump_state: bool = key(False, "Let DeepSpeed print its state at start.")


class ParallelArgs(Group):
    """Tensor, pipeline, sequence and data parallelism."""

    changes: ClassVar[Changes] = "execution"

    pipe_parallel_size: NonNegativeInt = key(
        0,
        "Pipeline stages; 0 is a plain model without DeepSpeed's pipeline engine, "
        "1 is that engine with one stage.",
    )
    model_parallel_size: PositiveInt = key(1, "Tensor-parallel processes.")
    sequence_parallel_size: PositiveInt = key(
        1,
        "Processes that share each sequence: each holds its part of the positions, and in "
        "attention all positions of its share of the heads (Ulysses).",
    )
    pipe_partition_method: str = key(
        "type:transformer|mlp",
        "How layers are assigned to pipeline stages: uniform, parameters or type:REGEX.",
    )
    distributed_backend: str = key(
        "nccl", "torch.distributed backend on GPUs; on CPUs always gloo."
    )

    @property
    def processes_per_replica(self) -> int:
        """Processes that together hold one copy of the model."""
        return max(self.pipe_parallel_size, 1) * self.model_parallel_size


class RuntimeArgs(Group):
    """Seeds, timeouts, debugging."""

    seed: Annotated[NonNegativeInt, Field(le=2**32 - 1)] = key(
        PositionKeys.seed, "Seed of weights, dropout and (see data_seed) data."
    )
    exit_interval: PositiveInt | None = key(
        None, "Save and stop at the first step that is a multiple of this.", changes="execution"
    )
    distributed_timeout_minutes: PositiveFloat = key(
        30.0, "Timeout of collectives, and of a rank that does not respond.", changes="execution"
    )
    detect_anomaly: bool = key(
        False, "torch's anomaly detection: slow, names the source of a NaN.", changes="execution"
    )
    training_backend: Literal["deepspeed", "torch"] | None = key(
        None,
        "The training backend: DeepSpeed, or torch alone (one process, fp32, no ZeRO, no "
        "pipeline: the same numbers). null: DeepSpeed if it is installed.",
        ours=True,
        changes="execution",
    )
    deepspeed_extra_args: dict[str, Any] | None = key(
        None, "More top-level entries for DeepSpeed's config, passed on as they are.", resume="free"
    )
