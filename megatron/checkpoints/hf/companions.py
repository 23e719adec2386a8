"""Files beside the weights in a Hugging Face folder: tokenizer, model card, a kernel's source."""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer
from transformers import PretrainedConfig, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from megatron.atomic_files import read_json
from megatron.checkpoints.hf.configuration_kerple import KerpleNeoXConfig
from megatron.checkpoints.reading import TOKENIZER, Checkpoint
from megatron.errors import CheckpointError
from megatron.model.position_base import PositionalEmbedding
from megatron.neox_arguments.catalogue import label_of
from megatron.tokenizer import Tokenizer

BYTE_LEVEL_MARK = "<|byte_level_eod|>"


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> str | None:
    """Write tokenizer.json and its settings; the reason why not, where there is no such form."""
    library = _library_of(tokenizer)
    if library is None:
        return (
            f"{tokenizer.name} has no tokenizer.json form; use megatron.tokenizer with the "
            "original files"
        )
    eos = library.id_to_token(tokenizer.eod)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=library,
        eos_token=eos,
        bos_token=eos,
        unk_token=None,
        model_max_length=int(1e30),
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)
    # transformers 5 writes a class name that 4 does not have; both have this one.
    file = folder / "tokenizer_config.json"
    settings = {**json.loads(file.read_text("utf-8")), "tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return None


def _library_of(tokenizer: Tokenizer) -> LibraryTokenizer | None:
    library = getattr(tokenizer, "_library", None)
    if isinstance(library, LibraryTokenizer):
        copy = LibraryTokenizer.from_str(library.to_str())
        copy.add_special_tokens([copy.id_to_token(tokenizer.eod)])
        return copy
    return _byte_level(tokenizer.vocab_size) if tokenizer.name == "CharLevelTokenizer" else None


def _byte_level(size: int) -> LibraryTokenizer:
    """Every byte of the text is its own id: a BPE without merges over GPT-2's byte letters."""
    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items() if byte > 0}
    vocabulary[BYTE_LEVEL_MARK] = 0
    vocabulary |= {f"<|unused{i}|>": i for i in range(256, size)}
    library = LibraryTokenizer(models.BPE(vocabulary, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # ids that are not bytes decode to nothing
    nothing = decoders.Replace(Regex(r"<\|unused\d+\|>"), "")
    library.decoder = decoders.Sequence([nothing, decoders.ByteLevel()])
    library.add_special_tokens([BYTE_LEVEL_MARK])
    return library


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """The config keys that make our tokenizer from a Hugging Face folder's files."""
    file = folder / TOKENIZER
    if not file.is_file():
        vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
        if not (vocabulary.is_file() and merges.is_file()):
            return {}
        names = {"vocab_file": str(vocabulary), "merge_file": str(merges)}
        return {"tokenizer_type": "GPT2BPETokenizer", **names}
    if BYTE_LEVEL_MARK.encode() in file.read_bytes():
        return {"tokenizer_type": "CharLevelTokenizer"}
    return {"tokenizer_type": "HFTokenizer", "vocab_file": str(file)}


# The source of a user-defined positional embedding, copied into an export.
#
# An exported folder is loaded without our package and without the user's: it holds the class and
# those top-level statements of its module that the class needs, nothing else of the file. An import
# that an export does not contain (another module of the user's, another part of our package) is
# refused by name.

OWN_KERNEL = "own_kernel.py"
EXPORTED_MODULES = (
    "position_base",
    "positional_embeddings",
    "content_positions",
    "rotary_and_input_positions",
    "layer_formulas",
)
"""Modules of `megatron.model` that every export holds."""
ALLOWED_IMPORTS = ("torch", "numpy", "einops")  # transformers needs torch and numpy itself


def standalone_source(cls: type[PositionalEmbedding], pos_emb: str) -> str:
    """A module with the class and what it needs, registered under the config's `pos_emb`."""
    path = inspect.getsourcefile(cls)
    if path is None:
        raise CheckpointError(f"pos_emb: {pos_emb!r}: its source is not in a file")
    text = Path(path).read_text(encoding="utf-8")
    tree = ast.parse(text)
    needed = _needed(tree, cls, pos_emb)
    # A class's segment begins after its decorators: `@register(...)` is not copied, the export
    # registers by the name in its config.
    parts = [
        _exported_statement(ast.get_source_segment(text, node) or "", node, path) for node in needed
    ]
    return "\n\n".join(
        [
            f'"""{cls.__name__}, taken from {Path(path).name} when this folder was exported."""',
            "from __future__ import annotations",
            "from .position_base import POSITIONAL_EMBEDDINGS",
            *parts,
            f"POSITIONAL_EMBEDDINGS[{pos_emb!r}] = {cls.__name__}\n",
        ]
    )


def _needed(tree: ast.Module, cls: type, pos_emb: str) -> list[ast.stmt]:
    """The class, after every statement that binds a name it uses, in the file's order."""
    bound: dict[str, ast.stmt] = {}
    for node in tree.body:
        for name in _bindings(node):
            bound[name] = node
    own = bound.get(cls.__name__)
    if not isinstance(own, ast.ClassDef):
        raise CheckpointError(
            f"pos_emb: {pos_emb!r} is not defined at the top level of its file; only such a class "
            "can be exported"
        )
    called = [each.func for each in own.decorator_list if isinstance(each, ast.Call)]
    registers = [each for each in called if isinstance(each, ast.Name) and each.id == "register"]
    if len(registers) < len(own.decorator_list):
        raise CheckpointError(
            f"pos_emb: {pos_emb!r}: decorators other than @register cannot be exported"
        )
    own.decorator_list = []
    chosen: set[ast.stmt] = set()
    waiting: list[ast.stmt] = [own]
    while waiting:
        node = waiting.pop()
        if node in chosen:
            continue
        chosen.add(node)
        used = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        waiting += [bound[name] for name in used if name in bound]
    return [*(node for node in tree.body if node in chosen and node is not own), own]


def _bindings(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    names = [name for name in ast.walk(node) if isinstance(name, ast.Name)]
    return [name.id for name in names if isinstance(name.ctx, ast.Store)]


def _exported_statement(text: str, node: ast.stmt, path: str) -> str:
    """The statement as it is; imports of our formulas made relative, others checked."""
    if isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        name = module.removeprefix("megatron.model.")
        if name != module and name in EXPORTED_MODULES:
            return text.replace(f"from {module} ", f"from .{name} ", 1)
        modules = [module]
    elif isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    else:
        return text
    for module in modules:
        top = module.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ALLOWED_IMPORTS:
            raise CheckpointError(
                f"{path}: the class needs `{text.splitlines()[0]}`, which an export does not "
                "contain. Use torch, the standard library and megatron.model.positional_embeddings "
                "only."
            )
    return text


# README.md of an exported model: what it is, how it was made, how well it extrapolates.


def model_card(
    checkpoint: Checkpoint, config: PretrainedConfig, tokenizer_problem: str | None
) -> str:
    """The card's text; the manifest and the results are those found beside the checkpoint."""
    root = checkpoint.files.root
    ours = isinstance(config, KerpleNeoXConfig)
    sections = [
        _header(checkpoint, config.model_type, ours),
        _usage(ours, tokenizer_problem),
        _facts(checkpoint),
        _evaluation(root, checkpoint.iteration),
        _manifest(root),
    ]
    return "\n".join(section for section in sections if section)


def _header(checkpoint: Checkpoint, model_type: str, ours: bool) -> str:
    tags = ["kerple", "length-extrapolation"] if ours else [model_type.replace("_", "-")]
    listed = "".join(f"- {tag}\n" for tag in tags)
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n"
        f"tags:\n{listed}---\n\n"
        f"# {label_of(checkpoint.args.model.method)} language model, "
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
    key = "pos_emb" if model.layer_pattern is None else "layer_pattern"
    rows = {
        "positional embedding": f"{label_of(model.method)} (`{key}: {getattr(model, key)}`)",
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
        result = read_json(path) or {}
        if result.get("task") == "extrapolation" and result.get("iteration") == iteration:
            # what cannot be read is left out of the card
            with contextlib.suppress(
                AttributeError, KeyError, TypeError, ValueError, OverflowError
            ):
                tables.append(_extrapolation(result))
    return "## Evaluation\n\n" + "\n".join(tables) if tables else ""


def _extrapolation(result: dict[str, Any]) -> str:
    splits = {name: rows for name, rows in result.get("results", {}).items() if rows}
    by_length: dict[int, dict[str, str]] = {}
    for split, rows in splits.items():
        for row in rows:
            by_length.setdefault(int(row["length"]), {})[split] = f"{float(row['ppl']):.3f}"
    header = "| length | " + " | ".join(f"{split} perplexity" for split in splits) + " |"
    lines = [
        f"| {length} | " + " | ".join(values.get(split, "") for split in splits) + " |"
        for length, values in sorted(by_length.items())
    ]
    rule = "|---" * (len(splits) + 1) + "|"
    protocol = f"Protocol: {result.get('protocol')}; trained at {result.get('train_length')}."
    return "\n".join([protocol, "", header, rule, *lines, ""])


def _manifest(root: Path) -> str:
    manifest = read_json(root / "manifest.json")
    if not manifest:
        return ""
    text = json.dumps(manifest, indent=2, sort_keys=True)
    return f"## Run\n\nThe manifest of the training run:\n\n```json\n{text}\n```\n"
