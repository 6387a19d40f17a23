"""Text that is shown: untrusted text made safe to print, numbers with units, the nearest name.

Text of models, datasets, file names and user code is untrusted.

Imports only the standard library, and what knows the secrets of this process.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches
from math import isfinite
from pathlib import Path

from trigon.system.secrets import scrub

# Control characters except newline and tab, invisible and bidirectional marks, unpaired surrogates.
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff"
    r"\U000e0000-\U000e007f]"
)


def sanitize(text: str, *, max_characters: int) -> str:
    r"""Return text with control characters shown as text, `\x1b` for escape.

    Secrets that this process knows are left out. It is cut after max_characters.
    """
    text = scrub(text)
    num_cut = len(text) - max_characters
    shown = _CONTROLS.sub(_as_text, text[:max_characters].replace("\r\n", "\n"))
    return f"{shown} ... ({num_cut:,} more characters)" if num_cut > 0 else shown


def shorten(text: str, limit: int) -> str:
    """Return text of at most limit characters, with dots in place of what is left out."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def listed(names: Sequence[str], *, at_most: int = 5) -> str:
    """Return names for a message: "a, b and 3 more"."""
    more = f" and {len(names) - at_most:,} more" if len(names) > at_most else ""
    return f"{', '.join(names[:at_most])}{more}"


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes as text: in GiB, in MiB below a tenth of one GiB, or so in KiB."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB")):
        if num_bytes >= size // 10:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes / 2**10:,.1f} KiB"


def format_number(value: float) -> str:
    """Return a number as short text: 0.8125, 63.2, 12,345, 1.0e-06."""
    if not isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """Return a duration as text: 420 ms, 3.2 s, 4 min 10 s, 2 h 5 min, 3.1 days."""
    if 0 < seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 48 * 60 else f"{seconds / 86_400:,.1f} days"


def _as_text(match: re.Match[str]) -> str:
    return ascii(match.group())[1:-1]


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name most similar to a name, or None if none is similar enough.

    Failing that, a known name that the name starts with: "sequence" gives "seq".
    cutoff: the least similarity in [0, 1], as in `difflib.get_close_matches`.
    """
    names = list(known)
    similar = get_close_matches(name, names, n=1, cutoff=cutoff)
    return similar[0] if similar else next((other for other in names if other and name.startswith(other)), None)


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return "; did you mean grpo?" with the nearest known name, or "" if there is none."""
    suggestion = nearest(name, known, cutoff=cutoff)
    return f"; did you mean {suggestion}?" if suggestion else ""


def nearest_file(path: Path, pattern: str = "*") -> str | None:
    """Return the name of a path's folder that is most similar to the path's own, or None."""
    names = sorted(entry.name for entry in path.parent.glob(pattern)) if path.parent.is_dir() else []
    return nearest(path.name, names)


def nearest_key(key: str, known: Iterable[str]) -> str:
    """Return the dotted key most similar to a key, by its full name and its last part together.

    Example: "lr" gives "worker.actor.optim.lr".
    """

    def similarity(other: str) -> float:
        full = SequenceMatcher(None, key, other).ratio()
        last_part = SequenceMatcher(None, key.rpartition(".")[2], other.rpartition(".")[2]).ratio()
        return full + last_part

    return max(known, key=similarity)


def missing_package(error: BaseException) -> str:
    """Return the hint to install the package that an import did not find, or ""."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    package = error.name.partition(".")[0]
    return f" (it imports {package!r}, which is not installed; install it with pip, or remove the import)"
