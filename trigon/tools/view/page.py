"""The files of the page, and how they become one file for `--export`."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from trigon.errors import ConfigError
from trigon.system.installation import install_command

STATIC = Path(__file__).parent / "static"

# Plotly adds rules to style elements that have no text, which a strict policy has to admit. Rules
# are added by script; a style element with any text is still refused.
EMPTY_STYLE_HASH = f"'sha256-{b64encode(sha256(b'').digest()).decode()}'"

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w]+\.js)";\n', flags=re.MULTILINE)
_EXPORT = re.compile(r"^export (?=function|async function|const|class)", flags=re.MULTILINE)


def plotly_script() -> Path:
    """Return the script of the charts, which the package plotly ships. Raises: ConfigError."""
    spec = find_spec("plotly")  # not imported: only its file is needed
    places = spec.submodule_search_locations if spec is not None else None
    if not places:
        raise ConfigError(f"trigon view needs the package plotly: {install_command('view')}")
    return Path(places[0]) / "package_data" / "plotly.min.js"


def as_one_script() -> str:
    """Return the modules of the page as one, in an order in which each follows what it imports.

    The modules use one form of import and export, and no two have the same names at top level.
    """
    done: dict[str, str] = {}

    def add(name: str) -> None:
        text = (STATIC / name).read_text(encoding="utf-8")
        for other in _IMPORT.findall(text):
            if other not in done:
                add(other)
        done[name] = _EXPORT.sub("", _IMPORT.sub("", text))

    add("main.js")
    return "\n".join(done.values())


def source_hash(text: str) -> str:
    """Return the hash of an inline script or style, as a policy names it."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
