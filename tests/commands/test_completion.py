"""kerple completion: what a real bash (and fish, if it is here) offers after some words."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron.commands import COMMANDS, run
from megatron.commands.completion import FOREIGN, Words, all_words, bash, fish, parser_of, zsh
from megatron.neox_arguments.catalogue import METHODS

# What is typed -> what is offered, the first of it; bash splits words at `=`.
CASES = {
    "comp": ["compare", "completion"],
    "evaluate runs/a --eval_ta": ["--eval_tasks"],
    "evaluate runs/a --eval_tasks extrapolation po": ["positionwise"],
    "train my.yml --set num_l": ["num_layers="],
    "reproduce subm": ["submit"],
    "reproduce run --suite stu": ["study"],
    "compare kerple_log": ["kerple_log", "kerple_log3"],
    "compare my:Kernel --with alibi_": ["alibi_learned"],
    "prepare_data -t CharL": ["CharLevelTokenizer"],
    "prepare_data stdl": ["stdlib"],
    "demo --retry": ["--retry-failed"],
}


@pytest.fixture(scope="module")
def words() -> dict[str, Words]:
    return all_words()


def test_every_command_has_its_flags(words: dict[str, Words]) -> None:
    assert [name for name in COMMANDS if parser_of(name) is None] == list(FOREIGN)
    assert [name for name in COMMANDS if not words[name].flags] == list(FOREIGN)
    assert "--megatron_config" not in words["train"].flags, "as in --help"
    assert "--eval-tasks" not in words["evaluate"].flags, "one spelling"


def test_bash_completes(words: dict[str, Words], tmp_path: Path) -> None:
    script = tmp_path / "kerple.bash"
    typed = [["kerple", *line.split(" ")] for line in CASES]
    typed += [["kerple", "train", "--set", "pos_emb", "=", "ro"], ["kerple", "chat", "runs/a"]]
    calls = [
        f"COMP_WORDS=({shlex.join(line)}); COMP_CWORD={len(line) - 1}; _kerple 2>/dev/null; "
        'echo "${COMPREPLY[*]}"'
        for line in typed
    ]
    script.write_text("\n".join([bash(words), *calls]))
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=True, timeout=60)
    *offered, method, nothing = done.stdout.split("\n")[:-1]
    assert dict(zip(CASES, map(str.split, offered), strict=True)) == CASES
    assert (method, nothing) == ("rotary", ""), "a folder is completed by the shell"


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes(words: dict[str, Words], tmp_path: Path) -> None:
    (tmp_path / "kerple.fish").write_text(fish(words))
    """Of a flag with several values it completes the first."""
    asked = {line: wanted for line, wanted in CASES.items() if "extrapolation po" not in line}
    asked |= {"train my.yml --set pos_emb=kerple_log": ["pos_emb=kerple_log"]}
    lines = [f'complete -C "kerple {line}" | cut -f 1; echo ---' for line in asked]
    program = "\n".join(["source kerple.fish", *lines])
    done = subprocess.run(
        ["fish", "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    found = done.stdout.split("---")
    for (line, wanted), offered in zip(asked.items(), found, strict=False):
        assert set(wanted) <= set(offered.split()), line


def test_zsh_gets_bashs_function(
    words: dict[str, Words], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its syntax, where zsh is here; TAB itself was tried by hand in zsh 5.9."""
    assert "_kerple() {" in zsh(words) and all(name in zsh(words) for name in METHODS)
    if shutil.which("zsh"):
        (tmp_path / "kerple.zsh").write_text(zsh(words))
        subprocess.run(["zsh", "-n", tmp_path / "kerple.zsh"], check=True)
    with pytest.raises(SystemExit):
        run("completion", ["tcsh"])
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
