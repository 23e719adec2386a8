"""A tiny run directory with data, as training would leave it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from megatron.data import IndexedDatasetWriter, build_train_valid_test_datasets
from megatron.evaluation.evaluator import run_evaluation
from megatron.model import GPTModel, ModelSpec
from megatron.neox_arguments import NeoXArgs

VOCAB = 512
TINY: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "pos_emb": "kerple_log",
    "no_weight_tying": True,
    "tokenizer_type": "CharLevelTokenizer",
    "train_batch_size": 1,
    "train_iters": 1,
    "split": "0.5,0.3,0.2",
    "attention_engine": "naive",
    "eval_num_sequences": 5,
}


def tiny_config(**changes: Any) -> dict[str, Any]:
    return {**TINY, **changes}


def sharpened(model: GPTModel, factor: float = 8.0) -> GPTModel:
    """Larger weights: predictions of a fresh model are too even to tell mistakes."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)
    return model.eval()


def write_checkpoint(root: Path, config: dict[str, Any], step: int = 10) -> GPTModel:
    """A checkpoint of fresh weights in the layout of pipe_parallel_size 0."""
    model = sharpened(GPTModel(ModelSpec.from_args(NeoXArgs.from_dict(config), VOCAB)))
    directory = root / f"global_step{step}"
    (directory / "configs").mkdir(parents=True)
    torch.save({"module": model.state_dict()}, directory / "mp_rank_00_model_states.pt")
    (directory / "configs" / "resolved.yml").write_text(yaml.safe_dump(config), "utf-8")
    (root / "latest").write_text(f"global_step{step}", "utf-8")
    return model


def write_data(prefix: Path, documents: int = 20, length: int = 90, vocabulary: int = 256) -> Path:
    """Documents of random tokens."""
    random = np.random.RandomState(0)
    with IndexedDatasetWriter(prefix) as writer:
        for _ in range(documents):
            writer.add_document(random.randint(1, vocabulary, size=length))
    return prefix


def write_run(root: Path, **changes: Any) -> tuple[NeoXArgs, GPTModel]:
    """Data and a checkpoint; the config evaluates the checkpoint on the data."""
    prefix = write_data(root / "toy_text_document")
    config = tiny_config(data_path=str(prefix), load=str(root / "run"), **changes)
    model = write_checkpoint(root / "run", config)
    return NeoXArgs.from_dict(config), model


def plain_losses(model: GPTModel, text: torch.Tensor) -> torch.Tensor:
    """The loss of every token of one text from full logits: the independent computation."""
    logits = model(text[None, :-1])[0].double()
    picked = logits.gather(1, text[1:, None])[:, 0]
    return (logits.logsumexp(-1) - picked).detach()


def result_of(args: NeoXArgs, name: str) -> dict[str, Any]:
    """The newest result of one task, run here."""
    assert run_evaluation(args.replace(eval_tasks=[name])) == 0
    folder = Path(args.checkpoint.load or "") / "results"
    path = max(folder.glob(f"step10_{name}*.json"), key=lambda found: found.stat().st_mtime_ns)
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return content


def evaluated(args: NeoXArgs, name: str) -> dict[str, Any]:
    assert run_evaluation(args.replace(eval_tasks=[name.split("_")[0]])) == 0
    assert args.checkpoint.load is not None
    path = Path(args.checkpoint.load) / "results" / f"step10_{name}.json"
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return content


def official_texts(args: NeoXArgs, length: int, count: int) -> dict[str, list[torch.Tensor]]:
    """The samples that the official evaluation would see."""
    assert args.data.data_path is not None
    _, valid, test = build_train_valid_test_datasets(
        args.data.data_path, args.data.split, (1, count, count), 16, length, 1234
    )
    assert valid is not None
    assert test is not None
    return {
        "valid": [torch.from_numpy(valid[i]["text"]) for i in range(count)],
        "test": [torch.from_numpy(test[i]["text"]) for i in range(count)],
    }
