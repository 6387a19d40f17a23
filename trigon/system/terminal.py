"""Text that is shown: untrusted text made safe to print, and numbers of bytes.

Text of models, datasets, file names and user code is untrusted.

Imports only the standard library, and what knows the secrets of this process.
"""

from __future__ import annotations

import re

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


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes as text: in GiB, or in MiB below a tenth of one GiB."""
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 // 10 else f"{num_bytes / 2**20:,.1f} MiB"


def _as_text(match: re.Match[str]) -> str:
    return ascii(match.group())[1:-1]
