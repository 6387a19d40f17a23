"""Writes docs/configuration.md: `python scripts/configuration_page.py > docs/configuration.md`.

Knows the schema and the tables of older names; holds no sentence about any one option.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from trigon.config.legacy import ABSENT, RENAMED, RETIRED
from trigon.config.options import meanings, options, sections

INTRODUCTION = """\
# Configuration

<!-- Written by `python scripts/configuration_page.py > docs/configuration.md`; change
     trigon/config/schema.py instead. -->

    trigon train run.yaml worker.rollout.n=8 data.max_pixels=1000000

Defaults, then the YAML file, then `key=value` on the command line: the later one decides. Sections, keys and values are
EasyR1's, so its files and command lines run here (`config=run.yaml` names the file too); older names and keys with
nothing to switch are listed [below](#older-names).

- An unknown key, a value of the wrong type or out of bounds, numbers that do not fit together and missing files are
  errors, all reported at once, with the place they were written at, before anything is loaded.
- On the command line a value is read as YAML: `trainer.logger=[console,wandb]`. A text is taken as it is, with its
  colons, braces and line ends: `data.system_prompt="Answer in {} please: now"`. The last of several values counts.
- Numbers may be written as `1e-6`; `null` stands for no value. `worker.actor:` in a file is `actor:` within `worker:`.
- The whole configuration of a run, defaults included, is saved beside its checkpoints, and can be trained from again.
"""

OLDER_NAMES = """\
## Older names

Accepted with one warning each. Where both names are given in one file with different values, that is an error.

| older name | name today |
|---|---|"""

NOTHING_TO_SWITCH = """\
## Keys with nothing to switch

Keys of EasyR1 that are accepted, with one warning each, and have no effect. A value that asks for what cannot be done
is an error.

| key | why it has no effect | other values |
|---|---|---|"""

NOT_HERE = """\
## Values that are not here

| key and value | why |
|---|---|"""


def document() -> str:
    """Return the page."""
    parts = [INTRODUCTION]
    sentences = meanings()
    for path, _ in sections():
        own = [option for option in options().values() if option.path[:-1] == path]
        if own:
            parts.append(
                f"## {'.'.join(path)}\n\n{sentences[path]}\n\n| key | value | default | meaning |\n|---|---|---|---|"
            )
            parts += [
                _row(f"`{option.path[-1]}`", option.expected, f"`{_written(option.default)}`", sentences[option.path])
                for option in own
            ]
            parts.append("")
    parts += [OLDER_NAMES, *(_row(f"`{old}`", f"`{new}`") for old, new in RENAMED.items()), ""]
    parts += [NOTHING_TO_SWITCH]
    for key, entry in RETIRED.items():
        honoured = ", ".join(f"`{_written(value)}`" for value in entry.only or ())
        parts.append(_row(f"`{key}`", entry.because, f"only {honoured}: {entry.instead}" if honoured else "any"))
    parts += ["", NOT_HERE, *(_row(f"`{key}={value}`", why) for (key, value), why in ABSENT.items()), ""]
    return "\n".join(parts)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _written(value: Any) -> str:
    """Return a value as it is written in YAML."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_written, value))}]"
    return value if isinstance(value, str) and value else json.dumps(value)


if __name__ == "__main__":
    sys.stdout.write(document())
