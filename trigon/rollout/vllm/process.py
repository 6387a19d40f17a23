"""Importing and starting vLLM in this process, which is also the trainer's.

Sets vLLM's environment variables, and restores what starting vLLM changes in its process.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import random
import secrets
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any, assert_never

import numpy as np
import torch
import torch.distributed as dist

from trigon.config.names import DeviceType
from trigon.errors import EngineError
from trigon.rollout.vllm.arguments import ModelRunner
from trigon.system.installation import install_command
from trigon.system.torchvision_stub import declare_operators

_TORCH_LOGS_ERRORS = 2  # c10's number of the level

DEFAULT_LEVEL_ON_GPU = "WARNING"
"""VLLM_LOGGING_LEVEL on a GPU, unless it is set."""

_QUIET_ON_GPU = (
    # Warns at each weight sync of a head that is tied to the embedding, and so receives nothing;
    # weight_check.py compares all parameters.
    "vllm.model_executor.model_loader.reload",
    # Takes the trainer's kernels, which are compiled in the first update, for vLLM's kernels.
    "vllm.utils.jit_monitor",
)
"""Loggers of vLLM whose warnings a user cannot act on; shown with another VLLM_LOGGING_LEVEL."""


def start_llm_engine(
    arguments: Mapping[str, Any],
    *,
    device: DeviceType,
    architectures: Iterable[str],
    model_runner: ModelRunner | None = None,
    store_folder: Path | None = None,
) -> Any:
    """Import vLLM and return a vllm.LLMEngine that runs in this process.

    Args:
        arguments: keyword arguments of vllm.EngineArgs.
        model_runner: vLLM's model runner on a GPU; None: the value of VLLM_USE_V2_MODEL_RUNNER, or
            vLLM's choice.
        architectures: names of the model's classes, from its config.json.
        store_folder: the folder of an engine of one process, see private_store; it is needed as
            long as the engine.
    Raises: EngineError if vLLM cannot be imported, is built for another device, or refuses the
    arguments, for example because the memory for its cache is too small.
    """
    if arguments["tensor_parallel_size"] > 1:
        # vLLM's communicator calls this function of torch at engine steps, too.
        warnings.filterwarnings("ignore", "`torch.distributed.all_gather_into_tensor`", FutureWarning)
    with preserve_process_state(), one_thread(device), warnings.catch_warnings():
        for deprecation in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", deprecation)  # about vLLM's use of torch: users cannot act on them
        choose_model_runner(model_runner, device)
        if device == "cuda" and arguments["dtype"] == torch.float32:
            # Only Triton's attention takes float32, and Triton would multiply it in TF32, which has
            # 10 bits: too few for the parity of a float32 run.
            os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
        vllm = import_vllm(device)
        register_models(vllm, architectures)
        # vLLM collects garbage five times as it starts; frozen objects, all imported modules, are
        # not scanned.
        gc.freeze()
        shares_memory = device == "cpu" and arguments["tensor_parallel_size"] > 1
        try:
            with (
                private_segments() if shares_memory else nullcontext(),
                private_store(store_folder) if store_folder is not None else nullcontext(),
            ):
                llm_engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))
        except ValueError as error:  # vLLM's for arguments, sizes of memory among them
            raise EngineError(
                f"vLLM does not start: {error}\nIts gpu_memory_utilization is worker.rollout.gpu_memory_utilization, "
                "its max_model_len worker.rollout.max_model_len; what frees memory is in docs/distributed.md (Out of "
                "memory)"
            ) from error
        finally:
            gc.unfreeze()
        if device == "cuda":
            quiet_loggers()
        return llm_engine


def stop_llm_engine(llm_engine: Any) -> None:
    """Stop a vllm.LLMEngine that another one replaces, and keep the process groups.

    vLLM's own shutdown destroys all groups of torch.distributed, which the trainer of this rank
    uses too. The next engine takes over vLLM's groups, which need no communication to be found. The
    caller drops its references afterwards, and collects garbage. Not public in 0.32.
    """
    client = llm_engine.engine_core
    client._finalizer.detach()  # would shut down, groups included, when the client is collected
    core = client.engine_core
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()


@contextmanager
def private_store(folder: Path) -> Iterator[None]:
    """Make vLLM create the store of its process group in this folder, not in the temporary folder.

    For an engine of one process, in vLLM 0.32: several ranks have a process group before. Not
    public there: uniproc_executor.get_file_store_init_method.
    """
    from vllm.v1.executor import uniproc_executor

    original = uniproc_executor.get_file_store_init_method
    uniproc_executor.get_file_store_init_method = lambda: f"file://{folder}/store"
    try:
        yield
    finally:
        uniproc_executor.get_file_store_init_method = original


def _quiet_torch() -> None:
    """Let torch's C++ code log errors only, unless TORCH_CPP_LOG_LEVEL is set.

    vLLM's C++ code notes on which NUMA node its memory is, in the middle of a progress bar. Torch
    reads the variable as it is imported, which may be long ago, as in a notebook.
    """
    if os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR") == "ERROR":
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        with suppress(ValueError):  # a torch without this variable: the notes are shown
            ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value = _TORCH_LOGS_ERRORS


def quiet_loggers() -> None:
    """Turn off the warnings of _QUIET_ON_GPU at the default level.

    To be called when vLLM has started: it configures logging then, not when it is imported, which
    resets the levels of all its loggers.
    """
    if os.environ["VLLM_LOGGING_LEVEL"] == DEFAULT_LEVEL_ON_GPU:
        for logger in _QUIET_ON_GPU:
            logging.getLogger(logger).setLevel(logging.ERROR)


def choose_model_runner(model_runner: ModelRunner | None, device: DeviceType) -> None:
    """Set the environment variable by which vLLM chooses its model runner. Not on the CPU."""
    if model_runner is not None and device == "cuda":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = {"v1": "0", "v2": "1"}[model_runner]


def import_ahead(device: DeviceType) -> None:
    """Import the modules that starting an engine imports, which takes seconds.

    Raises: EngineError as starting an engine does.
    """
    with preserve_process_state(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        vllm = import_vllm(device)
        vllm.LLMEngine, vllm.EngineArgs  # noqa: B018  (vllm imports them at the first access)
        # Not public in 0.32: vLLM's platform names the module of its worker, which imports models
        # and executors.
        importlib.import_module({"cpu": "vllm.v1.worker.cpu_worker", "cuda": "vllm.v1.worker.gpu_worker"}[device])


def import_vllm(device: DeviceType) -> Any:
    """Import vLLM, with the environment variables that an engine in this process needs.

    Variables that the user has set are kept, except VLLM_ENABLE_V1_MULTIPROCESSING.
    Raises: EngineError if vLLM cannot be imported, or is built for another device.
    """
    # The engine runs in this process: weight sync passes tensors by reference.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    match device:
        case "cpu":
            _quiet_torch()
            # Without it vLLM pins the trainer's threads to cores as well.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            # Each reload warns about a tied head, which weights.py packs again; each start about
            # LD_PRELOAD.
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
            # Logged before vLLM sets its level: that Triton has no CPU backend.
            logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
        case "cuda":
            os.environ.setdefault("VLLM_LOGGING_LEVEL", DEFAULT_LEVEL_ON_GPU)
            # Else vLLM lets Triton print every measurement, of the trainer's kernels as well.
            os.environ.setdefault("TRITON_PRINT_AUTOTUNING", "0")
            # A worker sees its own GPU only, and these open the memory of the other ranks' GPUs.
            os.environ.setdefault("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")
            os.environ.setdefault("VLLM_ALLREDUCE_USE_FLASHINFER", "0")
            # It needs nvcc, and takes no requests with seeds: all of ours have one.
            os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        case _:
            assert_never(device)
    declare_operators()
    try:
        import vllm
    except ImportError as error:
        raise EngineError(
            f"worker.rollout.name=vllm needs vLLM, which cannot be imported ({error}). Run "
            f"{install_command('gpu' if device == 'cuda' else 'cpu')}, or set worker.rollout.name=transformers."
        ) from error
    from vllm.platforms import current_platform

    if current_platform.device_type != device:
        raise EngineError(
            f"vLLM {vllm.__version__} is built for {current_platform.device_type or 'no device'}, but the rollout "
            f"engine is to run on {device}. Run "
            f"{install_command('gpu' if device == 'cuda' else 'cpu')} in a fresh environment."
        )
    return vllm


def register_models(vllm: Any, architectures: Iterable[str]) -> None:
    """Import the model's classes here, so that vLLM does not start a process to inspect them.

    That process takes about ten seconds. Its purpose is to keep CUDA out of this process, which
    does not apply when the engine runs here. It also imports torchvision before vLLM loads
    plug-ins, and so fails where declare_operators is needed. Not public in 0.32:
    ModelRegistry.models.
    """
    for architecture in architectures:
        registered = vllm.ModelRegistry.models.get(architecture)
        if registered is not None:
            vllm.ModelRegistry.register_model(architecture, registered.load_model_cls())


@contextmanager
def one_thread(device: DeviceType) -> Iterator[None]:
    """On a GPU, compute with one thread on the CPU, as vLLM serves there.

    After an operator its other threads wait in a loop for the next one, which takes time from the
    thread that starts kernels. Functions that vLLM compiles are compiled again if the number of
    threads is another than when it started. The trainer's number is restored on exit.
    """
    num_threads = torch.get_num_threads()
    if device == "cuda":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if device == "cuda":
            torch.set_num_threads(num_threads)


@contextmanager
def preserve_process_state() -> Iterator[None]:
    """Restore on exit what starting vLLM changes in its process.

    vLLM seeds all global random generators, sets torch's number of threads to one, on the CPU
    replaces torch.set_num_threads by a function that does nothing, and adds libraries to
    LD_PRELOAD, which all later child processes would load.
    """
    num_threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    python_state, numpy_state = random.getstate(), np.random.get_state()
    preload = os.environ.get("LD_PRELOAD")
    try:
        # The device in use, not all of a machine, of which torch warns.
        has_context = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if has_context else []):
            yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        os.environ.pop("LD_PRELOAD", None)
        if preload is not None:
            os.environ["LD_PRELOAD"] = preload


FOLDER = Path("/dev/shm")


@contextmanager
def private_segments() -> Iterator[None]:
    """Name the segments that vLLM creates in this context after the run; unlink them on exit.

    Entered by all ranks of torch.distributed's process group together. The names begin with the
    variable TRIGON_SHARED_MEMORY; segments of a run that was killed while it started are removed at
    the next start, by that name (trigon/system/temporary.py). Not public in 0.32:
    _CPUSHMDistributed.make_group_name; in Python: shared_memory._make_filename, by which the
    segments of vLLM's message queues get their names.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    prefix = f"{os.environ['TRIGON_SHARED_MEMORY']}-"

    def group_name(communicator: Any) -> str:
        ranks = "-".join(str(rank) for rank in communicator.ranks)
        return f"{prefix}{communicator.unique_name}-{ranks}-cpushm".replace("/", "_")

    def file_name() -> str:
        return f"/{prefix}{secrets.token_hex(8)}"

    before = mapped_segments()
    names: Any = shared_memory  # its type stub has public names only
    original_group_name, original_file_name = _CPUSHMDistributed.make_group_name, names._make_filename
    _CPUSHMDistributed.make_group_name = staticmethod(group_name)
    names._make_filename = file_name
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(original_group_name)
        names._make_filename = original_file_name
    dist.barrier()  # every rank has mapped what the others created
    for segment in mapped_segments() - before:
        if segment.name.startswith(prefix):
            segment.unlink(missing_ok=True)


def mapped_segments() -> set[Path]:
    """Return the files in /dev/shm that this process has mapped."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    paths = (line.split(maxsplit=5)[-1] for line in lines if f"{FOLDER}/" in line)
    return {Path(path) for path in paths if path.startswith(f"{FOLDER}/") and not path.endswith(" (deleted)")}
