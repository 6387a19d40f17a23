"""The built-in tool `python`: runs code in a new process, with limits and without the network.

The process is no fork: it has neither the row of the episode nor its ground truth in memory, and
its sandbox keeps it from reading those of other processes. See sandbox.py.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trigon.environments.protocol import escape_markers
from trigon.environments.sandbox import MAX_FILE_BYTES, MAX_MEMORY_BYTES
from trigon.rewards.confinement import kernel, tree
from trigon.system.child_python import python_command
from trigon.system.temporary import private_folder

MAX_SECONDS = 10.0
"""Time limit of a call; less if the step may take less."""

MAX_OUTPUT_CHARACTERS = 10_000
"""How much of the output the model gets: the first and the last half."""

_MAIN = "from trigon.environments.sandbox import main; main(sys.argv[1])"
_PATH = "/usr/local/bin:/usr/bin:/bin"


def python(code: str, images: list[Any], timeout_seconds: float) -> str:
    """Run Python code and get what it prints, and the value of its last expression. Each call starts anew. The images of the conversation are in the working folder: image_0.png, image_1.png, ...

    Args:
        code: The code to run
    """  # noqa: E501, W505 - a model reads it: each line break would be one more token
    if not isinstance(code, str):
        raise ValueError("code must be text")
    limit = min(MAX_SECONDS, timeout_seconds)
    with private_folder() as outer, tempfile.TemporaryFile() as output:
        folder = outer / "code"
        folder.mkdir(mode=0o700)
        for number, image in enumerate(images):
            (folder / f"image_{number}.png").write_bytes(_encoded(image))
        with _ending_all():
            process = subprocess.Popen(
                python_command(_MAIN, str(folder)),
                cwd=folder,
                env=_variables(folder),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                process.communicate(code.encode("utf-8", errors="replace"), timeout=limit)
                ending = _describe(process.returncode)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                ending = f"The code took more than {limit:g} s and was ended."
        output.seek(0)
        text = output.read(MAX_FILE_BYTES).decode("utf-8", errors="replace")
    return escape_markers("\n".join(part for part in (_cut(text.rstrip("\n")), ending) if part) or "(no output)")


def _variables(folder: Path) -> dict[str, str]:
    """Return all environment variables of the code: none of this process."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    fixed = {
        "PATH": _PATH,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "MPLBACKEND": "Agg",
    }
    return {**threads, **fixed, "HOME": str(folder), "TMPDIR": str(folder), "MPLCONFIGDIR": str(folder)}


def _encoded(image: Any) -> bytes:
    file = io.BytesIO()
    image.convert("RGB").save(file, "PNG", compress_level=1)
    return file.getvalue()


def _describe(code: int) -> str:
    """Return how the process ended, for the model; "" if its output says all."""
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


@contextlib.contextmanager
def _ending_all() -> Iterator[None]:
    """Kill all processes that were started within, also those that have lost their parent."""
    before = set(tree.descendants(os.getpid()))
    try:
        yield
    finally:
        if kernel.IS_LINUX:
            while left := [pid for pid in tree.descendants(os.getpid()) if pid not in before]:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                for pid in left:
                    with contextlib.suppress(ChildProcessError):  # a child of one of the others
                        os.waitpid(pid, 0)
