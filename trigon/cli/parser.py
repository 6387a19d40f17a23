"""The argument parser of the commands whose arguments are not options of the configuration."""

from __future__ import annotations

import argparse
from typing import NoReturn

from trigon.terminal import sanitize


class ArgumentParser(argparse.ArgumentParser):
    """Like argparse's. Its errors show control characters, of file names for example, as text."""

    def error(self, message: str) -> NoReturn:
        super().error(sanitize(message, max_characters=5000))
