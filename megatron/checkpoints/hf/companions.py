"""Files beside the weights in a Hugging Face folder: tokenizer, model card, a kernel's source."""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template
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
    root, model = checkpoint.files.root, checkpoint.args.model
    ours = isinstance(config, KerpleNeoXConfig)
    manifest = read_json(root / "manifest.json")
    text = Path(__file__).with_name("model_card.md.j2").read_text("utf-8")
    card = Template(
        text,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return card.render(
        tags=["kerple", "length-extrapolation"] if ours else [config.model_type.replace("_", "-")],
        trust=", trust_remote_code=True" if ours else "",
        tokenizer_problem=tokenizer_problem,
        label=label_of(model.method),
        key="pos_emb" if model.layer_pattern is None else "layer_pattern",
        model=dict(model),
        parameters=checkpoint.num_parameters,
        padded_vocab_size=checkpoint.padded_vocab_size,
        iteration=checkpoint.iteration,
        kind=checkpoint.kind,
        results=list(_results(root, checkpoint.iteration)),
        manifest=manifest and json.dumps(manifest, indent=2, sort_keys=True),
    )


def _results(root: Path, iteration: int) -> Iterator[dict[str, Any]]:
    """Perplexity by length, from result files of the same step."""
    for path in sorted((root / "results").glob("*.json")):
        result = read_json(path) or {}
        if result.get("task") == "extrapolation" and result.get("iteration") == iteration:
            # what cannot be read is left out of the card
            with contextlib.suppress(
                AttributeError, KeyError, TypeError, ValueError, OverflowError
            ):
                yield _by_length(result)


def _by_length(result: dict[str, Any]) -> dict[str, Any]:
    splits = {name: rows for name, rows in result.get("results", {}).items() if rows}
    by_length: dict[int, dict[str, str]] = {}
    for split, rows in splits.items():
        for row in rows:
            by_length.setdefault(int(row["length"]), {})[split] = f"{float(row['ppl']):.3f}"
    facts = {key: result.get(key) for key in ("protocol", "train_length")}
    return {**facts, "splits": list(splits), "rows": sorted(by_length.items())}
