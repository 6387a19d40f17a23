"""Group reward functions with real processes: their arguments, and what a failure costs."""

import random

import pytest

from support.rewards import reward_pool as pool_of
from trigon.report.rollouts import rollout_rows
from trigon.rewards.callables import reward_terms
from trigon.rewards.contract import RewardRequest
from trigon.rewards.load import RewardTerm
from trigon.system.user_code import CodeSource
from trigon.tools.eval import score as score_module
from trigon.tools.eval.score import score
from trigon.types import Completion, Prompt, Rollout, RolloutGroup, Score

# Ranks the completions of a prompt by length, and misbehaves if one of them says so.
GROUP = """
import os, time
REWARD_TYPE = "group"

def main(reward_inputs):
    texts = [each["response"] for each in reward_inputs]
    assert len({each["prompt"] for each in reward_inputs}) == 1
    if "raise" in texts:
        raise ValueError("no")
    if "hang" in texts:
        time.sleep(1000)
    if "exit" in texts:
        os._exit(3)
    if "short" in texts:
        return [1.0]
    ranks = [sorted(texts, key=len).index(text) for text in texts]
    return [None if text == "none" else {"overall": rank, "size": len(texts)} for text, rank in zip(texts, ranks)]
"""

ASYNC = (
    GROUP.replace("import os, time", "import asyncio, os, time")
    .replace("def main", "async def main")
    .replace("time.sleep(1000)", "await asyncio.sleep(1000)")
)


def group(prompt, *responses):
    return [RewardRequest(each, len(each), "4", prompt, "stop", {}) for each in responses]


def score_groups(pool, *groups, order=None):
    """Return the scores of groups, which are added in some order."""
    n = len(groups[0])
    with pool.scoring(num_completions=sum(map(len, groups))) as scoring:
        for number in order or range(len(groups)):
            scoring.add(number * n, groups[number])
        return scoring.result()


GROUPS = [group(str(number), "a" * number, "", "a" * 9) for number in range(1, 8)]


@pytest.mark.parametrize("text", [GROUP, ASYNC])
def test_a_function_gets_the_completions_of_a_prompt_together_in_any_order_of_prompts(tmp_path, text):
    with pool_of(tmp_path, text, num_workers=2) as pool:
        scores = score_groups(pool, *GROUPS)
        order = random.Random(0).sample(range(7), 7)
        assert score_groups(pool, *GROUPS, order=order) == scores
        scores += score_groups(pool, group("?", "none", "", "aaaaa"))[1:]  # an entry that is no score costs only itself
    assert [each.overall for each in scores] == [*[1, 0, 2] * 7, 0, 2]
    assert {each.parts["size"] for each in scores} == {3}


@pytest.mark.extended(but=["text0"])
@pytest.mark.faults
@pytest.mark.parametrize("text", [GROUP, ASYNC])
@pytest.mark.parametrize(
    ("fault", "outcome", "error"),
    [
        ("raise", "failed", "ValueError: no (reward.py:"),
        ("short", "failed", "returned a list of 1 for 3 completions"),
        ("hang", "timeout", "no score within 1.2 s; "),
        ("exit", "failed", "its worker exited with code 3"),
    ],
)
def test_a_failure_costs_the_completions_of_its_group(tmp_path, text, fault, outcome, error):
    with pool_of(tmp_path, text, timeout_seconds=0.4) as pool:
        scores = score_groups(pool, GROUPS[0], group("bad", "a", fault, "aa"), *GROUPS[1:3])
    assert [each.outcome for each in scores] == [*["ok"] * 3, *[outcome] * 3, *["ok"] * 6]
    assert all(each.error.startswith(error) for each in scores[3:6])
    assert [each.overall for each in scores] == [1, 0, 2, 0, 0, 0, 1, 0, 2, 1, 0, 2]


def test_a_sum_with_a_group_function_scores_groups(tmp_path):
    def longest(reward_inputs):
        return [len(each["response"]) for each in reward_inputs]

    longest.REWARD_TYPE = "group"

    async def right(response, ground_truth):
        return response == ground_truth

    terms = reward_terms([(longest, 2), (right, 1), ("math", 0)], kwargs={})
    with pool_of(tmp_path, GROUP, reward=terms) as pool:
        scores = score_groups(pool, group("?", "4", "", "aa"))
    assert [each.overall for each in scores] == [3, 0, 4]
    assert [each.parts["right"] for each in scores] == [1, 0, 0]
    source = CodeSource("reward function", "main", file=str(tmp_path / "reward.py"))
    with pool_of(tmp_path, GROUP, reward=[RewardTerm("rank", 1.0, source)]) as pool:
        scores = score_groups(pool, group("?", "4", "", "aa"), group("!", "raise", "", "aa"))
    assert [each.parts for each in scores[:3]] == [{"overall": n, "rank": n, "rank/size": 3} for n in (1, 0, 2)]
    assert {each.outcome for each in scores[3:]} == {"failed"}


def test_stored_rollouts_are_scored_by_group_across_windows(tmp_path, monkeypatch):
    monkeypatch.setattr(score_module, "WINDOW", 4)
    groups = [
        RolloutGroup(
            Prompt(f"train:{number}", (1,), None, str(number), "4", {}, ()),
            tuple(
                Rollout(Completion((1,), (0.0,), "stop", text, 0), Score(0.0, {"overall": 0.0}, "ok", ""))
                for text in ("a", "", "aaa")
            ),
        )
        for number in range(3)
    ]
    (tmp_path / "reward.py").write_text(GROUP)
    result = score(rollout_rows(groups), f"{tmp_path}/reward.py:main", num_workers=1)
    assert [each.scores[0].overall for each in result.completions] == [1, 0, 2] * 3
