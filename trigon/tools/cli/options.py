"""`trigon options [PATTERN ...]`: prints options of the configuration, with what they mean."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from fnmatch import fnmatchcase

from trigon.config.legacy import IGNORED, OTHER_NAMES, RENAMED
from trigon.config.options import Option, descriptions, format_value, options
from trigon.config.schema import DEVICE_DEFAULTS
from trigon.errors import ConfigError
from trigon.system.terminal import nearest_key
from trigon.tools.cli.parser import ArgumentParser

_WIDTH = 100


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status; see trigon.tools.cli.main."""
    parser = ArgumentParser(
        prog="trigon options",
        description="Print the options of the configuration: values, default, meaning.",
        examples=[
            ("trigon options lr", "options with lr in their name"),
            ("trigon options 'trainer.val_*'", "by a pattern"),
            ("trigon options", "the names and defaults of all options"),
        ],
    )
    parser.add_argument(
        "pattern",
        nargs="*",
        help="part of a name (lr), a name with * and ? (trainer.val_*), or a value (wandb); an older or EasyR1's name "
        "gives the present one, or says that it has no effect; without patterns, the names and defaults of all options",
    )
    patterns: list[str] = parser.parse_args(arguments).pattern
    if not patterns:
        for option in options().values():
            print(f"{option.name}={format_value(option.default)}")
        return 0
    found, without_effect = find_options(patterns)
    print("\n\n".join([*map(describe, found), *map(describe_ignored, without_effect)]))
    return 0


def find_options(patterns: Sequence[str]) -> tuple[list[Option], list[str]]:
    """Return the options that match any pattern, and EasyR1's keys without effect.

    Both in the order of the schema. A pattern may also be a value that an option may have. Of names
    that match no option, older ones, those of other libraries and those without effect are looked
    through.
    Raises: ConfigError for a pattern that matches none.
    """
    found: set[str] = set()
    without_effect: set[str] = set()
    for pattern in patterns:
        # Users copy patterns from command lines and files too: "lr=1e-6", "--lr".
        name = pattern.lstrip("-").partition("=")[0]
        name = RENAMED.get(name, name)
        known = options().values()
        matching = {option.name for option in known if _matches(option.name, name) or name in option.choices}
        if not matching:
            matching = {new for old, new in RENAMED.items() if _matches(old, name)}
            matching |= {OTHER_NAMES[name]} if name in OTHER_NAMES else set()
            ignored = {old for old in IGNORED if _matches(old, name)}
            if not matching and not ignored:
                near = nearest_key(name, [option.name for option in known])
                raise ConfigError(
                    f"no option matches {pattern!r}; did you mean {near}? `trigon options` lists all of them"
                )
            without_effect |= ignored
        found |= matching
    return (
        [option for option in options().values() if option.name in found],
        [key for key in IGNORED if key in without_effect],
    )


def _matches(name: str, pattern: str) -> bool:
    if any(character in pattern for character in "*?["):
        return fnmatchcase(name, pattern)
    return pattern in name


def describe(option: Option) -> str:
    """Return an option with its default, its values and its meaning, in lines of 100 characters."""
    by_device = DEVICE_DEFAULTS.get(option.name)
    default = format_value(option.default)
    if by_device is not None:
        default += f" (by device: {format_value(by_device['cpu'])}, on a GPU {format_value(by_device['cuda'])})"
    older = [old for old, new in RENAMED.items() if new == option.name]
    lines = [option.expected, *([f"Older names: {', '.join(older)}."] if older else []), descriptions()[option.path]]
    wrapped = [textwrap.fill(line, _WIDTH, initial_indent="    ", subsequent_indent="    ") for line in lines]
    return "\n".join([f"{option.name}={default}", *wrapped])


def describe_ignored(key: str) -> str:
    """Return a key that is accepted and has no effect, with the reason."""
    reason = textwrap.fill(IGNORED[key].reason, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return f"{key} has no effect\n{reason}"
