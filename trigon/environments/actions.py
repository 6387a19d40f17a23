"""Finds the action that a model names in a turn.

What models write around a name is accepted; a name is never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_THOUGHTS = re.compile(r"<think>.*?(?:</think>|$)", re.DOTALL)
_TAGGED = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_SEPARATORS = re.compile(r"[\s_-]+")


def action_text(completion: str) -> str:
    """Return the part of a turn's text that says what to do, without white space around it.

    Thoughts are left out: everything up to the last `</think>`, and after a `<think>` that is not
    closed. Of what remains, the content of the last `<action> ... </action>` counts, or all of it
    if there is none.
    """
    said = _THOUGHTS.sub("", completion).rpartition("</think>")[2]
    tagged = _TAGGED.findall(said)
    return (tagged[-1] if tagged else said).strip()


def find_action(completion: str, names: Mapping[str, str]) -> str | None:
    """Return the name that a turn's text contains, or None if it contains none, or several.

    Case, underscores and hyphens do not matter ("Turn_Left" is "turn left"). A name counts where it
    stands as words of its own: "right" is not in "bright", and of "turn left" and "left" the longer
    one counts where both would. So "I go left." is the action left, and "left or right" is none.

    Args: completion: text of the turn, of which `action_text` counts. names: from `as_names`.
    """
    text = _plain(action_text(completion))
    longest_first = sorted(names, key=len, reverse=True)
    found = re.findall("|".join(rf"(?<!\w){re.escape(plain)}(?!\w)" for plain in longest_first), text)
    return names[found[0]] if len(set(found)) == 1 else None


def as_names(names: Iterable[str]) -> dict[str, str]:
    """Return each name by the form in which it is searched.

    Raises: ValueError if there is no name, an empty one, or two that differ in case, underscores or
    hyphens only.
    """
    searched: dict[str, str] = {}
    for name in names:
        plain = _plain(name)
        if not plain:
            raise ValueError(f"an action has the name {name!r}, which no text can contain; give it a name of letters")
        if plain in searched:
            raise ValueError(
                f"the actions {searched[plain]!r} and {name!r} have the same name, since case, underscores and "
                f"hyphens do not count; rename one of them"
            )
        searched[plain] = name
    if not searched:
        raise ValueError("there are no actions; name at least one")
    return searched


def _plain(text: str) -> str:
    return _SEPARATORS.sub(" ", text.casefold()).strip()
