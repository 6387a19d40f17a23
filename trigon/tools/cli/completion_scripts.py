"""The scripts that complete `trigon` in bash, zsh and fish, made from the commands' parsers.

Where an option of the configuration can stand, the parts of its name are completed one at a time
(`data.`, then `data.max_pixels=`), and then its values, if there are only a few.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from trigon.config.options import Option, options
from trigon.tools.cli.main import COMMANDS
from trigon.tools.cli.parser import ArgumentParser, parser_of

TOP_LEVEL = ("help", "version")
"""Commands that are not in COMMANDS."""


@dataclass(frozen=True, slots=True)
class Command:
    """What can be completed after a command.

    flags: (all names of a flag, its help). values: the values of flags that have a few. with_value:
    flags that take another value, which is completed as a file. words: of positional arguments.
    takes_options: key=value. takes_keys: names of options without a value.
    """

    name: str
    meaning: str
    flags: tuple[tuple[tuple[str, ...], str], ...]
    values: dict[str, tuple[str, ...]]
    with_value: tuple[str, ...]
    words: tuple[str, ...]
    takes_options: bool
    takes_keys: bool


def script(shell: str) -> str:
    """Return the script of a shell: bash, zsh or fish."""
    commands = [describe(name) for name in COMMANDS]
    keys = list(options().values())
    match shell:
        case "bash":
            return bash_script(commands, keys)
        case "zsh":
            return zsh_script(commands, keys)
        case "fish":
            return fish_script(commands, keys)
        case _:
            raise ValueError(f"no completion for {shell!r}")


def describe(name: str) -> Command:
    """Return what can be completed after a command."""
    module, meaning = COMMANDS[name]
    parser = parser_of(importlib.import_module(module).main)
    flags = [action for action in parser._actions if action.option_strings]
    positional = [action for action in parser._actions if not action.option_strings]
    with_choices = [action for action in flags if action.choices]
    return Command(
        name=name,
        meaning=meaning,
        flags=tuple((tuple(action.option_strings), _summary(parser, action)) for action in flags),
        values={
            flag: tuple(map(str, action.choices or ())) for action in with_choices for flag in action.option_strings
        },
        with_value=tuple(
            flag for action in flags if action.nargs != 0 and not action.choices for flag in action.option_strings
        ),
        words=tuple(str(choice) for action in positional for choice in action.choices or ()),
        takes_options=parser.takes_options,
        takes_keys=name == "options",
    )


def _summary(parser: ArgumentParser, action: argparse.Action) -> str:
    """Return the first clause of a flag's help."""
    text = (action.help or "") % {**vars(action), "prog": parser.prog}
    return text.partition(";")[0].partition(" (")[0].partition(": ")[0]


def values_of(option: Option) -> tuple[str, ...]:
    """Return the values of an option if there are only a few, else nothing."""
    if option.kind == "true or false":
        return ("true", "false")
    return option.choices


