"""Shell completion of `kerple`: a script with all words, so that TAB starts no Python.

The words come from the table of commands, from the parser of each command, from the declared config
keys, and from the lists of methods, tasks, corpora and suites.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from megatron.commands import COMMANDS
from megatron.data.corpora import SOURCES
from megatron.errors import KerpleError
from megatron.neox_arguments import KNOWN_KEYS
from megatron.neox_arguments.catalogue import METHODS
from megatron.terminal import Parser, command_parser

COMPLETION = """Print a script with which TAB completes commands, flags, keys, methods and tasks.

bash   kerple completion bash > ~/.local/share/bash-completion/completions/kerple
zsh    kerple completion zsh > ~/.kerple.zsh       and `source ~/.kerple.zsh` in ~/.zshrc
fish   kerple completion fish > ~/.config/fish/completions/kerple.fish
"""
FOREIGN = ("lm_eval",)
"""Commands whose parser is another package's."""
TAKES_METHODS = ("compare", "check_kernel", "plot_kernels")


@dataclass
class Words:
    """What may follow: a command's flags, its first words, and the values of its flags."""

    flags: list[str] = field(default_factory=list)
    first: list[str] = field(default_factory=list)
    """Beside files, which a shell completes itself."""
    values: dict[str, list[str]] = field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser("kerple completion", COMPLETION)
    parser.add_argument("shell", choices=list(_SCRIPTS))
    print(_SCRIPTS[parser.parse_args(argv).shell](all_words()))
    return 0


def all_words() -> dict[str, Words]:
    """The words of every command; of one with subcommands, also those of `COMMAND SUBCOMMAND`."""
    from megatron.evaluation.task_registry import own_tasks  # imports torch
    from megatron.paper.suite_file import available_suites

    values = {
        "--set": [f"{key}=" for key in sorted(KNOWN_KEYS)],
        "--with": list(METHODS),
        "--eval_tasks": [*own_tasks(), "list"],
        "--suite": available_suites(),
    }
    found: dict[str, Words] = {}
    for name, command in COMMANDS.items():
        parser = parser_of(name)
        if parser is None:
            found[name] = Words()
            continue
        inner = subcommands(parser)
        if command.arguments and command.arguments[0] in inner:
            parser, inner = inner[command.arguments[0]], {}
        found[name] = _words(parser, values)
        found[name].first += list(inner)
        found |= {f"{name} {sub}": _words(part, values) for sub, part in inner.items()}
    for name in TAKES_METHODS:
        found[name].first += list(METHODS)
    found["prepare_data"].first += list(SOURCES)
    return found


def parser_of(name: str) -> argparse.ArgumentParser | None:
    """The parser that a command builds; it is caught when the command parses a wrong flag."""
    if name in FOREIGN:
        return None
    module, _, function = COMMANDS[name].function.partition(":")
    call = getattr(importlib.import_module(f"megatron.{module}"), function)
    caught: list[argparse.ArgumentParser] = []
    Parser.caught = caught
    try:
        with suppress(SystemExit, KerpleError):
            call([*COMMANDS[name].arguments, "--no-such-flag"])
    finally:
        Parser.caught = None
    return caught[0] if caught else None


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Those that --help shows."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            shown = {choice.dest for choice in action._choices_actions}
            return {name: part for name, part in action.choices.items() if name in shown}
    return {}


def _words(parser: argparse.ArgumentParser, values: dict[str, list[str]]) -> Words:
    words = Words()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) or action.help == argparse.SUPPRESS:
            continue
        choices = [str(choice) for choice in action.choices or ()]
        if not action.option_strings:
            words.first += choices
            continue
        # One spelling: `--eval_tasks`, not `--eval-tasks` besides.
        names = {name.replace("_", "-"): name for name in reversed(action.option_strings)}
        words.flags += reversed(names.values())
        for name in action.option_strings:
            if own := choices or values.get(name, []):
                words.values[name] = own
    return words


