"""The built-in tool `python`: runs code that a model wrote, in a sandbox of its own for each call.

The sandbox is made by the code server of this process's supervisor (system/confinement), which
does not know the row of the episode and its ground truth.
"""

from __future__ import annotations

import io
import os
import signal
from typing import Any

from trigon.environments.protocol import escape_markers
from trigon.system.confinement.code_server import CodeResult, run_code
from trigon.system.confinement.sandbox import MAX_FILE_BYTES, MAX_MEMORY_BYTES

MAX_SECONDS = 10.0
"""Time limit of a call; less if the step may take less."""

MAX_OUTPUT_CHARACTERS = 10_000
"""How much of the output the model gets: the first and the last half."""

_TRIAL_SECONDS = 60.0
_server: int | None = None


def connect(server: int | None) -> None:
    """Set the descriptor of the code server for this process and all that are forked from it."""
    global _server
    _server = server


def find_obstacle() -> str:
    """Return why code cannot be run on this system, with a remedy; "" if it can. Tries it."""
    result = _run("import ctypes, math", {}, seconds=_TRIAL_SECONDS)
    if result.ending == "impossible":
        return result.reason
    if result.ending == "exited" and result.status == 0:
        return ""
    output = result.output.decode(errors="replace").strip().rpartition("\n")[2]
    why = output or _describe(result, _TRIAL_SECONDS)
    return f"Python does not start there ({why}); all users must be able to read its files"


def python(code: str, images: list[Any], timeout_seconds: float) -> str:
    """Run Python code and get what it prints, and the value of its last expression. Each call starts anew. The images of the conversation are in the working folder: image_0.png, image_1.png, ...

    Args:
        code: The code to run
    """  # noqa: E501, W505 - a model reads it: each line break would be one more token
    if not isinstance(code, str):
        raise ValueError("code must be text")
    limit = min(MAX_SECONDS, timeout_seconds)
    files = {f"image_{number}.png": _encoded(image) for number, image in enumerate(images)}
    result = _run(code.encode(errors="replace").decode(), files, seconds=limit)
    if result.ending == "impossible":
        raise RuntimeError(result.reason)
    text = result.output.decode("utf-8", errors="replace")
    parts = (_cut(text.rstrip("\n")), _describe(result, limit))
    return escape_markers("\n".join(part for part in parts if part) or "(no output)")


def _run(code: str, files: dict[str, bytes], *, seconds: float) -> CodeResult:
    if _server is None:
        raise RuntimeError("the tool python is used by a process that has no code server")
    return run_code(_server, code, files, seconds=seconds)


def _encoded(image: Any) -> bytes:
    file = io.BytesIO()
    image.convert("RGB").save(file, "PNG", compress_level=1)
    return file.getvalue()


def _describe(result: CodeResult, limit: float) -> str:
    """Return how the code ended, for the model; "" if its output says all."""
    if result.ending == "late":
        return f"The code took more than {limit:g} s and was ended."
    if result.ending == "output":
        return f"The code printed more than {MAX_FILE_BYTES >> 20} MiB and was ended."
    code = os.waitstatus_to_exitcode(result.status)
    if code >= 0:
        return ""
    if -code in (signal.SIGXCPU, signal.SIGKILL):
        return "The code was ended: it used too much time or memory."
    return f"The code was ended by signal {-code} ({signal.strsignal(-code)}); it may use {MAX_MEMORY_BYTES >> 30} GiB."


def _cut(text: str) -> str:
    if len(text) <= MAX_OUTPUT_CHARACTERS:
        return text
    half = MAX_OUTPUT_CHARACTERS // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half:,} characters are left out) ...\n{text[-half:]}"
