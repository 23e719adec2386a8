"""README.md of an exported model: what it is, how it was made, how well it extrapolates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from megatron.checkpoints.hf.configuration_kerple import KerpleNeoXConfig
from megatron.checkpoints.reading import Checkpoint
from megatron.neox_arguments.catalogue import label_of

__all__ = ["model_card"]


def model_card(
    checkpoint: Checkpoint, config: PretrainedConfig, tokenizer_problem: str | None
) -> str:
    """The card's text; the manifest and the results are those found beside the checkpoint."""
    root = checkpoint.layout.root
    ours = isinstance(config, KerpleNeoXConfig)
    sections = [
        _header(checkpoint, ours),
        _usage(ours, tokenizer_problem),
        _facts(checkpoint),
        _evaluation(root, checkpoint.iteration),
        _manifest(root),
    ]
    return "\n".join(section for section in sections if section)


def _header(checkpoint: Checkpoint, ours: bool) -> str:
    tags = ["kerple", "length-extrapolation"] if ours else ["gpt-neox"]
    listed = "".join(f"- {tag}\n" for tag in tags)
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n"
        f"tags:\n{listed}---\n\n"
        f"# {label_of(checkpoint.args.model.pos_emb)} language model, "
        f"{checkpoint.num_parameters / 1e6:.1f}M parameters\n\n"
        f"A decoder-only language model trained with KERPLE-NeoX for {checkpoint.iteration} steps "
        f"at length {checkpoint.args.model.seq_length}.\n"
    )


def _usage(ours: bool, tokenizer_problem: str | None) -> str:
    trust = ", trust_remote_code=True" if ours else ""
    lines = [
        "## Use\n",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("PATH"{trust})',
    ]
    if tokenizer_problem is None:
        lines += [
            f'tokenizer = AutoTokenizer.from_pretrained("PATH"{trust})',
            'inputs = tokenizer("Once upon a time", return_tensors="pt")',
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))",
        ]
    lines.append("```\n")
    if tokenizer_problem is not None:
        lines.append(f"No tokenizer is included: {tokenizer_problem}\n")
    return "\n".join(lines)


def _facts(checkpoint: Checkpoint) -> str:
    model = checkpoint.args.model
    rows = {
        "positional embedding": f"{label_of(model.pos_emb)} (`pos_emb: {model.pos_emb}`)",
        "layers": model.num_layers,
        "hidden size": model.hidden_size,
        "heads": model.num_attention_heads,
        "vocabulary (padded)": checkpoint.padded_vocab_size,
        "training length": model.seq_length,
        "norm": model.norm,
        "activation": model.activation,
        "parameters": f"{checkpoint.num_parameters:,}",
        "steps": checkpoint.iteration,
        "converted from": checkpoint.kind,
    }
    body = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"## Model\n\n| | |\n|---|---|\n{body}\n"


def _evaluation(root: Path, iteration: int) -> str:
    """Perplexity by length, from result files of the same step."""
    tables = []
    for path in sorted((root / "results").glob("*.json")):
        result = _read_json(path)
        if result.get("task") == "extrapolation" and result.get("iteration") == iteration:
            tables.append(_extrapolation(result))
    return "## Evaluation\n\n" + "\n".join(tables) if tables else ""


def _extrapolation(result: dict[str, Any]) -> str:
    splits = {name: rows for name, rows in result.get("results", {}).items() if rows}
    by_length: dict[int, dict[str, float]] = {}
    for split, rows in splits.items():
        for row in rows:
            by_length.setdefault(int(row["length"]), {})[split] = float(row["ppl"])
    header = "| length | " + " | ".join(f"{split} perplexity" for split in splits) + " |"
    lines = [
        f"| {length} | " + " | ".join(_number(values.get(split)) for split in splits) + " |"
        for length, values in sorted(by_length.items())
    ]
    rule = "|---" * (len(splits) + 1) + "|"
    protocol = f"Protocol: {result.get('protocol')}; trained at {result.get('train_length')}."
    return "\n".join([protocol, "", header, rule, *lines, ""])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _manifest(root: Path) -> str:
    manifest = _read_json(root / "manifest.json")
    if not manifest:
        return ""
    text = json.dumps(manifest, indent=2, sort_keys=True)
    return f"## Run\n\nThe manifest of the training run:\n\n```json\n{text}\n```\n"


def _read_json(path: Path) -> dict[str, Any]:
    """An optional file: what cannot be read is left out of the card."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
