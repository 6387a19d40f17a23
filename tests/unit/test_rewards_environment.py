"""The reward `environment`, and the turns that reward functions get."""

import pytest

from trigon.report.rollouts import rollout_rows
from trigon.rewards.contract import turn_input
from trigon.rewards.verifiers.environment import compute_score
from trigon.rollout.collect import _turns
from trigon.tools.eval.score import score
from trigon.types import Completion, Prompt, Rollout, RolloutGroup, Score, Turn


def completion(*turns, num_tokens):
    num_sampled = sum(turn.end - turn.start for turn in turns)
    return Completion((1,) * num_tokens, (0.0,) * num_sampled, "stop", "text", 0, turns=turns)


@pytest.mark.parametrize(
    ("rewards", "expected"), [([], 0.0), ([None], 0.0), ([0.5, None], 0.5), ([0.5, -1.0, 0.25], -0.25)]
)
def test_rewards_of_turns_are_added(rewards, expected):
    turns = [{"observation": "", "text": "left", "reward": reward} for reward in rewards]
    assert compute_score({"turns": turns}) == {"overall": expected}


def test_a_single_turn_without_an_observation_keeps_the_reward_of_the_environment():
    given = completion(Turn(0, 2, "left", reward=1.0), num_tokens=2)
    assert _turns(given) == [turn_input("", "left", 1.0)]
    assert _turns(completion(Turn(0, 2, "left"), num_tokens=2)) == []
    group = RolloutGroup(
        Prompt("train:0", (1,), None, "question", "", {}, ()), (Rollout(given, Score(1.0, {"overall": 1.0}, "ok", "")),)
    )
    [again] = score(rollout_rows([group]), "environment", num_workers=1).completions
    assert again.scores[0].overall == 1.0
