"""The environment and the tiny models that all tests share.

One thread, no network, none of the user's settings. Imports nothing heavy, so that tests of pure
Python start at once.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support.ranks import RankProcesses
from trigon.system.process_settings import set_gc_threshold

set_gc_threshold()  # as every process of ours does

# A shell ignores SIGINT in what it starts in the background, nohup ignores SIGHUP, and child
# processes inherit that; tests of signals need them as in a terminal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

_hugging_face_home = tempfile.TemporaryDirectory(prefix="trigon-tests-")  # removed when the process ends

# Before torch, transformers or vLLM are imported, and for the processes that tests start.
os.environ.update(
    {
        "OMP_NUM_THREADS": "1",  # sums come in one order
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",  # it warns after a fork
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": _hugging_face_home.name,  # neither reads nor fills the user's caches
        "PYTHONNOUSERSITE": "1",
        "MPLBACKEND": "Agg",
        "VLLM_NO_USAGE_STATS": "1",
    }
)


CASE_MARKS = ("extended", "long", "vllm", "faults")
"""Marks that may name cases of a parametrized test: extended(but=["small"]) is for all but the case
"small", long(cases=["large"]) for "large" alone. A name is an id in the test's brackets, or the
part of it that one parameter gives."""

# `make test` tries the same few inputs each time, `make test-faults` many others.
settings.register_profile("quick", max_examples=12, derandomize=True, database=None, deadline=None)
settings.register_profile(
    "faults", max_examples=500, print_blob=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without a test that has the marks of -m: importing all takes most of a minute."""
    if collection_path.is_dir() or not collection_path.name.startswith("test_"):
        return None
    words = str(config.option.markexpr).split(" and ")
    if not all(re.fullmatch(r"(not )?\w+", word) for word in words):
        return None
    text = collection_path.read_text(encoding="utf-8")
    for_all = " ".join(re.findall(r"^pytestmark = (\[.*?^\]|.*?$)", text, flags=re.MULTILINE | re.DOTALL))
    missing = any(not word.startswith("not ") and f"mark.{word}" not in text for word in words)
    excluded = any(word.startswith("not ") and f"mark.{word[4:]}" in for_all for word in words)
    return True if missing or excluded else None


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Apply marks that name cases to these cases only; skip tests of vLLM where there is none.

    Raises: pytest.UsageError if a mark names a case that does not exist, or no target runs a test.
    """
    has_vllm = find_spec("vllm") is not None
    found: dict[tuple[str, str, str], bool] = {}
    for item in items:
        for mark in [mark for mark in item.own_markers if mark.name in CASE_MARKS and mark.kwargs]:
            (way, cases) = next(iter(mark.kwargs.items()))
            names = [case for case in cases if f"-{case}-" in f"-{item.name.partition('[')[2][:-1]}-"]
            function = item.nodeid.partition("[")[0]
            for case in cases:
                found[function, mark.name, case] = found.get((function, mark.name, case), False) or case in names
            if (way == "cases") != bool(names):
                item.own_markers.remove(mark)
        if item.get_closest_marker("vllm") and not has_vllm:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))
        if item.get_closest_marker("alone") and not (
            item.get_closest_marker("extended") or item.get_closest_marker("long")
        ):
            raise pytest.UsageError(f"{item.nodeid}: `make test` runs no test alone; mark it extended or long")
    unknown = [f"{function}: {name}: {case!r}" for (function, name, case), exists in found.items() if not exists]
    if unknown and config.args == list(config.getini("testpaths")):
        raise pytest.UsageError("marks name cases that do not exist: " + "; ".join(unknown))


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    """Repeatable kernels in every test that has torch; seeds are each test's own."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)


@pytest.fixture(autouse=True)
def _stop_signals_as_before() -> Iterator[None]:
    """Fail a test that leaves a stop signal ignored, blocked or handled in this process.

    The processes that later tests start would inherit it, and not end when they are told to.
    """
    before = _stop_signals()
    yield
    assert _stop_signals() == before, "(signal, handler, ignored, blocked) differ from those before the test"


def _stop_signals() -> list[tuple[str, object, bool, bool]]:
    """Return each stop signal with its handler, and whether this thread ignores and blocks it.

    An ignored signal also as a C library has it, which Python does not know: Linux only.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    ignored = 0
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
    return [
        (number.name, signal.getsignal(number), bool(ignored >> (number - 1) & 1), number in blocked)
        for number in numbers
    ]


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    """Processes that run functions as ranks."""
    with RankProcesses(tmp_path_factory.mktemp("ranks")) as processes:
        yield processes


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes a tiny model's folder, once per kind of model.

    Called as tiny_model("qwen2_5_vl", seed=0, tie_word_embeddings=False); the types are those of
    trigon.tools.quickstart.model. The folder is shared: tests must not write into it.
    """
    made: dict[tuple[str, int, bool], Path] = {}

    def make(model_type: str = "qwen2_5_vl", *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
        from trigon.models.families import family_named
        from trigon.tools.quickstart.model import make_tiny

        for package in family_named(model_type).engine_packages:
            pytest.importorskip(package)  # its processor needs it
        key = (model_type, seed, tie_word_embeddings)
        if key not in made:
            folder = tmp_path_factory.mktemp(f"tiny-{model_type}", numbered=True)
            made[key] = make_tiny(folder, model_type=model_type, seed=seed, tie_word_embeddings=tie_word_embeddings)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_vlm(tiny_model: Callable[..., Path]) -> Path:
    """Return the folder of a tiny Qwen2.5-VL, the embedded default. Do not write into it."""
    return tiny_model("qwen2_5_vl")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a barely trained model, its data and a reward, for whole runs."""
    from support.runs import make_tiny

    return make_tiny(tmp_path_factory.mktemp("made"))
