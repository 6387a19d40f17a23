"""The files that the page shows: its own, the script of the charts, and images of a run.

The names of images come from rollouts, and their content is untrusted.
"""

from __future__ import annotations

import os
import re
import stat
from base64 import b64encode
from hashlib import sha256
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

from trigon.errors import ConfigError
from trigon.system import image_formats
from trigon.system.installation import install_command

STATIC = Path(__file__).parent / "static"

# Plotly adds rules to style elements that have no text, which a strict policy has to admit. Rules
# are added by script; a style element with any text is still refused.
EMPTY_STYLE_HASH = f"'sha256-{b64encode(sha256(b'').digest()).decode()}'"

_NAME = re.compile(r"images/[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")
_MAX_BYTES = 256 * 2**20

# By the first bytes, whatever the name. SVG, which can contain scripts, is not among them.
_TYPES = (
    ("image/png", re.compile(rb"\x89PNG\r\n\x1a\n")),
    ("image/jpeg", re.compile(rb"\xff\xd8\xff")),
    ("image/gif", re.compile(rb"GIF8[79]a")),
    ("image/webp", re.compile(rb"RIFF....WEBP", flags=re.DOTALL)),
    ("image/bmp", re.compile(rb"BM")),
)


def plotly_script() -> Path:
    """Return the script of the charts, which the package plotly ships. Raises: ConfigError."""
    spec = find_spec("plotly")  # not imported: only its file is needed
    places = spec.submodule_search_locations if spec is not None else None
    if not places:
        raise ConfigError(f"trigon view needs the package plotly: {install_command('view')}")
    return Path(places[0]) / "package_data" / "plotly.min.js"


def source_hash(text: str) -> str:
    """Return the hash of an inline script or style, as a policy names it."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def read_image(run: Path, name: str) -> tuple[bytes, str] | None:
    """Return the content and the media type of an image of a run; None if there is no such image.

    name: as in RolloutRow.image_files. Only regular files directly in the run's folder `images` are
    read, no links, and only if they begin as an image does.
    """
    if not _NAME.fullmatch(name) or (run / "images").is_symlink():
        return None
    try:
        # O_NONBLOCK: opening a named pipe would wait for its writer.
        descriptor = os.open(run / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            return None
        content = file.read()
    media_type = next((name for name, start in _TYPES if start.match(content)), None)
    return None if media_type is None else (content, media_type)


def shrink(content: bytes, media_type: str, *, max_bytes: int, max_side: int) -> tuple[bytes, str]:
    """Return an image with at most max_side pixels a side if it has more bytes than max_bytes.

    An image that cannot be decoded is returned as it is.
    """
    if len(content) <= max_bytes:
        return content, media_type
    try:
        image = image_formats.read_image(content)
    except image_formats.DECODING_ERRORS:
        return content, media_type
    image.thumbnail((max_side, max_side))
    smaller = BytesIO()
    image.save(smaller, "JPEG", quality=85)
    return smaller.getvalue(), "image/jpeg"