_BASH = r"""# Completion of trigon for bash, written by `trigon completion bash`.

_trigon_keys=@KEYS@

# Prints the values of an option.
_trigon_values() {
    case "$1" in
@VALUES@
    esac
}

# Completes an option: the next part of its name, or its value. $1: the word so far.
_trigon_option() {
    local word="$1" key rest found="" last
    if [[ "$word" == *=* ]]; then
        local prefix=""
        # Without = among the characters that separate words, the whole word is replaced.
        [[ "$COMP_WORDBREAKS" == *=* ]] || prefix="${word%%=*}="
        local values
        values="$(_trigon_values "${word%%=*}")"
        if [[ -n "$values" ]]; then
            COMPREPLY=($(compgen -P "$prefix" -W "$values" -- "${word#*=}"))
        else
            _trigon_files "${word#*=}"
        fi
        return
    fi
    for key in $_trigon_keys; do
        [[ "$key" == "$word"* ]] || continue
        rest="${key#"$word"}"
        if [[ "$rest" == *.* ]]; then key="$word${rest%%.*}."; else key="$key$2"; fi
        [[ " $found " == *" $key "* ]] || found="$found $key"
    done
    if [[ -z "$found" && -n "$word" ]]; then
        # The last part alone, where only one option has it: lr_warm -> worker.actor.optim.lr_warmup_ratio
        for key in $_trigon_keys; do
            last="${key##*.}"
            [[ "$last" == "$word"* ]] && found="$found $key$2"
        done
        [[ "$found" == " "*" "* ]] && found=""
    fi
    COMPREPLY+=($found)
    [[ -n "$found" ]] && compopt -o nospace 2>/dev/null
}

_trigon_files() {
    local IFS=$'\n'
    COMPREPLY+=($(compgen -f -- "$1"))
    compopt -o filenames 2>/dev/null
}

_trigon() {
    # The word before the cursor, whole: bash separates it at = and :.
    local line="${COMP_LINE:0:COMP_POINT}" word command flags="" values="" with_value="" words="" options="" keys=""
    word="${line##*[[:space:]]}"
    local before=(${line%"$word"})
    local previous="${before[-1]}"
    COMPREPLY=()
    if [[ ${#before[@]} -le 1 || ( ${#before[@]} -eq 2 && "${before[1]}" == help ) ]]; then
        COMPREPLY=($(compgen -W "@COMMANDS@" -- "$word"))
        return
    fi
    command="${before[1]}"
    case "$command" in
@CASES@
    esac
    case "$command $previous" in
@FLAG_VALUES@
    esac
    if [[ -n "$values" ]]; then
        COMPREPLY=($(compgen -W "$values" -- "$word"))
    elif [[ " $with_value " == *" $previous "* ]]; then
        _trigon_files "$word"
    elif [[ "$word" == -* ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$word"))
    elif [[ -n "$words" ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$word"))
    elif [[ -n "$keys" ]]; then
        _trigon_option "$word" ""
    elif [[ -n "$options" ]]; then
        _trigon_option "$word" "="
        # Names of files are quoted by bash, and = would be too: not together with options.
        [[ "$word" == *=* || ${#COMPREPLY[@]} -gt 0 ]] || _trigon_files "$word"
    else
        _trigon_files "$word"
    fi
}

complete -F _trigon trigon
"""


def bash_script(commands: Sequence[Command], keys: Sequence[Option]) -> str:
    """Return the script for bash 4 and later."""
    return _fill(
        _BASH,
        KEYS=_words([option.name for option in keys]),
        VALUES=_values(keys),
        COMMANDS=" ".join([*(command.name for command in commands), *TOP_LEVEL]),
        CASES="\n".join(_case(command) for command in commands),
        FLAG_VALUES=_flag_values(commands),
    )


_ZSH = r"""#compdef trigon
# Completion of trigon for zsh, written by `trigon completion zsh`.

_trigon_values() {
    case "$1" in
@VALUES@
    esac
}

# Completes an option: the next part of its name, or its value. $1: what ends its name.
_trigon_option() {
    local word="$PREFIX" key rest
    local -a found parts
    local -a all=(@KEY_LIST@)
    if [[ "$word" == *=* ]]; then
        compset -P '*='
        found=(${=$(_trigon_values "${word%%=*}")})
        if (( $#found )); then compadd -a found; else _files; fi
        return
    fi
    for key in $all; do
        [[ "$key" == "$word"* ]] || continue
        rest="${key#$word}"
        if [[ "$rest" == *.* ]]; then parts+=("$word${rest%%.*}."); else found+=("$key$1"); fi
    done
    parts=(${(u)parts})
    compadd -S '' -a parts
    compadd -S '' -a found
}

_trigon() {
    local command flags="" values="" with_value="" words_="" options="" keys=""
    local previous="${words[CURRENT-1]}"
    local -a found
    if (( CURRENT == 2 )) || { (( CURRENT == 3 )) && [[ "${words[2]}" == help ]] }; then
        found=(@COMMANDS@)
        compadd -a found
        return
    fi
    command="${words[2]}"
    case "$command" in
@CASES@
    esac
    case "$command $previous" in
@FLAG_VALUES@
    esac
    if [[ -n "$values" ]]; then
        found=(${=values}); compadd -a found
    elif [[ " $with_value " == *" $previous "* ]]; then
        _files
    elif [[ "$PREFIX" == -* ]]; then
        found=(${=flags}); compadd -a found
    elif [[ -n "$words_" ]]; then
        found=(${=words_}); compadd -a found
    elif [[ -n "$keys" ]]; then
        _trigon_option ""
    elif [[ -n "$options" ]]; then
        _trigon_option "="
        [[ "$PREFIX" == *=* ]] || _files
    else
        _files
    fi
}

if [[ "${funcstack[1]}" == _trigon ]]; then _trigon "$@"; else compdef _trigon trigon; fi
"""


