"""``sbp completion``: scripts that complete the commands in bash, zsh and fish.

They are made from the commands' own parsers, so an option is completed as soon as it exists, and they are static: a
press of the tab key starts no interpreter.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from sbp.usage import OK, USAGE, Parser

EXAMPLES = """\
To have it in every new shell:
  bash   echo 'source <(sbp completion bash)' >> ~/.bashrc
  zsh    echo 'source <(sbp completion zsh)' >> ~/.zshrc     (after compinit)
  fish   sbp completion fish > ~/.config/fish/completions/sbp.fish"""

_FILES = ("FILE", "PATH", "RESULTS", "OLD", "TARGET", "FILE|none", "OLD NEW")
_FOLDERS = ("DIR",)


@dataclass(frozen=True)
class Argument:
    """What can stand at a place of a command line.

    Attributes:
        flags: of an option, such as ``("-j", "--jobs")``; none of a positional argument.
        help: in a line.
        takes: ``nothing``, ``value``, ``files``, ``folders`` or ``words``.
        optional: whether an option may stand without its value.
        repeats: whether it may be given more than once.
        words: those that can stand there, where ``takes`` is ``words``.
    """

    flags: tuple[str, ...]
    help: str
    takes: str
    optional: bool
    repeats: bool
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Completed:
    """A command: how it is called (``sbp known check``: ``("known", "check")``), and what it takes."""

    path: tuple[str, ...]
    help: str
    arguments: tuple[Argument, ...]

    @property
    def options(self) -> tuple[Argument, ...]:
        return tuple(one for one in self.arguments if one.flags)

    @property
    def places(self) -> tuple[Argument, ...]:
        """The positional arguments."""
        return tuple(one for one in self.arguments if not one.flags)


def known_words(flag: str) -> tuple[str, ...]:
    """The words of an option that are no choices of its parser, because more is accepted or their list is long."""
    if flag == "--suite":
        from sbp.suites import MODULES

        return tuple(MODULES)
    if flag == "--subject":
        from sbp.lead import SUBJECTS

        return SUBJECTS
    if flag == "--dtype":
        from sbp.lead import DTYPES

        return tuple(DTYPES)
    if flag == "--device":
        return ("cpu", "cuda")
    if flag == "--explain":
        from sbp.inplace.lint.rules import RULES

        return ("all", *RULES)
    if flag in ("--select", "--ignore"):
        from sbp.inplace.lint.rules import RULES

        return tuple(RULES)
    return ()


def all_commands() -> list[Completed]:
    """Every command of ``sbp``, from its own parser."""
    from sbp.cli import COMMANDS

    found: list[Completed] = []
    for command in COMMANDS:
        parser: argparse.ArgumentParser = import_module(command.target.partition(":")[0]).make_parser()
        found += _read((command.name,), command.help, parser)
    return found


def _read(path: tuple[str, ...], text: str, parser: argparse.ArgumentParser) -> Iterator[Completed]:
    arguments: list[Argument] = []
    below: list[Completed] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {one.dest: one.help or "" for one in action._choices_actions}
            for name, sub in action.choices.items():
                below += _read((*path, name), helps.get(name, ""), sub)
        else:
            arguments.append(_argument(action))
    yield Completed(path, text, tuple(arguments))
    yield from below


def _argument(action: argparse.Action) -> Argument:
    flags = tuple(action.option_strings)
    words = tuple(map(str, action.choices or ())) or (known_words(flags[-1]) if flags else ())
    metavar = " ".join(action.metavar) if isinstance(action.metavar, tuple) else action.metavar or ""
    if action.nargs == 0:
        takes = "nothing"
    elif words:
        takes = "words"
    elif metavar in _FILES:
        takes = "files"
    elif metavar in _FOLDERS:
        takes = "folders"
    else:
        takes = "value"
    repeats = isinstance(action, argparse._AppendAction) or (not flags and action.nargs in ("*", "+"))
    text = re.sub(r"\s+", " ", (action.help or "").replace("%%", "%"))
    return Argument(flags, text, takes, action.nargs in ("?", "*"), repeats, words)


def _children(commands: Sequence[Completed], path: tuple[str, ...]) -> list[Completed]:
    return [one for one in commands if one.path[:-1] == path]


def bash(commands: Sequence[Completed]) -> str:
    """The script for bash; it needs nothing of the package bash-completion."""
    cases: list[str] = []
    for command in commands:
        name = " ".join(command.path)
        flags = " ".join(flag for one in command.options for flag in one.flags)
        cases.append(f"    {shlex.quote(name)})")
        cases.append(f"      options={shlex.quote(flags)}")
        # Where a value may be left out, what follows may as well be the next argument.
        valued = [one for one in command.options if one.takes != "nothing" and not one.optional]
        cases.append('      case "$before" in')
        for one in valued:
            cases.append(f"        {'|'.join(one.flags)}) {_bash_value(one)} ;;")
        subs = [one.path[-1] for one in _children(commands, command.path)]
        rest = f"words={shlex.quote(' '.join(subs))}" if subs else _bash_rest(command)
        cases.append(f"        *) {rest} ;;")
        cases += ["      esac", "      ;;"]
    top = shlex.quote(" ".join(one.path[0] for one in _children(commands, ())))
    parents = "|".join(
        sorted({shlex.quote(" ".join(one.path[:-1])) for one in commands if len(one.path) > 1})
    )
    return (
        _BASH.replace("@TOP@", top)
        .replace("@PARENTS@", parents)
        .replace("@CASES@\n", "\n".join(cases) + "\n")
    )


_BASH = """\
# Completes the commands of sbp in bash: source <(sbp completion bash)
_sbp() {
  local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD - 1]}"
  local command="" options="" words="" files="" at word
  # bash takes --known=FILE for three words.
  if [[ $current == "=" ]]; then
    current=""
  elif [[ $before == "=" ]]; then
    before="${COMP_WORDS[COMP_CWORD - 2]}"
  fi
  for ((at = 1; at < COMP_CWORD; at++)); do
    word="${COMP_WORDS[at]}"
    if [[ -z $command ]]; then
      command="$word"
      continue
    fi
    case "$command" in
      @PARENTS@)
        [[ $word == -* ]] || command="$command $word"
        ;;
    esac
  done
  case "$command" in
    '')
      options="--help --version"
      words=@TOP@
      ;;
