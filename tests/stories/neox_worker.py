"""Runs GPT-NeoX's own modules on a CPU, in a process of its own: `neox_worker.py CHECKOUT JOBS`.

Each job names a folder and a config. In the folder it leaves a checkpoint in GPT-NeoX's layout and
`expected.npz`: tokens, logits, the standard deviation of each parameter as GPT-NeoX draws it, and
which parameters it decays. Weights are then set by `drawn`, so that a recording need not keep
them.

GPT-NeoX imports packages that are for GPUs or for logging; where one is missing, an empty module
stands in. Nothing that computes is replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import types
import zlib
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
import yaml

LENGTH, VOCABULARY, STEP = 40, 64, "global_step3"
STANDS_IN = {
    "pkg_resources", "lm_dataformat", "wandb", "boto3", "hf_transfer", "mup", "best_download",
    "flash_attn", "shortuuid", "zmq", "comet_ml", "ftfy", "jsonlines",
}  # fmt: skip


def drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A weight as its name decides: norms near 1, all else near 0."""
    noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    is_norm_scale = "norm" in name and name.rpartition(".")[2] in ("weight", "scale", "g")
    values = 1 + 0.2 * noise if is_norm_scale else 0.25 * noise
    return torch.from_numpy(np.asarray(values, np.float32))


def random_tokens(seed: int) -> torch.Tensor:
    tokens = np.random.RandomState(seed).randint(0, VOCABULARY, (2, LENGTH))
    return torch.from_numpy(tokens.astype(np.int64))


