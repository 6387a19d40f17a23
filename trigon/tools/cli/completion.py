"""`trigon completion bash|zsh|fish`: prints a script that completes commands, flags and options.

The script has all names in it, so that completing starts no Python.
"""

from __future__ import annotations

from collections.abc import Sequence

from trigon.tools.cli.parser import ArgumentParser


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status; see trigon.tools.cli.main."""
    parser = ArgumentParser(
        prog="trigon completion",
        description="Print a script for a shell that completes commands, their flags, options such as "
        "data.max_prompt_length=, and values. Write it again after an update of Trigon.",
        examples=[
            ("trigon completion bash > ~/.local/share/bash-completion/completions/trigon", "bash"),
            ("trigon completion zsh > ~/.zfunc/_trigon", "zsh, with fpath+=~/.zfunc before compinit in ~/.zshrc"),
            ("trigon completion fish > ~/.config/fish/completions/trigon.fish", "fish"),
            ("source <(trigon completion bash)", "in this shell only"),
        ],
    )
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help="the shell that reads the script")
    shell: str = parser.parse_args(arguments).shell
    # Imported here: it loads pydantic, and the modules of all commands.
    from trigon.tools.cli.completion_scripts import script

    print(script(shell), end="")
    return 0
