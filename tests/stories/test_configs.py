"""Every YAML in configs/ loads, in the combinations its comments promise; examples also train."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from megatron.commands import run as run_command
from megatron.model.sizes import ModelSizes
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.yaml_files import read_layer
from tests.conftest import REPOSITORY
from tests.data.samples import prepare
from tests.processes import run_ranks

CONFIGS = REPOSITORY / "configs"
SMALL = CONFIGS / "small_bf16.yml"
LOCAL = CONFIGS / "local_setup.yml"
METHODS = sorted(
    path.stem
    for path in (CONFIGS / "kerple").glob("*.yml")
    if "length" not in path.stem and "layer_pattern" not in path.read_text()
)
ALL = sorted(path for path in CONFIGS.rglob("*.yml") if path.parent.name != "slurm")


def is_model(path: Path) -> bool:
    return "num_layers" in read_layer(path).values


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_file_loads_alone_or_on_top_of_a_small_model(path: Path) -> None:
    if is_model(path):
        args = NeoXArgs.from_files([path])
    else:
        base = CONFIGS / "laptop" / "tiny.yml" if path.parent.name == "laptop" else SMALL
        args = NeoXArgs.from_files([base], overrides=[path])
    for key, value in read_layer(path).values.items():
        if not isinstance(value, dict) and key != "data_impl":
            assert args.to_dict().get(key) == value  # null: left out


@pytest.mark.parametrize("name", ["local_setup", "slurm_local", "eleutherai_cluster"])
@pytest.mark.parametrize("model", ["small_bf16", "XL", "125M", "pythia/160M"])
def test_models_and_places_share_no_key(model: str, name: str) -> None:
    NeoXArgs.from_files([CONFIGS / f"{model}.yml", CONFIGS / f"{name}.yml"])


def test_small_is_the_papers_162m_model_and_recipe() -> None:
    args = NeoXArgs.from_files([SMALL, LOCAL])
    assert ModelSizes(args).parameters.total == 162_322_968
    plan = args.batch_plan(1)
    assert (plan.train_batch_size, args.model.seq_length) == (32, 512)
    optimization = args.optimization
    assert (optimization.lr, optimization.optimizer.params.betas) == (6e-4, (0.9, 0.999))
    assert (optimization.train_iters, optimization.lr_decay_style) == (50_000, "cosine")
    assert (optimization.min_lr, optimization.warmup) == (0.0, 0.01)
    assert (optimization.gradient_clipping, optimization.weight_decay) == (1.0, 0.0)
    assert (optimization.precision, args.data.split) == ("bf16", "949,50,1")
    assert (args.model.hidden_dropout, args.model.attention_dropout) == (0.0, 0.0)


def test_xl_is_the_papers_1_3b_model_on_two_gpus() -> None:
    args = NeoXArgs.from_files([CONFIGS / "XL.yml", LOCAL])
    assert (args.model.num_layers, args.model.hidden_size) == (24, 2048)
    assert (args.model.num_attention_heads, args.parallel.model_parallel_size) == (16, 2)
    plan = args.batch_plan(2)
    assert (plan.micro_batch_size, plan.gradient_accumulation_steps) == (16, 2)
    assert plan.train_batch_size == 32
    assert (args.optimization.lr, args.optimization.train_iters) == (2e-4, 150_000)
    assert args.optimization.precision == "fp16"
    assert 1.2e9 < ModelSizes(args).parameters.layers < 1.35e9


@pytest.mark.parametrize("method", METHODS)
def test_method_after_override_changes_the_position_only(method: str) -> None:
    base = NeoXArgs.from_files([SMALL, LOCAL])
    args = NeoXArgs.from_files([SMALL], overrides=[CONFIGS / "kerple" / f"{method}.yml", LOCAL])
    assert args == base.replace(pos_emb=method)


def test_all_methods_of_the_paper_have_a_file() -> None:
    paper = {
        "kerple_log", "kerple_power", "alibi", "rpe", "rotary", "sinusoidal", "kerple_log3",
        "kerple_bias_wht", "gauss_wht1", "gauss_wht2", "gauss_bias2", "gauss_bias3",
    }  # fmt: skip
    assert set(METHODS) == paper


@pytest.mark.parametrize("length", [512, 1024, 2048, 4096, 8192, 16384])
def test_the_official_evaluation_is_expressible(length: int) -> None:
    evaluation = CONFIGS / "kerple" / "eval"
    ex_eval, override = evaluation / "ex_eval.yml", evaluation / f"length_{length}.yml"
    args = NeoXArgs.from_files([SMALL, LOCAL], overrides=[ex_eval, override])
    assert args.model.seq_length_val == length
    assert args.optimization.train_iters == 0
    assert args.evaluation.eval_iters == 320
    assert args.batch_plan(1).train_batch_size == 1


def test_laptop_model_trains_the_same_batch_on_one_or_two_processes() -> None:
    laptop = CONFIGS / "laptop"
    args = NeoXArgs.from_files([laptop / "tiny.yml", laptop / "stdlib.yml"])
    assert args.batch_plan(1).train_batch_size == args.batch_plan(2).train_batch_size == 32
    assert args.tokenizer.tokenizer_type == "CharLevelTokenizer"
    assert args.evaluation.eval_lengths == [128 * 2**n for n in range(6)]


PYTHIA = {
    "70M": 70_426_624,
    "160M": 162_322_944,
    "410M": 405_334_016,
    "1B": 1_011_781_632,
    "1-4B": 1_414_647_808,
    "2-8B": 2_775_208_960,
    "6-9B": 6_857_302_016,
    "12B": 11_846_072_320,
}
"""Parameters of the published models."""


@pytest.mark.parametrize("size", PYTHIA)
def test_pythia_sizes_are_the_published_ones(size: str) -> None:
    args = NeoXArgs.from_files([CONFIGS / "pythia" / f"{size}.yml", LOCAL])
    assert ModelSizes(args.replace(vocab_size=50_277)).parameters.total == PYTHIA[size]
    assert args.optimization.min_lr == pytest.approx(args.optimization.lr / 10)
    plan = args.batch_plan(16)
    assert plan.train_batch_size * args.model.seq_length == 2**21
    assert args.replace(pos_emb="kerple_log").model.pos_emb == "kerple_log"


def test_all_pythia_files_are_tested() -> None:
    assert {path.stem for path in (CONFIGS / "pythia").glob("*.yml")} == set(PYTHIA)


def test_gpt_neoxs_two_names_of_one_size_agree() -> None:
    assert NeoXArgs.from_files([CONFIGS / "125M.yml"]) == NeoXArgs.from_files(
        [CONFIGS / "small.yml"]
    )


TINY = ["configs/laptop/tiny.yml"]
STDLIB = [*TINY, "configs/laptop/stdlib.yml"]
SMALLER = {"num_layers": 1, "train_batch_size": 4, "train_iters": 2, "eval_iters": 1}
SMALLER |= {"eval_interval": 2, "log_interval": 1, "lr_decay_iters": 40}
EXAMPLES: dict[str, tuple[list[str], dict[str, int], int, list[str]]] = {
    "muon": (
        [*STDLIB, "--override", "configs/laptop/muon.yml"],
        {"lr_wsd_decay_iters": 1},
        1,
        ["optimizer: {type: muon", "lr_decay_style: wsd", "attention_dropout: 0.1"],
    ),
    "lion": (
        [*STDLIB, "--override", "configs/laptop/lion.yml"],
        {"profile_step_start": 1, "profile_step_stop": 2},
        1,
        ["optimizer: {type: lion", "profile: true", "memory_profiling: true"],
    ),
    "adam8bit": (
        [*STDLIB, "--override", "configs/laptop/adam8bit.yml"],
        {},
        1,
        ["use_bnb_optimizer: true"],
    ),
    "chat": (
        [*TINY, "--override", "configs/laptop/chat.yml"],
        {"lr_wsd_decay_iters": 1},
        1,
        ["pack_impl: pack_until_overflow", "train_label_data_paths: data/chat/", "finetune: true"],
    ),
    "sequence_parallel": (
        [*STDLIB, "--override", "configs/sequence_parallel.yml"],
        {"seq_length": 256, "train_batch_size": 2, "train_micro_batch_size_per_gpu": 2},
        4,
        ["4 processes share each sequence: 64 positions each and, in attention, 1 heads"],
    ),
}
"""Files, what is changed for the test beside SMALLER, processes, what the dry run says of it."""
SAID = {
    "lion": ["memory_profiling: torch records the memory of GPUs", "trace_rank0.json.gz (open it"],
    "chat": ["training tokens in 40 documents with loss"],
}
"""What the two steps say beside their losses."""


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the examples expect it: configs/, prepared data and a first model."""
    folder = tmp_path_factory.mktemp("laptop")
    (folder / "configs").symlink_to(CONFIGS)
    (folder / "train.py").write_text("")
    texts = "\n".join(path.read_text() for path in (REPOSITORY / "megatron/data").glob("*.py"))
    (folder / "text.txt").write_text(texts)
    assert prepare(folder, "--input", folder / "text.txt", "stdlib") == 0
    talks = [
        {"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"},
    ]  # fmt: skip
    (folder / "talks.jsonl").write_text(f"{json.dumps({'messages': talks})}\n" * 40)
    template = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    (folder / "chat.jinja").write_text(
        template + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    given = ("--input", folder / "talks.jsonl", "--chat-template", folder / "chat.jinja", "chat")
    assert prepare(folder, *given) == 0
    train(folder, STDLIB, {}, 1)
    return folder


def train(folder: Path, files: list[str], changes: dict[str, int], processes: int) -> str:
    """Two steps of a config, whose places are in a folder."""
    options = [file for file in files if file != "--override"]
    keys = {key for file in options for key in read_layer(REPOSITORY / file).values}
    save = folder / "runs" / Path(files[-1]).stem
    places = {"save": save, "load": folder / "runs" / "stdlib" if "finetune" in keys else save}
    if "train_data_paths" in keys:
        chat = folder / "data" / "chat" / "chat_messages"
        places["train_data_paths"] = f"[{chat}_document]"
        places["train_label_data_paths"] = f"[{chat}_label_document]"
    else:
        places["data_path"] = folder / "data" / "stdlib" / "stdlib_text_document"
    sets = [f"{key}={value}" for key, value in {**SMALLER, **changes, **places}.items()]
    return run_ranks(["train.py", *files, "--set", *sets], processes)[0]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_described_and_takes_two_steps(
    name: str, laptop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files, changes, processes, described = EXAMPLES[name]
    monkeypatch.chdir(laptop)
    sets = [f"{key}={value}" for key, value in changes.items()]
    words = ["train.py", *files, "--set", f"num_gpus={processes}", *sets, "--dry-run"]
    assert run_command("deepy", words) == 0
    report = capsys.readouterr().out
    assert [text for text in described if text not in report] == []
    assert "MISSING" not in report and "not possible" not in report
    if name == "adam8bit" and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("described; two steps need the package bitsandbytes")
    output = train(laptop, files, changes, processes)
    expected = ["step 2/2: loss", *SAID.get(name, [])]
    assert [text for text in expected if text not in output] == [], output
