"""What a plan says of separate pools: the workers that learn, and those that sample."""

from __future__ import annotations

from trigon.config.schema import Config
from trigon.tools.plan.hardware import Cluster
from trigon.tools.plan.result import PoolPlan
from trigon.tools.plan.timing import StepTime


def describe_devices(config: Config, cluster: Cluster) -> str:
    """Return the devices of a run for people. cluster: those of the workers that learn."""
    if config.worker.hybrid_engine:
        return str(cluster)
    return f"{cluster} (learners) and {_sampling_cluster(config, cluster)} (samplers)"


def plan_pools(config: Config, cluster: Cluster, time: StepTime | None) -> tuple[PoolPlan, ...]:
    """Return the pools of a run; none if all workers learn and sample.

    time: of a step; None if it is not known.
    """
    if config.worker.hybrid_engine:
        return ()
    samplers = config.num_samplers

    def share(working: float) -> tuple[float, float]:
        assert time is not None
        busy = time.phases["weights"] + working
        return busy, 1 - busy / time.total

    learning, sampling = ((None, None), (None, None)) if time is None else (share(time.learning), share(time.sampling))
    return (
        PoolPlan("learners", str(cluster), config.num_workers, 0, *learning),
        PoolPlan(
            "samplers",
            str(_sampling_cluster(config, cluster)),
            samplers,
            samplers // config.worker.rollout.tensor_parallel_size,
            *sampling,
        ),
    )


def _sampling_cluster(config: Config, cluster: Cluster) -> Cluster:
    rollout = config.worker.rollout
    return Cluster(rollout.nnodes, rollout.n_gpus_per_node, cluster.accelerator, cluster.network_rate)
