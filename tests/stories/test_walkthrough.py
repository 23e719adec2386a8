"""docs/from_pythia.md, command by command, on a small GPT-NeoX checkpoint made here."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from megatron.commands import run
from tests.conftest import REPOSITORY
from tests.evaluation.helpers import tiny_config, write_checkpoint

PAGE = REPOSITORY / "docs" / "from_pythia.md"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `pythia-160m` in GPT-NeoX's layout, its tokenizer, and some texts."""
    monkeypatch.chdir(tmp_path)
    texts = tmp_path / "my_texts"
    texts.mkdir()
    for name in ("LICENSE", "README.md", "CONTRIBUTING.md"):
        (texts / f"{name}.txt").write_text((REPOSITORY / name).read_text("utf-8"), "utf-8")
    trained = ["--input", "my_texts", "--output-dir", "vocabulary", "--vocab-size", "400"]
    assert run("train_tokenizer", [*trained, "--type", "HFTokenizer", "-q"]) == 0
    config = tiny_config(
        pos_emb="rotary",
        rotary_pct=0.25,
        gpt_j_residual=True,
        tokenizer_type="HFTokenizer",
        vocab_file="vocabulary/tokenizer.json",
    )
    write_checkpoint(tmp_path / "ours", config)
    assert run("convert_checkpoint", ["ours", "pythia-160m", "--to", "neox"]) == 0
    Path("vocabulary/tokenizer.json").rename("pythia-160m/tokenizer.json")
    return tmp_path


def words_of(command: str) -> list[str]:
    """As a shell would split it; lengths are those of the small model."""
    for long, short in (("2048", "16"), ("4096", "32"), ("8192", "64")):
        command = command.replace(long, short)
    words: list[str] = []
    for word in shlex.split(command):
        words += sorted(map(str, Path().glob(word))) if "*" in word else [word]
    return words


def test_every_step_of_the_walkthrough(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    (settings,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    (place / "mine.yml").write_text(settings, "utf-8")
    commands = [
        line
        for block in re.findall(r"```bash\n(.*?)```", page, flags=re.DOTALL)
        for line in block.splitlines()
    ]
    assert len(commands) == 5
    outputs = []
    for command in commands:
        python, script, *arguments = words_of(command)
        assert python == "python" and (REPOSITORY / script).is_file()
        code = run(Path(script).stem, arguments)
        shown = capsys.readouterr()
        assert code == 0, f"{command}\n{shown.err}"
        outputs.append(shown.out)
    assert "neox" in outputs[0] and "rotary" in outputs[0]
    assert "3 documents" in outputs[2]
    tables = [_rows(output) for output in outputs[3:]]
    assert [row[1] for row in tables[0]] == ["16", "32", "64"]
    assert tables[0][0][-1] == tables[0][2][-1], "the same tokens at every length"
    assert tables[0] != tables[1], "YaRN changes the numbers"
    files = Path("runs/pythia/results").glob("*.json")
    results = [json.loads(path.read_text("utf-8")) for path in files]
    assert len(results) == 2 and all(len(r["results"]["valid"]) == 3 for r in results)


def _rows(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines() if line.startswith("valid")]