@CASES@
  esac
  [[ $current == -* ]] && words="$options" files=""
  COMPREPLY=()
  # Line by line: file names may have spaces.
  while IFS= read -r word; do
    [[ -n $word ]] && COMPREPLY+=("$word")
  done < <(
    [[ -n $words ]] && compgen -W "$words" -- "$current"
    [[ $files == files ]] && compgen -f -- "$current"
    [[ $files == folders ]] && compgen -d -- "$current"
  )
  [[ -n $files ]] && compopt -o filenames 2>/dev/null
  return 0
}
complete -F _sbp sbp
"""


def _bash_value(one: Argument) -> str:
    if one.takes == "words":
        return f"words={shlex.quote(' '.join(one.words))}"
    return f"files={one.takes}" if one.takes in ("files", "folders") else ":"


def _bash_rest(command: Completed) -> str:
    """What may stand where no option's value is awaited: the first positional argument that says something."""
    found = [_bash_value(one) for one in command.places if one.takes != "value"]
    return "; ".join(dict.fromkeys(found)) or ":"


def zsh(commands: Sequence[Completed]) -> str:
    """The script for zsh, to be sourced or put into ``$fpath`` as ``_sbp``."""
    return _ZSH.replace("@BODY@\n", "\n".join(_zsh_function((), commands)) + "\n").replace(
        "@FUNCTIONS@\n",
        "".join(
            "\n".join([f"_sbp_{'_'.join(one.path)}() {{", *_zsh_function(one.path, commands), "}", ""]) + "\n"
            for one in commands
        ),
    )


_ZSH = """\
#compdef sbp
# Completes the commands of sbp in zsh: source <(sbp completion zsh)
@FUNCTIONS@
_sbp() {
@BODY@
}

if [[ ${funcstack[1]} == _sbp ]]; then
  _sbp "$@"
else
  compdef _sbp sbp
fi
"""


def _zsh_function(path: tuple[str, ...], commands: Sequence[Completed]) -> list[str]:
    """The body of the function that completes a command's arguments."""
    specs: list[str] = []
    if path:
        [command] = [one for one in commands if one.path == path]
        for one in command.options:
            specs += _zsh_option(one)
    else:
        specs += [
            shlex.quote("(-h --help)--help[show what the commands are]"),
            shlex.quote("--version[show the version]"),
        ]
    below = _children(commands, path)
    lines = ["  local curcontext=$curcontext state line", "  typeset -A opt_args"]
    if below:
        told = " ".join(f"{_zsh_text(one.path[-1])}\\:{shlex.quote(_zsh_text(one.help))}" for one in below)
        specs += [shlex.quote(f"1:command:(({told}))"), "'*::argument:->rest'"]
    else:
        [command] = [one for one in commands if one.path == path]
        for place in command.places:
            start = "*" if place.repeats else ""
            specs.append(shlex.quote(f"{start}:{_zsh_text(place.help)}:{_zsh_action(place)}"))
    lines += ["  _arguments -C \\", *(f"    {spec} \\" for spec in specs[:-1]), f"    {specs[-1]}"]
    if below:
        lines += ["  if [[ $state == rest ]]; then", "    case $line[1] in"]
        for sub in below:
            lines.append(f"      {sub.path[-1]}) _sbp_{'_'.join(sub.path)} ;;")
        lines += ["    esac", "  fi"]
    return lines


