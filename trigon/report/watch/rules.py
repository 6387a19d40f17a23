"""The rules of the watchers: which numbers of a step mean that training fails, and what to do.

Each rule checks one step; an alarm is raised by several steps in a row (watch.py). A value that
is missing or not finite says nothing: it neither counts nor ends a series. Updates whose gradient
is not finite are skipped, which is reported elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Literal, assert_never

from trigon.report.watch.history import History

WatcherName = Literal[
    "loss", "kl", "entropy", "length", "equal_rewards", "reward_failures", "mismatch", "validation", "critic", "memory"
]
"""The options of trainer.watch that are levels."""

LEAST_LOSS = 10.0
"""Loss below which no growth is an explosion: on-policy losses are near 0, where ratios say little.
"""

LEAST_MISMATCH = 0.02
"""Mean difference of log-probabilities below which growth is rounding: twice bfloat16's 0.01."""

VALIDATIONS = 2
"""Validations in a row that have to be far below the best one."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The thresholds of trainer.watch, by the names of the options; see config/schema.py.

    groups_compared: the advantages compare the completions of a group, so that equal rewards give
    no gradient. completions_end: they may end before their limit (not ignore_eos).
    """

    steps: int
    equal_reward_steps: int
    max_loss_growth: float
    max_kl: float
    max_update_kl: float
    min_entropy: float
    max_cut_fraction: float
    min_length_fraction: float
    max_failed_fraction: float
    max_mismatch_growth: float
    max_mismatch_kl: float
    max_validation_drop: float
    min_explained_variance: float
    critic_steps: int
    groups_compared: bool = True
    completions_end: bool = True


Judge = Callable[[Mapping[str, float], History, Thresholds], str | None]
"""Returns what is wrong with the numbers of a step, None if nothing is. Called with finite ones."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One way in which training fails.

    needs: the metrics without which a step says nothing. judge: see Judge. means: what it usually
    means. advice: what to do. lasts: a step without the metrics has those of the step before: where
    no group has an advantage there is no update, and the policy stays as it is. steps: the
    threshold that says in how many steps in a row it has to be so.
    """

    watcher: WatcherName
    name: str
    needs: tuple[str, ...]
    judge: Judge
    means: str
    advice: str
    lasts: bool = False
    steps: Literal["steps", "equal_reward_steps", "critic_steps"] = "steps"

    def num_steps(self, thresholds: Thresholds) -> int:
        """Return the steps in a row in which it has to be so."""
        match self.steps:
            case "steps":
                return thresholds.steps
            case "equal_reward_steps":
                return thresholds.equal_reward_steps
            case "critic_steps":
                return thresholds.critic_steps
            case _:
                assert_never(self.steps)

    def look(self, metrics: Mapping[str, float], history: History, thresholds: Thresholds) -> str | bool:
        """Return what is wrong with a step; False: nothing; True: the step does not say."""
        if self.lasts and all(key not in metrics for key in self.needs):
            metrics = {key: values[-1] for key in self.needs if (values := history.latest.get(key))}
        if not all(isfinite(metrics.get(key, float("nan"))) for key in self.needs):
            return True
        return self.judge(metrics, history, thresholds) or False


def _loss_explodes(metrics: Mapping[str, float], history: History, thresholds: Thresholds) -> str | None:
    loss, level = metrics["actor/pg_loss"], history.level_until_now("actor/pg_loss")
    if level is None or abs(loss) <= max(LEAST_LOSS, thresholds.max_loss_growth * level):
        return None
    return f"actor/pg_loss is {loss:.3g}, and was {level:.3g} before"


def _gradient_explodes(metrics: Mapping[str, float], history: History, thresholds: Thresholds) -> str | None:
    norm, level = metrics["actor/grad_norm"], history.level_until_now("actor/grad_norm")
    if not level or norm <= thresholds.max_loss_growth * level:
        return None
    return f"actor/grad_norm is {norm:.3g}, and was {level:.3g} before"


def _kl_in_loss_explodes(metrics: Mapping[str, float], _: History, thresholds: Thresholds) -> str | None:
    kl = metrics["actor/kl_loss"]
    return f"actor/kl_loss is {kl:.3g} nats" if abs(kl) > thresholds.max_kl else None


def _kl_in_reward_explodes(metrics: Mapping[str, float], _: History, thresholds: Thresholds) -> str | None:
    kl = metrics["actor/kl_penalty"]
    return f"actor/kl_penalty is {kl:.3g} nats" if abs(kl) > thresholds.max_kl else None


def _update_kl_explodes(metrics: Mapping[str, float], _: History, thresholds: Thresholds) -> str | None:
    kl = metrics["actor/ppo_kl"]
    return f"actor/ppo_kl is {kl:.3g} nats" if abs(kl) > thresholds.max_update_kl else None


