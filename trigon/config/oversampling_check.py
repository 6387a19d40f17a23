"""What worker.rollout.oversampling cannot be combined with."""

from __future__ import annotations

from trigon.config.episode_checks import has_episodes
from trigon.config.schema import Config


def check_oversampling(config: Config) -> list[str]:
    """Return why the engine, the data or the estimator cannot be used with oversampling."""
    rollout, algorithm = config.worker.rollout, config.algorithm
    if rollout.oversampling == 0 or config.trainer.val_only:
        return []
    conflicts = (
        (
            rollout.name != "vllm",
            f"worker.rollout.name={rollout.name} samples one prompt after the other; set worker.rollout.name=vllm",
        ),
        (
            has_episodes(config),
            "an environment, or tools, cannot be left and gone on with in a later step; leave them out",
        ),
        (
            algorithm.online_filtering,
            "algorithm.online_filtering samples until enough groups pass, and has rounds of its own; set it to false",
        ),
        (
            algorithm.adv_estimator == "remax",
            "algorithm.adv_estimator=remax compares completions of the same weights; choose another estimator",
        ),
    )
    return [
        f"worker.rollout.oversampling is {rollout.oversampling:g}, but {reason}, or worker.rollout.oversampling=0"
        for applies, reason in conflicts
        if applies
    ]
