"""What the reward of a turn does under each estimator: the statements of docs/algorithms.md."""

from __future__ import annotations

import inspect
import re
import statistics
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from trigon.config.names import AdvantageEstimator
from trigon.config.schema import AlgorithmConfig
from trigon.errors import RewardError
from trigon.rewards.verifiers import environment
from trigon.training.fake import FakeTrainEngine
from trigon.training.train_groups import GroupPreparation
from trigon.types import Completion, Prompt, Rollout, RolloutGroup, Score, Turn

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
ESTIMATORS = get_args(AdvantageEstimator)
PROMPT = Prompt("test:0", (5, 6), None, "", None, {}, ())
OBSERVED = 2
"""Tokens that are observed before each turn."""
GAMMA = 0.5
BASELINES = (0.5, 1.0)
EPISODES = [
    # Two groups of two episodes: (sampled tokens, reward) of each turn. Their sums are 1, 0; 2, 1.
    [[(2, 0.75), (1, 0.25)], [(1, 0.0)]],
    [[(1, 2.0), (1, None)], [(2, 1.0)]],
]
S = 0.5**0.5  # the unbiased standard deviation of 0 and 1
# The advantage of each episode, worked by hand. The rewards of the step have mean 1 and the squares
# 0 1 1 0; the centered ones are plus and minus one half.
EXPECTED = {
    "grpo": [[0.5 / S, -0.5 / S], [0.5 / S, -0.5 / S]],
    "dr_grpo": [[0.5, -0.5], [0.5, -0.5]],
    "grpo_batch": [[0.5 / (2 / 3) ** 0.5, -0.5 / (2 / 3) ** 0.5], [0.5 / (2 / 3) ** 0.5, -0.5 / (2 / 3) ** 0.5]],
    "grpo_passk": [[1 / S, 0.0], [1 / S, 0.0]],
    "rloo": [[1.0, -1.0], [1.0, -1.0]],
    "opo": [[0.25, -0.75], [0.5, -0.5]],  # baselines (3 * 1 + 1 * 0) / 4 and (2 * 2 + 2 * 1) / 4
    "reinforce_plus_plus_baseline": [[0.75**0.5, -(0.75**0.5)], [0.75**0.5, -(0.75**0.5)]],
    "remax": [[0.5, -0.5], [1.0, 0.0]],
    "gdpo": [[0.75**0.5, -(0.75**0.5)], [0.75**0.5, -(0.75**0.5)]],  # by reward_weights={overall: 1}
}
# The sums are earned by the last sampled token, and discounted over sampled tokens.
RETURNS = [[[0.25, 0.5, 1.0], [0.0]], [[1.0, 2.0], [0.5, 1.0]]]


@contextmanager
def untimed(name, *, total=None):
    yield lambda count: None


def episode(turns):
    """Return a completion with observed tokens before each turn."""
    made, start = [], 0
    for sampled, reward in turns:
        start += OBSERVED
        made.append(Turn(start, start + sampled, "go", "seen", reward))
        start += sampled
    num_sampled = sum(sampled for sampled, _ in turns)
    return Completion(tuple(range(start)), (-1.0,) * num_sampled, "stop", "go", 0, turns=tuple(made))


def scored(completion):
    """Return the completion with the score of the reward `environment`."""
    if completion.error:
        return Rollout(completion, Score(0.0, {}, "failed", completion.error))
    parts = environment.compute_score({"turns": [{"reward": turn.reward} for turn in completion.turns]})
    return Rollout(completion, Score(parts["overall"], parts, "ok", ""))


def groups_of(episodes):
    return [RolloutGroup(PROMPT, tuple(scored(episode(turns)) for turns in group)) for group in episodes]


def with_baselines(groups):
    """Return the groups with greedy completions that are rewarded as BASELINES says."""
    return [
        replace(group, baseline=Rollout(group.rollouts[0].completion, Score(reward, {}, "ok", "")))
        for group, reward in zip(groups, BASELINES, strict=True)
    ]


