"""What checkpoints hold of sampled groups, of unfinished work and of metrics."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest

from support.fake_runs import SAMPLING
from trigon.errors import BadRow
from trigon.metrics import EffectiveShare, Max, Mean, Min, Sum
from trigon.rollout.protocol import Work
from trigon.rollout.saved import groups_state, load_groups, load_metrics, load_work, metrics_state, work_state
from trigon.types import Completion, EncodedMedia, Prompt, Rollout, RolloutGroup, Score, Turn

FILES = (b"first", b"second")
EPISODE = Completion(
    (1, 2, 9, 3),
    (-0.5, -1 / 3, -1.0),
    "turns",
    "a\nb",
    3,
    turns=(Turn(0, 2, "a", reward=0.1), Turn(3, 4, "b", "<image><image>", None, 2, ((56, 28), (84, 56)))),
    vision=EncodedMedia(FILES, tuple(hashlib.sha256(each).hexdigest() for each in FILES)),
)
FAILED = Completion((1,), (0.0,), "stop", "", 3, error="the environment died")
ENDED = Completion((1,) * 9, (-0.125,) * 9, "stop", "nine", 3, replica=1)
UNFINISHED = Completion((1, 2, 3), (-0.5, -0.25, -1.5), "unfinished", "", 4, policy_versions=((2, 1), (4, 2)))
NOT_BEGUN = Completion((), (), "unfinished", "", 4)


def prompt(number):
    return Prompt(f"train:{number}", (1, 2, 3), None, "?", str(number), {}, ())


class Prompts:
    """A stream that builds prompts by their ids; that of row 9 can no longer be used."""

    def rebuild(self, prompt_id):
        if prompt_id == "train:9":
            raise BadRow("train:9: the file was deleted")
        return prompt(int(prompt_id.removeprefix("train:")))


def as_json(state):
    return json.loads(json.dumps(state))


def contents(work):
    return [(each.prompt.prompt_id, each.prompt.draw, each.completions, each.num_carried) for each in work]


def test_metrics_and_work_are_what_they_were():
    metrics = {"a": Mean(1.0, 3.0), "b": Sum(2.0), "c": Max(0.1), "d": Min(-1.0), "e": EffectiveShare(1.0, 2.0, 3.0)}
    assert load_metrics(as_json(metrics_state(metrics))) == metrics
    work = [
        Work(replace(prompt(1), draw=7), (UNFINISHED, ENDED), 2),
        Work(prompt(2), (NOT_BEGUN, NOT_BEGUN), 1),
        Work(prompt(3), (), 1),
    ]
    sampling = replace(SAMPLING, n=2, max_tokens=9)
    assert contents(load_work(as_json(work_state(work)), Prompts(), sampling, warn=pytest.fail)) == contents(work)


@pytest.mark.parametrize(
    ("number", "size", "max_tokens", "completions", "warning"),
    [
        (1, 2, 4, (ENDED, UNFINISHED), None),  # ended ones may have as many tokens as before
        (1, 2, 3, (), "one has 3 tokens, and data.max_response_length is now 3"),  # no room for one more
        (1, 3, 9, (), "sampled again from the start, because a group now has 3"),
        (9, 2, 9, None, "train:9"),
    ],
)
def test_work_that_a_resumed_run_cannot_use(number, size, max_tokens, completions, warning):
    state, warned = work_state([Work(prompt(number), (ENDED, UNFINISHED), 2)]), []
    found = load_work(state, Prompts(), replace(SAMPLING, n=size, max_tokens=max_tokens), warn=warned.append)
    assert contents(found) == ([] if completions is None else [(f"train:{number}", 0, completions, 2)])
    assert (warning is None) == (warned == [])
    assert warning is None or warning in warned[0]


def test_groups_are_what_they_were_and_those_of_another_form_are_sampled_again():
    scores = Score(0.1, {"overall": 0.1}, "ok", ""), Score(0.0, {}, "failed", "as asked")
    rollouts = tuple(Rollout(each, score) for each, score in zip((EPISODE, FAILED), scores, strict=True))
    group = RolloutGroup(replace(prompt(1), draw=7), rollouts, Rollout(ENDED, scores[0]))
    state = as_json(groups_state([group, group, replace(group, prompt=prompt(9))]))
    for n, with_baseline, is_same in ((2, True, True), (3, True, False), (2, False, False)):
        warned, sampling = [], replace(SAMPLING, n=n, with_baseline=with_baseline)
        loaded, again = load_groups(state, Prompts(), sampling, warn=warned.append)
        assert [each.prompt.draw for each in (loaded if is_same else again)] == [7, 7]
        assert [(each.rollouts, each.baseline) for each in loaded] == [(rollouts, group.baseline)] * 2 * is_same
        assert contents(again) == [("train:1", 7, (), 0)] * 2 * (not is_same)
        assert ("train:9" in warned[0], len(warned)) == (True, 1 if is_same else 2)
        assert all(each.rollouts[0].completion.vision.encoded == FILES for each in loaded)