# The scripts.

_BASH = """# Completion of kerple for {program}, written by `kerple completion {program}`.
_kerple() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" name="" flag="" i
  local words="" methods="{methods}"
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "${{COMP_WORDS[i]}}" in
      -*) flag="${{COMP_WORDS[i]}}" ;;
      *) case "$name" in "") name="${{COMP_WORDS[i]}}" ;;
         {parents}) [ -z "$flag" ] && name="$name ${{COMP_WORDS[i]}}" ;; esac ;;
    esac
  done
  case "$name" in *-*) name="${{name//-/_}}" ;; esac
  [ "$cur" = "=" ] && cur="" && [ "$prev" = pos_emb ] && words="$methods"
  [ "$prev" = "=" ] && [ "${{COMP_WORDS[COMP_CWORD-2]}}" = pos_emb ] && words="$methods"
  case "$cur" in pos_emb=*) words="${{methods// / pos_emb=}}"; words="pos_emb=$words" ;; esac
  if [ -z "$words" ]; then
    case "$name|$flag" in
      "|"*) words="{commands}" ;;
{values}
    esac
    case "$cur|$words" in -*|"|") words="" ;; esac
    if [ -z "$words" ]; then
      case "$name" in
{names}
      esac
    fi
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
  case "${{COMPREPLY[0]}}" in *=) {nospace} ;; esac
}}
complete -o default -o bashdefault -F _kerple kerple"""


def bash(words: dict[str, Words], shell: str = "bash") -> str:
    """One function; zsh runs it with its bashcompinit."""
    places: dict[str, list[str]] = {}
    for name, found in words.items():
        for flag, own in found.values.items():
            places.setdefault(" ".join(own), []).append(f'"{name}|{flag}"')
    values = [f'      {"|".join(where)}) words="{own}" ;;' for own, where in places.items()]
    names = []
    for name, found in words.items():
        chosen = f'words="{" ".join(found.first)}"; [ -z "$flag" ] || words=""'
        flags = f'case "$cur" in -*) words="{" ".join(found.flags)}" ;; esac'
        names.append(f'        "{name}") {chosen}; {flags} ;;')
    parents = sorted({name.split()[0] for name in words if " " in name})
    script = _BASH.format(
        program=shell,
        methods=" ".join(METHODS),
        parents="|".join(parents),
        commands=" ".join(COMMANDS),
        values="\n".join(values),
        names="\n".join(names),
        nospace="compopt -o nospace" if shell == "bash" else ":",
    )
    return script


def zsh(words: dict[str, Words]) -> str:
    start = "autoload -U +X compinit bashcompinit && compinit -u && bashcompinit"
    return f"{start}\n{bash(words, 'zsh')}"


def fish(words: dict[str, Words]) -> str:
    """One line for each command, flag and list of values; long lists are variables.

    Of a flag with several values, fish completes the first.
    """
    lines = ["# Completion of kerple for fish, written by `kerple completion fish`."]
    lists: dict[str, str] = {}
    for name, command in COMMANDS.items():
        shown = f"-n __fish_use_subcommand -f -a {name} -d {_quoted(command.summary)}"
        lines.append(f"complete -c kerple {shown}")
    for name, found in words.items():
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
        start = f"complete -c kerple -n {_quoted(seen)}"
        if found.first:
            lines.append(f"{start} -a {_quoted(' '.join(found.first))}")
        for flag in found.flags:
            own = [*found.values.get(flag, [])]
            own += [f"pos_emb={method}" for method in METHODS] if flag == "--set" else []
            variable = lists.setdefault(" ".join(own), f"__kerple_{len(lists)}") if own else ""
            takes = f" -x -a '${variable}'" if own else ""
            kind = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
            lines.append(f"{start} {kind}{takes}")
    lines[1:1] = [f"set -g {variable} {own}" for own, variable in lists.items()]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """For fish, in single quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}