def train_groups(groups, estimator, *, weights=None):
    groups = with_baselines(groups) if estimator == "remax" else groups
    preparation = GroupPreparation(
        AlgorithmConfig(disable_kl=True, adv_estimator=estimator, gamma=GAMMA, reward_weights=weights or {}),
        FakeTrainEngine(),
        reference=None,
        critic=None,
        needs_old_logprobs=False,
        phase=untimed,
    )
    return preparation.prepare(groups)[0]


def advantages(episodes, estimator):
    """Return the advantage of each sampled token of each episode."""
    weights = {"overall": 1.0} if estimator == "gdpo" else None
    found = train_groups(groups_of(episodes), estimator, weights=weights)
    return [[sequence.advantages.tolist() for sequence in group.sequences] for group in found]


def expected(estimator):
    if estimator == "reinforce_plus_plus":
        tokens = [value for group in RETURNS for returns in group for value in returns]
        mean, std = statistics.mean(tokens), statistics.stdev(tokens)
        return [[[(value - mean) / std for value in returns] for returns in group] for group in RETURNS]
    lengths = [[sum(sampled for sampled, _ in turns) for turns in group] for group in EPISODES]
    return [
        [[value] * length for value, length in zip(values, row, strict=True)]
        for values, row in zip(EXPECTED[estimator], lengths, strict=True)
    ]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_sum_of_the_turns_counts_for_every_sampled_token_and_for_no_observed_one(estimator):
    found = advantages(EPISODES, estimator)
    for group, wanted in zip(found, expected(estimator), strict=True):
        assert group == [pytest.approx(tokens, rel=1e-4, abs=1e-6) for tokens in wanted]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_it_makes_no_difference_which_turn_earned_a_reward(estimator):
    [[_, second], [_, fourth]] = EPISODES
    moved = [[[(2, 0.0), (1, 1.0)], second], [[(1, None), (1, 2.0)], fourth]]
    assert moved != EPISODES
    assert advantages(moved, estimator) == advantages(EPISODES, estimator)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_failed_episode_has_no_reward_whatever_its_turns_earned(estimator):
    def failed(earned):
        [group, other] = groups_of([EPISODES[0], [EPISODES[1][0], EPISODES[1][1], [(1, earned)]]])
        completion = replace(other.rollouts[2].completion, error="the environment died")
        first = replace(group, rollouts=(*group.rollouts, group.rollouts[1]))
        return [first, replace(other, rollouts=(*other.rollouts[:2], scored(completion)))]

    weights = {"overall": 1.0} if estimator == "gdpo" else None
    found = [train_groups(failed(earned), estimator, weights=weights) for earned in (0.0, 100.0)]
    for groups in found:
        sequence = groups[1].sequences[2]
        assert sequence.advantages.tolist() == [0.0]
        assert sequence.loss_mask.tolist() == [0.0]
    tokens = [[part.advantages.tolist() for group in groups for part in group.sequences] for groups in found]
    assert tokens[0] == tokens[1]


def test_gdpo_stops_a_run_whose_reward_is_the_sum_of_the_turns_alone():
    with pytest.raises(RewardError, match="there is nothing but overall"):
        train_groups(groups_of(EPISODES), "gdpo")


def test_the_page_says_what_a_turn_reward_does_under_each_estimator():
    section = PAGE.read_text(encoding="utf-8").partition("### Rewards of turns")[2].partition("\n## ")[0]
    table = "".join(line.split("|")[1] for line in section.splitlines() if line.startswith("|"))
    assert set(re.findall(r"`(\w+)`", table)) == set(ESTIMATORS)


def test_the_reward_function_of_the_page_discounts_by_turns():
    section = PAGE.read_text(encoding="utf-8").partition("### Rewards of turns")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    namespace: dict = {}
    exec(code, namespace)
    assert list(inspect.signature(namespace["compute_score"]).parameters) == ["reward_input"]
    turns = [{"reward": 1.0}, {"reward": None}, {"reward": 2.0}]
    assert namespace["compute_score"]({"turns": turns}) == {"overall": pytest.approx(1.0 + 2.0 * 0.81)}
