"""What is asked of the confinement of a process with user code, and what a system lacks for it.

Levels of worker.reward.confinement:

    default  no access to other processes: their memory, environment, signals, names
    strict   also no network, no writing outside a private temporary folder, and reading only what
             Python needs, the folder of the reward function, `readable` and `writable`
    off      limits, and the end of all processes that the worker started, only
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from trigon.errors import TrigonError

ConfinementLevel = Literal["default", "strict", "off"]

Mechanism = Literal["namespaces", "user namespace", "fewer capabilities", "landlock", "signal scope", "seccomp", "proc"]
"""namespaces: of processes, mounts and System V IPC, with a /proc of their own.
user namespace: the others were made in one. fewer capabilities: than those that root has.
landlock: a domain of its own. signal scope: that domain covers signals, too.
proc: /proc can be read, and the supervisor becomes the parent of processes that lose their own.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """How a reward worker is confined.

    network: whether it may open network connections; None: unless level is "strict".
    readable: files and folders that "strict" can read besides those that Python needs.
    writable: files and folders that "strict" can also write.
    max_memory_bytes: most resident memory, and max_processes: most processes, of a worker and all
    that it started.
    runs_code: whether the worker may have code run that a model wrote; see code_server.py.
    without: mechanisms that are not used, as on a system that lacks them, for tests.
    """

    level: ConfinementLevel = "default"
    network: bool | None = None
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    max_memory_bytes: int = 16 << 30
    max_processes: int = 1024
    runs_code: bool = False
    without: tuple[Mechanism, ...] = ()

    @property
    def allows_network(self) -> bool:
        """Whether network connections are allowed."""
        return self.level != "strict" if self.network is None else self.network

    @property
    def code_memory_bytes(self) -> int:
        """The part of max_memory_bytes for code that a model wrote: half of it, or nothing."""
        return self.max_memory_bytes // 2 if self.runs_code else 0

    @property
    def worker_memory_bytes(self) -> int:
        """The part of max_memory_bytes for the worker and what it started itself."""
        return self.max_memory_bytes - self.code_memory_bytes

    def with_readable(self, folders: Iterable[str]) -> Confinement:
        """Return it with more folders that "strict" can read."""
        return replace(self, readable=(*self.readable, *folders))

    def to_json(self) -> str:
        """Return it as text, for the command of the supervisor."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Confinement:
        """Return what to_json was called on."""
        fields: dict[str, Any] = json.loads(text)
        lists: dict[str, Any] = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return cls(**fields | lists)


DEFAULT = Confinement()


def check_confinement(
    confinement: Confinement, used: Sequence[Mechanism], obstacle: str, *, confined: str, error: type[TrigonError]
) -> str:
    """Return one line that says what is not confined on this system; "" if all is as documented.

    used: the mechanisms that a worker could use. obstacle: why it has no namespaces. confined: what
    runs in the worker. error: the type of errors.
    Raises: such an error if the level is "strict" and the system lacks what it needs.
    """
    needs = (
        ("landlock", "Landlock (Linux 5.13 or later, with landlock in its list of security modules, lsm=)"),
        ("seccomp", "seccomp (Linux on x86-64 or ARM64)"),
        ("proc", "Linux with /proc"),
    )
    missing = [text for mechanism, text in needs if mechanism not in used]
    if confinement.level == "strict" and missing:
        raise error(
            f"worker.reward.confinement=strict needs {' and '.join(missing)}, which this system does not have; use "
            "worker.reward.confinement=default, if the reward function is trusted with what docs/rewards.md lists"
        )
    if not confinement.allows_network and "seccomp" not in used:
        raise error(
            "worker.reward.network=false needs seccomp (Linux on x86-64 or ARM64), which this system does not have; "
            "leave it out, and block the network from outside"
        )
    can = _lacking(confinement, set(used))
    if not can:
        return ""
    because = "; ".join(
        text
        for text in (
            obstacle,
            "" if "landlock" in used else "no Landlock",
            "" if "signal scope" in used or "landlock" not in used else "Landlock before version 6",
            "" if "seccomp" in used else "no seccomp",
        )
        if text
    )
    return f"{confined} are not fully confined here: they can {', '.join(can)} ({because}; see docs/rewards.md)"


def _lacking(confinement: Confinement, used: set[Mechanism]) -> list[str]:
    """Return what the code of a worker can do on this system although its level forbids it."""
    can: list[str] = []
    if confinement.level != "off":
        if not {"namespaces", "fewer capabilities", "landlock"} & used:
            can.append("read the environment and the memory of this user's processes")
        if not {"namespaces", "signal scope"} & used:
            can.append("send signals to this user's processes, also to the one that ends what they leave behind")
        if not {"namespaces", "seccomp"} & used:
            can.append("change the limits and priorities of this user's processes")
        if "namespaces" not in used:
            can.append("see the command lines of all processes")
        if "seccomp" not in used:
            can.append("make system calls that they do not need")
    if "proc" not in used:
        can.append("leave processes behind, and exceed the limits for all of their processes together")
    return can