def _entropy_is_gone(metrics: Mapping[str, float], _: History, thresholds: Thresholds) -> str | None:
    entropy = metrics["actor/entropy"]
    return f"actor/entropy is {entropy:.2g} nats" if entropy < thresholds.min_entropy else None


def _completions_are_cut(metrics: Mapping[str, float], _: History, thresholds: Thresholds) -> str | None:
    cut = metrics["response_length/clip_ratio"]
    if not thresholds.completions_end or cut < thresholds.max_cut_fraction:
        return None
    return f"{cut:.0%} of the completions are cut at data.max_response_length (response_length/clip_ratio)"


def _completions_collapse(metrics: Mapping[str, float], history: History, thresholds: Thresholds) -> str | None:
    length, level = metrics["response_length/mean"], history.level_at_start("response_length/mean")
    if level is None or length >= thresholds.min_length_fraction * level:
        return None
    return f"completions have {length:.3g} tokens on average (response_length/mean), and had {level:.3g} at the start"


def _rewards_are_equal(metrics: Mapping[str, float], _: History, thresholds: Thresholds) -> str | None:
    if metrics["critic/score/max"] == metrics["critic/score/min"]:
        return f"all completions have the reward {metrics['critic/score/max']:.3g}"
    if thresholds.groups_compared and metrics["group/equal_rewards_fraction"] == 1.0:
        return "in every group all completions have the same reward (group/equal_rewards_fraction is 1)"
    return None


def _rewards_fail(metrics: Mapping[str, float], _: History, thresholds: Thresholds) -> str | None:
    failed = metrics["grader/failed_fraction"]
    if failed <= thresholds.max_failed_fraction:
        return None
    return f"{failed:.1%} of the completions could not be scored (grader/failed_fraction)"


def _mismatch_grows(metrics: Mapping[str, float], history: History, thresholds: Thresholds) -> str | None:
    key = "mismatch/logprobs_diff_mean"
    level = history.level_at_start(key)
    if (
        _has_older_weights(metrics)
        or level is None
        or metrics[key] <= max(LEAST_MISMATCH, thresholds.max_mismatch_growth * level)
    ):
        return None
    return f"{key} is {metrics[key]:.3g} nats, and was {level:.3g} at the start"


def _mismatch_is_large(metrics: Mapping[str, float], _: History, thresholds: Thresholds) -> str | None:
    return None if _has_older_weights(metrics) else _large_kl(metrics, thresholds)


def _older_weights_are_far(metrics: Mapping[str, float], _: History, thresholds: Thresholds) -> str | None:
    large = _large_kl(metrics, thresholds)
    if large is None or not _has_older_weights(metrics):
        return None
    return f"{large}, of weights that are up to {metrics['staleness/max']:.0f} steps old"


def _large_kl(metrics: Mapping[str, float], thresholds: Thresholds) -> str | None:
    kl = metrics["mismatch/k3"]
    return f"mismatch/k3 is {kl:.3g} nats" if kl > thresholds.max_mismatch_kl else None


def _has_older_weights(metrics: Mapping[str, float]) -> bool:
    """Return whether the mismatch of a step is also the distance between two versions."""
    return metrics.get("staleness/max", 0.0) > 0


def _critic_knows_nothing(metrics: Mapping[str, float], _: History, thresholds: Thresholds) -> str | None:
    explained = metrics["critic/vf_explained_var"]
    if explained >= thresholds.min_explained_variance:
        return None
    return f"critic/vf_explained_var is {explained:.3g} while the policy learns"


def _value_loss_explodes(metrics: Mapping[str, float], history: History, thresholds: Thresholds) -> str | None:
    loss, level = metrics["critic/vf_loss"], history.level_until_now("critic/vf_loss")
    returns = [history.level_until_now(key) for key in ("critic/returns/max", "critic/returns/min")]
    if level is None or None in returns:
        return None
    # The most that a critic can have whose values are all 0: less of it is no explosion. By the
    # returns of the steps before: with a lambda below 1 those of this step contain its values.
    of_zeros = 0.5 * max(each for each in returns if each is not None) ** 2
    if loss <= max(of_zeros, thresholds.max_loss_growth * level):
        return None
    return f"critic/vf_loss is {loss:.3g}, and was {level:.3g} before"


_KL_MEANS = (
    "The policy writes text that the reference would hardly ever write: the learning rate or the rewards are too "
    "large, or algorithm.kl_coef is too small to hold it."
)
_KL_ADVICE = "Lower worker.actor.optim.lr, or raise algorithm.kl_coef"
_LOSS_MEANS = "An update was too large, or the advantages are: the weights are probably damaged."
_LOSS_ADVICE = "Lower worker.actor.optim.lr or worker.actor.max_grad_norm, and see whether the rewards are bounded"
_MISMATCH_MEANS = (
    "The engine samples from another policy than the one that is trained: rounding that grows with the weights, or a "
    "stale cache."
)
_MISMATCH_ADVICE = (
    "Set algorithm.mismatch_correction=truncate, use the same precision for engine and trainer, or lower "
    "worker.actor.optim.lr"
)

