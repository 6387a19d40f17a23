"""The argument parser of all commands: their help pages, and the errors of their arguments.

A command that takes options of the configuration has a positional argument with `key=value` in its
metavar; a flag that it does not know is then answered with the option that was probably meant.
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn

from trigon.errors import ConfigError
from trigon.system.terminal import nearest, sanitize

MAX_COLUMNS = 100
"""Width of help pages on a wider terminal."""

_inspecting: ContextVar[bool] = ContextVar("inspecting", default=False)


def number(low: float, high: float = math.inf, *, whole: bool = False) -> Callable[[str], float]:
    """Return a type of arguments: numbers from low to high, both included."""

    def read(text: str) -> float:
        try:
            value = int(text) if whole else float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            kind = "whole number" if whole else "number"
            bounds = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a {kind} {bounds}")
        return value

    return read


count = number(1, whole=True)


def new_folder(text: str) -> Path:
    """Return the path of a folder that is there, or can be made."""
    path = Path(text)
    first = next((each for each in (path, *path.parents) if each.exists()), path)
    if first.exists() and not first.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be a folder: {first} is a file")
    return path


def require_absent(folder: Path, names: Iterable[str]) -> None:
    """Raise ConfigError if a folder has one of these files or folders: none is overwritten."""
    if existing := [name for name in names if (folder / name).exists()]:
        raise ConfigError(
            f"{folder} has {', '.join(existing)} already, and nothing is overwritten: name another folder, or remove it"
        )


@contextmanager
def writing(path: Path, what: str) -> Iterator[None]:
    """Make the folder of a file that is written in the context.

    Raises: ConfigError if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError(
            f"{what} cannot be written to {path}: {error.strerror or error}; choose another file"
        ) from error


class ArgumentParser(argparse.ArgumentParser):
    """Like argparse's, with examples, and with one line for an error, which has a suggestion.

    examples: (command, what it does), shown at the end of the help.
    Flags cannot be abbreviated, so that a flag that is added later changes no command line.
    Positional arguments and flags can be mixed where key=value is accepted.
    """

    def __init__(
        self,
        *,
        prog: str | None = None,
        usage: str | None = None,
        description: str | None = None,
        epilog: str | None = None,
        examples: Sequence[tuple[str, str]] = (),
    ) -> None:
        parts = [*([epilog] if epilog else []), *([format_examples(examples)] if examples else [])]
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog="\n\n".join(parts),
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
        )

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Return the parsed arguments. Exits with status 2 and one line for wrong ones."""
        parse = self.parse_known_intermixed_args if self.takes_options else self.parse_known_args
        parsed, unknown = parse(args, namespace)
        if unknown:
            self.error(self._explain(unknown[0], args or ()))
        return parsed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the parsed arguments and those that are not known, as argparse does."""
        if _inspecting.get():
            raise _Inspected(self)
        return super().parse_known_args(args, namespace)

    @property
    def takes_options(self) -> bool:
        """Return whether the command takes options of the configuration as key=value."""
        return any("key=value" in text for text in self._positional_names())

    @property
    def flags(self) -> list[str]:
        """Return all flags of the command."""
        return [flag for action in self._actions for flag in action.option_strings]

    def _positional_names(self) -> list[str]:
        return [str(action.metavar or action.dest) for action in self._actions if not action.option_strings]

    def _explain(self, argument: str, given: Sequence[str]) -> str:
        """Return why an argument was not accepted, with a suggestion. given: all arguments."""
        if not argument.startswith("-"):
            return f"unexpected argument {argument!r}"
        name = argument.partition("=")[0]
        known = {flag.replace("_", "-"): flag for flag in self.flags}
        similar = nearest(name.replace("_", "-"), known, cutoff=0.75 if self.takes_options else 0.6)
        if similar is not None and similar.startswith("--") and not (self.takes_options and _is_option(name)):
            return f"unknown flag {name}; did you mean {known[similar]}?"
        if not self.takes_options:
            return f"unknown flag {name}"
        takes_file = any("yaml" in text.lower() for text in self._positional_names())
        if name in ("--config", "-config") and not takes_file:
            return f"unknown flag {name}: this command has a configuration of its own, which key=value changes"
        # Imported here: it loads pydantic, which a help page does not need.
        from trigon.config.load import advise_without_dashes

        following = given[list(given).index(argument) + 1 :][:1] if argument in given else []
        return f"cannot read the argument {argument!r}: {advise_without_dashes(argument, following)}"

    def error(self, message: str) -> NoReturn:
        """Print one line, and exit with status 2. Control characters are shown as text."""
        self.exit(2, f"{self.prog}: error: {sanitize(message, max_characters=5000)} ({self.prog} --help for more)\n")


def _is_option(flag: str) -> bool:
    """Return whether a flag without dashes is the name of an option, or the end of one."""
    from trigon.config.options import options

    name = flag.lstrip("-").replace("-", "_")
    return any(f".{option.name}".endswith(f".{name}") for option in options().values())


def format_examples(examples: Sequence[tuple[str, str]]) -> str:
    """Return examples as text for the end of a help page: a command and what it does."""
    width = max(len(command) for command, _ in examples)
    in_columns = [f"  {command:<{width}}  {meaning}" for command, meaning in examples]
    below = [f"  {command}\n      {meaning}" for command, meaning in examples]
    fits = max(map(len, in_columns)) <= MAX_COLUMNS
    return "\n".join(["examples:", *(in_columns if fits else below)])


def parser_of(main: Callable[[Sequence[str]], int]) -> ArgumentParser:
    """Return the parser of a command, without running it. main: main of the command's module.

    Raises: ValueError if the command parses its arguments in another way.
    """
    token = _inspecting.set(True)
    try:
        main([])
    except _Inspected as inspected:
        return inspected.parser
    finally:
        _inspecting.reset(token)
    raise ValueError(f"{main.__module__} does not parse its arguments with ArgumentParser.parse_args")


class _Inspected(Exception):
    """Carries the parser out of a command that would have parsed its arguments."""

    def __init__(self, parser: ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


class _HelpFormatter(argparse.HelpFormatter):
    """Wraps to at most MAX_COLUMNS; descriptions that have several lines are kept as they are."""

    def __init__(self, prog: str) -> None:
        columns = shutil.get_terminal_size((MAX_COLUMNS, 24)).columns
        super().__init__(prog, max_help_position=30, width=min(columns, MAX_COLUMNS))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n\n".join(part if "\n" in part else fill(part, width, indent) for part in text.split("\n\n"))
