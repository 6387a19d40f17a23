"""`trigon completion bash|zsh|fish`: completes commands, flags and options in a shell.

The script that it prints calls `trigon` at each press of Tab, by the protocol of argcomplete, so
that the names of the installed version are completed.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from trigon.tools.cli.main import COMMANDS, find_command
from trigon.tools.cli.parser import ArgumentParser, parser_of


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status; see trigon.tools.cli.main."""
    parser = ArgumentParser(
        prog="trigon completion",
        description="Print a script for a shell that completes commands, their flags, options such as "
        "data.max_prompt_length=, and values.",
        examples=[
            ("trigon completion bash > ~/.local/share/bash-completion/completions/trigon", "bash"),
            ("trigon completion zsh > ~/.zfunc/_trigon", "zsh, with fpath+=~/.zfunc before compinit in ~/.zshrc"),
            ("trigon completion fish > ~/.config/fish/completions/trigon.fish", "fish"),
            ("source <(trigon completion bash)", "in this shell only"),
        ],
    )
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help="the shell that reads the script")
    shell: str = parser.parse_args(arguments).shell
    from argcomplete.shell_integration import shellcode

    print(shellcode(["trigon"], shell=shell), end="")
    return 0


def complete() -> None:
    """Write the completions of the command line in the environment, and end the process.

    Only the module of the command on that line is imported.
    """
    import argcomplete

    line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    *written, word = re.split(r"\s+", line)
    top = argparse.ArgumentParser(prog="trigon", add_help=False)
    parsers = top.add_subparsers()
    for name, (_, meaning) in COMMANDS.items():
        parents = [parser_of(find_command(name))] if name in written[1:2] else []
        parser = parsers.add_parser(name, help=meaning, add_help=False, parents=parents)
        flag = parser._option_string_actions.get(written[-1] if written else "")
        if parents and parents[0].takes_options and not word.startswith("-") and (flag is None or flag.nargs == 0):
            # argparse accepts no positional argument after a flag here, as our parsers do.
            line = f"trigon {name} {word}"
        for action in parser._actions:
            if "key=value" in str(action.metavar):
                action.completer = complete_option  # type: ignore[attr-defined]
            elif name == "options" and not action.option_strings:
                action.completer = complete_name  # type: ignore[attr-defined]
    parsers.add_parser("help", help="the help page of a command").add_argument("command", choices=list(COMMANDS))
    parsers.add_parser("version", help="the version of trigon")
    os.environ |= {"COMP_LINE": line, "COMP_POINT": str(len(line))}
    argcomplete.autocomplete(top, always_complete_options=False, validator=_continues)


def _continues(completion: str, word: str) -> bool:
    """Return whether a completion continues the word, or its last part does."""
    return completion.startswith(word) or completion.rpartition(".")[2].startswith(word)


def complete_option(prefix: str, **_: Any) -> list[str]:
    """Return the options that continue a word, as `name=`, or the values of an option, or files."""
    from argcomplete.completers import FilesCompleter

    from trigon.config.options import options

    name, equals, value = prefix.partition("=")
    if not equals:
        return complete_name(prefix, end="=") or list(FilesCompleter()(prefix))
    for option in options().values():
        if option.name == name and (values := ("true", "false") if option.kind == "true or false" else option.choices):
            return [f"{name}={each}" for each in values]
    return [f"{name}={path}" for path in FilesCompleter()(value)]


def complete_name(prefix: str, *, end: str = "", **_: Any) -> list[str]:
    """Return the names of options that continue a word, up to the next part in which they differ.

    Where none begins with the word, the one option whose last part does: lr_warmup gives
    worker.actor.optim.lr_warmup_ratio. end: written after a complete name.
    """
    from trigon.config.options import options

    names = [option.name for option in options().values()]
    if found := [name for name in names if name.startswith(prefix)]:
        return _next_parts(found, prefix, end)
    found = [name for name in names if name.rpartition(".")[2].startswith(prefix)]
    return [f"{name}{end}" for name in found] if len(found) == 1 else []


def _next_parts(names: Iterable[str], prefix: str, end: str) -> list[str]:
    """Return each name as far as its next dot, or whole, with its end; two or more where possible.

    A shell writes a space behind the only completion, which a section must not have.
    """
    parts: dict[str, list[str]] = {}
    for name in names:
        part, dot, _ = name[len(prefix) :].partition(".")
        parts.setdefault(f"{prefix}{part}{dot or end}", []).append(name)
    [section, *others] = parts
    return list(parts) if others or not section.endswith(".") else _next_parts(parts[section], section, end)
