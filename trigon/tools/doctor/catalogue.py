"""All checks, in the order in which they run.

The modules of checks import heavy libraries when a check is called, not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from trigon.errors import ConfigError
from trigon.system.suggestions import did_you_mean
from trigon.tools.doctor.benchmark import check_benchmark
from trigon.tools.doctor.engines import OTHER_VARIANTS, VARIANTS, EngineVariant, check_text_after_sleep, check_variant
from trigon.tools.doctor.environment import check_environment
from trigon.tools.doctor.kernels import check_kernels, check_logprobs
from trigon.tools.doctor.runner import Check
from trigon.tools.doctor.training import check_optimizer_memory, check_update
from trigon.tools.doctor.training_runs import check_float32, check_quickstart, check_two_workers


def _of_variant(variant: EngineVariant) -> Check:
    how = (
        f"{variant.runner.upper()} runner",
        f"{'asynchronous' if variant.async_scheduling else 'synchronous'} scheduling",
        "CUDA graphs" if variant.graphs else "eager",
    )
    title = f"vLLM's log-probabilities are the trainer's, also after sleep and new weights ({', '.join(how)})"
    # The first of those with graphs compiles a model of 36 layers.
    return Check(variant.name, title, partial(check_variant, variant=variant), 300 if variant.graphs else 180)


ENVIRONMENT = Check("environment", "versions, GPUs, memory and disk, and whether they fit", check_environment, 90)

CHECKS = (
    ENVIRONMENT,
    # Early, since they show most of what several GPUs can lack; with one GPU they are skipped.
    *(
        Check(
            name,
            f"two Ray workers: {what}",
            partial(check_two_workers, shards=shards, tensor_parallel_size=tensor_parallel_size),
            240,
        )
        for name, what, shards, tensor_parallel_size in (
            ("fsdp2", "the trainer's weights sharded, two vLLMs", 2, 1),
            ("tp2", "a trainer's copy each, one vLLM by tensor parallelism", 1, 2),
            ("fsdp2-tp2", "the trainer's weights sharded, one vLLM by tensor parallelism", 2, 2),
        )
    ),
    Check("kernels", "attention kernels against float64, forward and gradient", check_kernels, 120),
    Check("logprobs", "log-probabilities and entropies against float64, forward and gradient", check_logprobs, 60),
    Check("optimizer-memory", "the optimizers' measured memory is what is computed", check_optimizer_memory, 60),
    Check("update", "the host does not wait for the GPU in each micro-batch of an update", check_update, 120),
    *map(_of_variant, VARIANTS),
    Check(
        "qwen3-vl-text", "Qwen3-VL's log-probabilities of text are the same after a sleep", check_text_after_sleep, 120
    ),
    Check("quickstart", "the quickstart's reward rises, in bfloat16", check_quickstart, 240),
    Check("float32", "three steps of the quickstart in float32", check_float32, 180),
    Check("benchmark", "benchmarks/gpu.py: speed of forward and backward, few variants", check_benchmark, 180),
    *map(_of_variant, OTHER_VARIANTS),
)


def choose(names: Sequence[str]) -> list[Check]:
    """Return the checks of these names, in the order of all; all of them if there is no name.

    Raises: ConfigError for an unknown name.
    """
    known = {check.name: check for check in CHECKS}
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no check {name!r}{did_you_mean(name, known)} Known: {', '.join(known)}")
    return [check for check in CHECKS if not names or check.name in names]