def zsh_script(commands: Sequence[Command], keys: Sequence[Option]) -> str:
    """Return the script for zsh."""
    return _fill(
        _ZSH,
        KEY_LIST=" ".join(option.name for option in keys),
        VALUES=_values(keys),
        COMMANDS=" ".join([*(command.name for command in commands), *TOP_LEVEL]),
        CASES="\n".join(_case(command) for command in commands).replace(" words=", " words_="),
        FLAG_VALUES=_flag_values(commands),
    )


_FISH = r"""# Completion of trigon for fish, written by `trigon completion fish`.

function __trigon_values
    switch $argv[1]
@VALUES@
    end
end

# Prints options as NAME=, or the values of the one that is being written. $argv[1]: what ends a name.
function __trigon_options
    set -l word (commandline -ct)
    if string match -q '*=*' -- $word
        set -l key (string split -m 1 '=' -- $word)[1]
        for value in (__trigon_values $key)
            echo $key=$value
        end
        return
    end
    for key in @KEY_LIST@
        echo $key$argv[1]
    end
end

complete -c trigon -n __fish_use_subcommand -f
@LINES@
"""


def fish_script(commands: Sequence[Command], keys: Sequence[Option]) -> str:
    """Return the script for fish."""
    lines: list[str] = []
    for command in commands:
        lines.append(f"complete -c trigon -n __fish_use_subcommand -a {command.name} -d {shlex.quote(command.meaning)}")
        seen = f"complete -c trigon -n '__fish_seen_subcommand_from {command.name}'"
        for names, summary in command.flags:
            words = [f"-{'l' if name.startswith('--') else 's'} {name.lstrip('-')}" for name in names]
            if choices := command.values.get(names[-1]):
                words.append(f"-x -a {shlex.quote(' '.join(choices))}")
            elif names[-1] in command.with_value:
                words.append("-r")
            lines.append(f"{seen} {' '.join(words)} -d {shlex.quote(summary)}")
        if command.words:
            lines.append(f"{seen} -f -a {shlex.quote(' '.join(command.words))}")
        if command.takes_options or command.takes_keys:
            lines.append(f"{seen} -a '(__trigon_options {chr(34)}{'=' if command.takes_options else ''}{chr(34)})'")
    lines.append("complete -c trigon -n __fish_use_subcommand -a help -d 'the help page of a command'")
    lines.append("complete -c trigon -n __fish_use_subcommand -a version -d 'the version of trigon'")
    all_names = " ".join(command.name for command in commands)
    lines.append(f"complete -c trigon -n '__fish_seen_subcommand_from help' -f -a '{all_names}'")
    cases = "\n".join(
        f"        case {option.name}\n            printf '%s\\n' {' '.join(values_of(option))}"
        for option in keys
        if values_of(option)
    )
    return _fill(_FISH, KEY_LIST=" ".join(option.name for option in keys), VALUES=cases, LINES="\n".join(lines))


def _case(command: Command) -> str:
    """Return the line that sets what can follow a command, in bash and zsh."""
    parts = [
        f"flags={_words([name for names, _ in command.flags for name in names])}",
        *([f"with_value={_words(command.with_value)}"] if command.with_value else []),
        *([f"words={_words(command.words)}"] if command.words else []),
        *(["options=1"] if command.takes_options else []),
        *(["keys=1"] if command.takes_keys else []),
    ]
    return f"        {command.name}) {' '.join(parts)} ;;"


def _flag_values(commands: Sequence[Command]) -> str:
    return "\n".join(
        f'        "{command.name} {flag}") values={_words(values)} ;;'
        for command in commands
        for flag, values in command.values.items()
    )


def _values(keys: Sequence[Option]) -> str:
    return "\n".join(
        f"        {option.name}) echo {_words(values_of(option))} ;;" for option in keys if values_of(option)
    )


def _words(words: Sequence[str]) -> str:
    return shlex.quote(" ".join(words))


def _fill(template: str, **texts: str) -> str:
    for name, text in texts.items():
        template = template.replace(f"@{name}@", text)
    return template