def _zsh_option(one: Argument) -> Iterator[str]:
    exclude = "" if one.repeats else f"({' '.join(one.flags)})"
    for flag in one.flags:
        star = "*" if one.repeats else ""
        equals = value = ""
        if one.takes != "nothing":
            # Two colons: the value may be left out. The sign: --known FILE as well as --known=FILE.
            equals = "=" if flag.startswith("--") else ""
            value = f"{'::' if one.optional else ':'}value:{_zsh_action(one)}"
        yield shlex.quote(f"{exclude}{star}{flag}{equals}[{_zsh_text(one.help)}]{value}")


def _zsh_action(one: Argument) -> str:
    if one.takes == "words":
        return f"({' '.join(one.words)})"
    return {"files": "_files", "folders": "_files -/"}.get(one.takes, " ")


def _zsh_text(text: str) -> str:
    """Without what _arguments would read as its own."""
    return re.sub(r"([\[\]:\\])", r"\\\1", text)


def fish(commands: Sequence[Completed]) -> str:
    """The script for fish."""
    lines = [
        "# Completes the commands of sbp in fish: sbp completion fish > ~/.config/fish/completions/sbp.fish",
        "complete -c sbp -f",
        "complete -c sbp -n __fish_use_subcommand -l help -d 'Show what the commands are'",
        "complete -c sbp -n __fish_use_subcommand -l version -d 'Show the version'",
    ]
    for command in commands:
        *above, name = command.path
        below = [one.path[-1] for one in _children(commands, command.path)]
        if above:
            siblings = " ".join(one.path[-1] for one in _children(commands, tuple(above)))
            first = f"__fish_seen_subcommand_from {above[0]}; and not __fish_seen_subcommand_from {siblings}"
            here = f"__fish_seen_subcommand_from {above[0]}; and __fish_seen_subcommand_from {name}"
        else:
            first = "__fish_use_subcommand"
            # A file may have a command's name, but the first word alone is the command.
            here = f"test (count (commandline -opc)) -ge 2; and test (commandline -opc)[2] = {name}"
            if below:
                here += f"; and not __fish_seen_subcommand_from {' '.join(below)}"
        lines.append(f"complete -c sbp -n {_fish(first)} -a {name} -d {_fish(command.help)}")
        condition = f"complete -c sbp -n {_fish(here)}"
        for one in command.options:
            flags = " ".join(
                f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in one.flags
            )
            lines.append(f"{condition} {flags}{_fish_value(one)} -d {_fish(one.help)}")
        for one in command.places:
            if one.takes == "words":
                lines.append(f"{condition} -a {_fish(' '.join(one.words))}")
            elif one.takes in ("files", "folders"):
                lines.append(f"{condition} -F")
    return "\n".join(lines) + "\n"


def _fish_value(one: Argument) -> str:
    if one.takes == "nothing":
        return ""
    if one.takes == "words":
        return f" -x -a {_fish(' '.join(one.words))}"
    if one.takes == "folders":
        return " -x -a '(__fish_complete_directories)'"
    if one.takes == "files":
        # -r: the value is awaited; without it, the value may be left out.
        return " -F" if one.optional else " -r -F"
    return " -x"


def _fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: dict[str, Callable[[Sequence[Completed]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}


def make_parser() -> argparse.ArgumentParser:
    """The command line of ``sbp completion``."""
    parser = Parser(
        prog="sbp completion",
        description="Print the script that completes these commands in a shell.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "shell",
        nargs="?",
        choices=tuple(SHELLS),
        metavar="SHELL",
        help="bash, zsh or fish (default: that of $SHELL)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = make_parser()
    try:
        shell = parser.parse_args(argv).shell or Path(os.environ.get("SHELL", "")).name
        if shell not in SHELLS:
            parser.error("name a shell: bash, zsh or fish")
    except SystemExit as stop:
        return USAGE if stop.code else OK
    print(SHELLS[shell](all_commands()), end="")
    return OK
