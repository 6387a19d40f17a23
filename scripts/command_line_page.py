"""Writes docs/command-line.md: `python scripts/command_line_page.py > docs/command-line.md`.

The texts are the help pages of the commands.
"""

from __future__ import annotations

import os
import sys
import textwrap

from trigon.tools.cli.main import COMMANDS, find_command, usage
from trigon.tools.cli.parser import MAX_COLUMNS, parser_of

INTRODUCTION = """\
# Command line

<!-- Written by `python scripts/command_line_page.py > docs/command-line.md`; change the help of the
     command instead. -->

- Options of the configuration are `key=value`, without dashes; flags of a command have dashes. Both
  can be mixed in any order. `trigon options NAME` explains an option, and
  [configuration.md](configuration.md) has all of them.
- `trigon help COMMAND` is `trigon COMMAND --help`.
- A wrong argument is answered with one line and the nearest flag or option.
- Results are on standard output, errors and warnings about the configuration on standard error.
  Output that is not a terminal has no colours, and on a terminal it has none if `NO_COLOR` is set.

| exit status | meaning |
|---|---|
| 0 | done |
| 1 | failed, or checks found that a run would fail |
| 2 | wrong usage: an unknown command or flag, a missing argument, a wrong configuration |
| 130 | interrupted by Ctrl-C; `trigon train` has saved the current step after one Ctrl-C |
| 143, 129 | `trigon train`: ended by SIGTERM or SIGHUP; what [could be saved in time](resuming.md#stopping) is |

## Completion in the shell

Commands, flags, files, options part by part (`data.`, then `data.max_pixels=`) and their values are
completed with the tab key. The script asks `trigon` at each press of the key, which takes a quarter
of a second, so it need not be written again after an update.

```bash
mkdir -p ~/.local/share/bash-completion/completions
trigon completion bash > ~/.local/share/bash-completion/completions/trigon
```

This is read where the package bash-completion is installed; elsewhere add
`source ~/.local/share/bash-completion/completions/trigon` to `~/.bashrc`. For zsh, with
`fpath+=~/.zfunc` before `compinit` in `~/.zshrc`, and for fish:

```bash
mkdir -p ~/.zfunc && trigon completion zsh > ~/.zfunc/_trigon
mkdir -p ~/.config/fish/completions && trigon completion fish > ~/.config/fish/completions/trigon.fish
```
"""


def document() -> str:
    """Return the page."""
    os.environ["COLUMNS"] = str(MAX_COLUMNS)  # the width of help pages
    parts = [INTRODUCTION, f"## trigon\n\n{as_code(usage())}\n"]
    for name in COMMANDS:
        parser = parser_of(find_command(name))
        parts.append(f"## trigon {name}\n\n{as_code(parser.format_help().rstrip())}\n")
    return "\n".join(parts)


def as_code(text: str) -> str:
    """Return text as a block of code: indented, as a fenced one is read as commands to run."""
    return textwrap.indent(text, "    ")


if __name__ == "__main__":
    sys.stdout.write(document())