class _EmptyModules:
    """Finds a package that is not installed, with attributes that are never called."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in STANDS_IN:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        if spec.name == "pkg_resources":
            import packaging.version

            module.packaging = packaging  # type: ignore[attr-defined]
        else:
            module.__getattr__ = _attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


def _attribute(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock()


def start(checkout: str) -> None:
    """A job of one process, with GPT-NeoX importable."""
    sys.meta_path.append(_EmptyModules())  # type: ignore[arg-type]
    sys.path[:] = [checkout, *(path for path in sys.path if path != str(Path.cwd()))]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    deepspeed = import_module("deepspeed")
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    deepspeed.init_distributed("gloo")
    random = import_module("deepspeed.runtime.activation_checkpointing.checkpointing")
    random.CudaRNGStatesTracker.fork = lambda self, *names: contextlib.nullcontext()
    import_module("megatron.mpu").initialize_model_parallel(1)


def build(config: dict[str, Any], *, pipeline: bool = False) -> tuple[Any, Any]:
    """The model of a config, and the arguments that GPT-NeoX makes of it."""
    arguments = import_module("megatron.neox_arguments").NeoXArgs
    topology = import_module("deepspeed.runtime.pipe.topology").PipeModelDataParallelTopology
    args = arguments.from_dict({**config, "global_num_gpus": 1})
    args.padded_vocab_size = VOCABULARY
    model = import_module("megatron.model.gpt2_model").GPT2ModelPipe(
        args, num_tokentypes=0, parallel_output=pipeline, topology=topology(1, 1, 1)
    )
    return (model if pipeline else model.to_sequential().eval()), args


def record(folder: Path, config: dict[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    model, args = build(config)
    parameters = dict(model.named_parameters())
    deviations = {name: float(p.detach().std(correction=0)) for name, p in parameters.items()}
    groups = import_module("megatron.model.utils").get_params_for_weight_decay_optimization(
        model, args
    )
    decayed = {id(p) for p in groups[0]["params"]}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(drawn(name, tuple(parameter.shape)))
    tokens = random_tokens(seed)
    masks = import_module("megatron.utils").get_ltor_masks_and_position_ids
    mask, _, positions = masks(tokens, 0, sliding_window_width=args.sliding_window_width)
    with torch.no_grad():
        logits = model((tokens, positions, mask))
    logits = logits[0] if isinstance(logits, tuple) else logits
    facts = {
        name: [list(p.shape), deviations[name], id(p) in decayed] for name, p in parameters.items()
    }
    (folder / STEP / "configs").mkdir(parents=True)
    (folder / "latest").write_text(STEP)
    (folder / STEP / "configs" / "model.yml").write_text(yaml.safe_dump(config))
    state = {"module": dict(model.state_dict()), "iteration": 3}
    torch.save(state, folder / STEP / "mp_rank_00_model_states.pt")
    np.savez_compressed(
        folder / "expected.npz", seed=seed, logits=logits.numpy(), facts=json.dumps(facts)
    )


def train(folder: Path, config: dict[str, Any], seed: int) -> None:
    """Three steps with DeepSpeed, saved as GPT-NeoX saves; then what DeepSpeed loads from there."""
    deepspeed = import_module("deepspeed")
    pipeline = config.get("pipe_parallel_size", 0) > 0
    zero = {"stage": config.get("zero_optimization", {}).get("stage", 0)}
    settings = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }

    def engine_of() -> Any:
        torch.manual_seed(seed)
        model, args = build(config, pipeline=pipeline)
        groups = import_module("megatron.model.utils").get_params_for_weight_decay_optimization(
            model, args
        )
        lr = args.optimizer["params"]["lr"]
        optimizer = torch.optim.AdamW(list(groups), lr=lr, weight_decay=args.weight_decay)
        steps = args.lr_decay_iters or args.train_iters
        schedule = import_module("megatron.learning_rates").AnnealingLR(
            optimizer, start_lr=lr, warmup_iter=args.warmup * steps, total_iters=steps,
            decay_style=args.lr_decay_style, last_iter=0, min_lr=args.min_lr,
        )  # fmt: skip
        return deepspeed.initialize(
            model=model.train(), optimizer=optimizer, lr_scheduler=schedule, config=settings
        )[0]

    engine = engine_of()
    masks = import_module("megatron.utils").get_ltor_masks_and_position_ids
    for step in range(3):
        tokens = random_tokens(seed + step)
        mask, weights, positions = masks(tokens, 0)
        if pipeline:
            engine.train_batch(iter([((tokens, positions, mask), (tokens.roll(-1, 1), weights))]))
            continue
        logits = engine((tokens, positions, mask))
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
        )
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(folder), tag=STEP, client_state={"iteration": 3})
    (folder / STEP / "configs").mkdir()
    (folder / STEP / "configs" / "model.yml").write_text(yaml.safe_dump(config))
    for script in folder.glob("*.py"):  # DeepSpeed leaves its converter there
        script.unlink()
    loaded = engine_of()
    loaded.load_checkpoint(str(folder), tag=STEP)
    arrays = {"rate": np.array(loaded.lr_scheduler.get_lr())}
    names = {id(p): name for name, p in loaded.module.named_parameters()}
    for parameter, values in _loaded_states(loaded, zero["stage"]):
        name = names[id(parameter)]
        arrays |= {f"{name}|{key}": value.detach().numpy() for key, value in values.items()}
    np.savez_compressed(folder / "expected.npz", **arrays)


def _loaded_states(engine: Any, stage: int) -> Iterator[tuple[Any, dict[str, torch.Tensor]]]:
    """Each parameter with its fp32 weight and moments, as an engine of one process holds them."""
    keys = ("exp_avg", "exp_avg_sq")
    if not stage:
        for parameter, state in engine.optimizer.state.items():
            yield parameter, {"fp32": parameter, **{key: state[key] for key in keys}}
        return
    wrapper = engine.optimizer
    for group, flat in zip(
        wrapper.round_robin_bit16_groups, wrapper.single_partition_of_fp32_groups, strict=True
    ):
        vectors = {"fp32": flat, **{key: wrapper.optimizer.state[flat][key] for key in keys}}
        start = 0
        for parameter in group:
            stop = start + parameter.numel()
            yield parameter, {k: v[start:stop].view(parameter.shape) for k, v in vectors.items()}
            start = stop


def main() -> None:
    checkout, jobs = sys.argv[1:]
    start(checkout)
    for job in json.loads(Path(jobs).read_text()):
        folder = Path(job["folder"])
        try:
            (train if job.get("train") else record)(folder, job["config"], job["seed"])
        except Exception as error:  # GPT-NeoX refuses, or cannot run, such a model
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "refused").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
