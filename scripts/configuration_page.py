"""Writes docs/configuration.md: `python scripts/configuration_page.py > docs/configuration.md`.

The texts come from config/schema.py and config/legacy.py.
"""

from __future__ import annotations

import sys

from trigon.config.legacy import IGNORED, RENAMED, UNSUPPORTED_VALUES
from trigon.config.options import Option, descriptions, format_value, options, sections
from trigon.config.schema import DEVICE_DEFAULTS

INTRODUCTION = """\
# Configuration

<!-- Written by `python scripts/configuration_page.py > docs/configuration.md`; change
     trigon/config/schema.py instead. -->

    trigon train run.yaml worker.rollout.n=8 data.max_pixels=1000000

Precedence: defaults < the YAML file < `key=value` on the command line. Sections, keys and values are
EasyR1's, so its files and command lines run unchanged (`config=run.yaml` gives the file too).
Renamed and ignored keys are listed [below](#renamed-keys).

- Unknown keys, values of a wrong type or out of bounds, conflicting numbers and missing files are
  errors. All of them are reported at once, with file and line, before anything is loaded; only
  checks that depend on a wrong value wait until it is right.
- A value on the command line is YAML: `trainer.logger=[console,wandb]`. A text option is taken
  literally, including colons, braces and line ends: `data.system_prompt="Answer in {} please: now"`.
  If a key is given several times, the last value applies.
- Numbers may be written as `1e-6`; `null` is no value. `worker.actor:` in a file is `actor:` within
  `worker:`.
- Where a default differs on a GPU, another column shows it, and `null` means: by device.
- The full configuration of a run, defaults included, is saved with its checkpoints, and can be
  trained from again.
"""

RENAMED_KEYS = """\
## Renamed keys

Each older name is accepted with one warning. If one file gives both names with different values,
that is an error.

| older name | current name |
|---|---|"""

IGNORED_KEYS = """\
## Ignored keys

Keys of EasyR1 that are accepted, with one warning each, and have no effect. A value that asks for
an unsupported feature is an error.

| key | why it has no effect | other values |
|---|---|---|"""

UNSUPPORTED = """\
## Unsupported values

| key and value | why |
|---|---|"""


def document() -> str:
    """Return the page."""
    parts = [INTRODUCTION]
    texts = descriptions()
    for path, _ in sections():
        own = [option for option in options().values() if option.path[:-1] == path]
        if own:
            differs = any(option.name in DEVICE_DEFAULTS for option in own)
            columns = ["key", "value", "default", *(["default on a GPU"] if differs else []), "meaning"]
            parts += [f"## {'.'.join(path)}\n\n{texts[path]}\n", _row(*columns), "|---" * len(columns) + "|"]
            for option in own:
                default, default_on_gpu = _defaults(option)
                cells = [default, *([default_on_gpu] if differs else [])]
                parts.append(_row(f"`{option.path[-1]}`", option.expected, *cells, texts[option.path]))
            parts.append("")
    parts += [RENAMED_KEYS, *(_row(f"`{old}`", f"`{new}`") for old, new in RENAMED.items()), ""]
    parts += [IGNORED_KEYS]
    for key, entry in IGNORED.items():
        if entry.allowed == ():  # a removed option, whose error names what to use
            continue
        allowed = ", ".join(f"`{format_value(value)}`" for value in entry.allowed or ())
        parts.append(_row(f"`{key}`", entry.reason, f"only {allowed}: {entry.advice}" if allowed else "any"))
    parts += ["", UNSUPPORTED, *(_row(f"`{key}={value}`", why) for (key, value), why in UNSUPPORTED_VALUES.items()), ""]
    return "\n".join(parts)


def _defaults(option: Option) -> tuple[str, str]:
    """Return the default, and the default on a GPU or nothing where it is the same."""
    by_device = DEVICE_DEFAULTS.get(option.name)
    if by_device is None:
        return f"`{format_value(option.default)}`", ""
    return f"`{format_value(by_device['cpu'])}`", f"`{format_value(by_device['cuda'])}`"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.stdout.write(document())