RULES: tuple[Rule, ...] = (
    Rule("loss", "loss", ("actor/pg_loss",), _loss_explodes, _LOSS_MEANS, _LOSS_ADVICE),
    Rule("loss", "gradient", ("actor/grad_norm",), _gradient_explodes, _LOSS_MEANS, _LOSS_ADVICE),
    Rule("kl", "kl_loss", ("actor/kl_loss",), _kl_in_loss_explodes, _KL_MEANS, _KL_ADVICE),
    Rule("kl", "kl_penalty", ("actor/kl_penalty",), _kl_in_reward_explodes, _KL_MEANS, _KL_ADVICE),
    Rule(
        "kl",
        "update",
        ("actor/ppo_kl",),
        _update_kl_explodes,
        "The updates of one step move the policy far from the one that sampled.",
        "Lower worker.actor.optim.lr or worker.actor.ppo_epochs, or raise worker.actor.global_batch_size",
    ),
    Rule(
        "entropy",
        "entropy",
        ("actor/entropy",),
        _entropy_is_gone,
        "The policy samples the same completions again and again, and can find no better ones.",
        "Lower worker.actor.optim.lr, raise worker.actor.entropy_coeff or worker.actor.clip_ratio_high, or add a KL "
        "term (algorithm.disable_kl=false)",
        lasts=True,
    ),
    Rule(
        "length",
        "cut",
        ("response_length/clip_ratio",),
        _completions_are_cut,
        "Completions without an end are seldom right, and the policy may have learned to ramble.",
        "Raise data.max_response_length, or set algorithm.overlong_filtering=true; look at the rollouts first",
    ),
    Rule(
        "length",
        "collapse",
        ("response_length/mean",),
        _completions_collapse,
        "The reward function pays for short or empty completions, or the policy is damaged.",
        "Look at the rollouts, and at what the reward function returns for an empty completion",
    ),
    Rule(
        "equal_rewards",
        "equal_rewards",
        ("critic/score/max", "critic/score/min", "group/equal_rewards_fraction"),
        _rewards_are_equal,
        "Nothing is learned from equal rewards: the task is too hard or too easy for the model, or the reward "
        "function does not see what it expects.",
        "Compare completions and ground truths in the rollouts; use data on which the model is sometimes right, or "
        "raise worker.rollout.n",
        steps="equal_reward_steps",
    ),
    Rule(
        "reward_failures",
        "reward_failures",
        ("grader/failed_fraction",),
        _rewards_fail,
        "These completions are not learned from, which biases what is learned if they have something in common.",
        "The log has the errors of the reward function; see grader/failed and grader/timeout, and "
        "worker.reward.timeout_seconds",
    ),
    Rule(
        "mismatch",
        "growth",
        ("mismatch/logprobs_diff_mean",),
        _mismatch_grows,
        _MISMATCH_MEANS,
        _MISMATCH_ADVICE,
    ),
    Rule("mismatch", "kl", ("mismatch/k3",), _mismatch_is_large, _MISMATCH_MEANS, _MISMATCH_ADVICE),
    Rule(
        "mismatch",
        "older_weights",
        ("mismatch/k3", "staleness/max"),
        _older_weights_are_far,
        "The policy changes too much within so many steps: what it is corrected for is more than a correction can do, "
        "and training may collapse.",
        "Lower worker.actor.optim.lr, algorithm.max_staleness or worker.rollout.max_carried_steps",
    ),
    Rule(
        "critic",
        "explained_variance",
        # There is no actor/lr while the policy rests (trainer.critic_warmup): the critic learns.
        ("critic/vf_explained_var", "actor/lr"),
        _critic_knows_nothing,
        "The errors of the critic's values vary much more than the returns, and make the advantages noisier.",
        "Raise trainer.critic_warmup, worker.critic.optim.lr or worker.critic.ppo_epochs, or set "
        "algorithm.lam_critic=1; with worker.critic.share_trunk=true, which has the actor's ppo_epochs, lower "
        "worker.actor.optim.lr, since the trunk changes under the values",
        steps="critic_steps",
    ),
    Rule(
        "critic",
        "value_loss",
        ("critic/vf_loss", "critic/returns/max", "critic/returns/min"),
        _value_loss_explodes,
        "An update of the critic was too large: its weights are probably damaged, and the advantages are wrong.",
        "Lower worker.critic.optim.lr or worker.critic.max_grad_norm; with worker.critic.share_trunk=true lower "
        "worker.critic.vf_coef too",
    ),
)
"""All rules but that of the validation, which compares with the best so far, and the memory's."""

REMEMBERED = (
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/entropy",
    "response_length/mean",
    "mismatch/logprobs_diff_mean",
    "critic/vf_loss",
    "critic/returns/max",
    "critic/returns/min",
)
"""The metrics whose history the rules read."""
