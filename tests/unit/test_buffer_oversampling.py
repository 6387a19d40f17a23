"""Oversampling: steps that stop early, and completions that go on in the next step."""

from __future__ import annotations

import io
import itertools
import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from support.fake_runs import (
    SAMPLING,
    changed,
    full_settings,
    latest_checkpoint,
    lines_of,
    open_run,
    plan_of,
    prompts_of,
    record_of,
    rollouts_of,
    rows_by_step,
    runs_of,
)
from support.rollout import NO_WEIGHTS
from trigon.distributed.engines import WorkersRolloutEngine, _GenerationProgress
from trigon.distributed.messages import for_sampling, pack, unpack
from trigon.distributed.worker import Heartbeat, Worker, WorkerEngines
from trigon.errors import BadRow, EngineError, RolloutError
from trigon.loop import train
from trigon.metrics import values
from trigon.report.console import Console
from trigon.rollout.episodes import newest_draw
from trigon.rollout.fake import FakeEngine
from trigon.rollout.parity import ended_in_step
from trigon.rollout.protocol import Until, Work
from trigon.rollout.restart import RestartingEngine
from trigon.rollout.saved import completion_state, groups_state, load_completion, load_groups, load_work, work_state
from trigon.rollout.seeds import sample_seed, turn_seed
from trigon.rollout.statistics import describe_carried, describe_staleness
from trigon.system.resuming import SAME_COMMAND
from trigon.types import Completion, Prompt, Rollout, RolloutGroup, Score

LONG = replace(SAMPLING, n=2, max_tokens=40)


def prompt(number):
    return Prompt(f"train:{number}", (1, 2, 3), None, "?", str(number), {}, ())


def engine(tokenizer, complete, *, tokens_per_step=2, token_logprob=-1.0):
    return FakeEngine(
        tokenizer=tokenizer,
        stop_token_id=tokenizer.eos_token_id,
        complete=complete,
        token_logprob=token_logprob,
        tokens_per_step=tokens_per_step,
    )


@pytest.fixture(scope="module")
def letters(tokenizer):
    """Return a function that completes with a number of tokens, each of them one letter."""
    one = next(letter for letter in "xyz0" if len(tokenizer.encode(letter * 9, add_special_tokens=False)) == 9)

    def complete(so_far, version, seed):
        return one * max(0, int(so_far.ground_truth) - (len(so_far.token_ids) - 3))

    return complete


def test_each_token_keeps_its_version_and_its_log_probability(tokenizer, letters):
    first, second = engine(tokenizer, letters), engine(tokenizer, letters, token_logprob=-2.0)
    finished = []
    with first.awake(NO_WEIGHTS, version=3):
        rows = first.generate(
            [prompt(3), prompt(9)], LONG, until=Until(1), on_group=lambda index, _: finished.append(index)
        )
    assert finished == [0]
    assert [each.finish_reason for row in rows for each in row] == ["stop", "stop", "unfinished", "unfinished"]
    begun = rows[1][0]
    assert (len(begun.token_ids), begun.sampling_logprobs, begun.text) == (4, (-1.0,) * 4, "")
    assert begun.version_runs == ((3, 4),)
    with second.awake(NO_WEIGHTS, version=4):
        [row] = second.generate([prompt(9)], LONG, until=Until(1, begun=(tuple(rows[1]),)))
    for completion in row:
        assert completion.token_ids[:4] == begun.token_ids
        assert len(completion.token_ids) == 10
        assert completion.token_ids[-1] == tokenizer.eos_token_id
        assert completion.sampling_logprobs == (-1.0,) * 4 + (-2.0,) * 6
        assert completion.policy_versions == completion.version_runs == ((3, 4), (4, 6))
        assert completion.policy_version == 4
        assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert len(completion.turns) == 1
        assert (completion.turns[0].start, completion.turns[0].end) == (0, 10)


def test_a_completion_goes_on_twice_and_under_the_same_weights_as_one(tokenizer, letters):
    fake, begun = engine(tokenizer, letters), ()
    for version in (0, 0, 1):
        with fake.awake(NO_WEIGHTS, version=version):
            rows = fake.generate([prompt(2), prompt(9)], LONG, until=Until(1, begun=begun))
        begun = ((), tuple(rows[1]))
    assert begun[1][0].version_runs == ((0, 8), (1, 2))
    with fake.awake(NO_WEIGHTS, version=1):
        [whole] = fake.generate([prompt(9)], LONG)
    assert begun[1][0].token_ids == whole[0].token_ids
    assert begun[1][0].finish_reason == "stop"


def test_what_goes_on_has_a_seed_of_its_own(tokenizer):
    seeds = []

    def complete(so_far, version, seed):
        seeds.append(seed)
        return "a b c d e f g h i j"

    fake = engine(tokenizer, complete)
    with fake.awake(NO_WEIGHTS, version=0):
        rows = fake.generate([prompt(0)], LONG, until=Until(1, num_required=1))
        begun = tuple(replace(each, finish_reason="unfinished") for each in rows[0])
        fake.generate([prompt(0)], LONG, until=Until(1, begun=(begun,)))
    first = [sample_seed(LONG.seed, draw=0, prompt_id="train:0", sample=sample) for sample in (0, 1)]
    assert seeds == [*first, *(turn_seed(seed, 0, num_begun=len(begun[0].token_ids)) for seed in first)]
    assert len(set(seeds)) == 4


def test_what_goes_on_has_the_tokens_that_are_left(tokenizer, letters):
    fake = engine(tokenizer, letters)
    limited = replace(LONG, max_tokens=6)
    with fake.awake(NO_WEIGHTS, version=0):
        rows = fake.generate([prompt(1), prompt(30)], limited, until=Until(1))
        [row] = fake.generate([prompt(30)], limited, until=Until(1, begun=(tuple(rows[1]),)))
    assert [len(each.token_ids) for each in [*rows[1], *row]] == [2, 2, 6, 6]
    assert {each.finish_reason for each in row} == {"length"}


def test_completions_that_have_ended_stay_while_others_of_their_group_go_on(tokenizer, letters):
    fake = engine(tokenizer, letters)
    with fake.awake(NO_WEIGHTS, version=0):
        [ended] = fake.generate([prompt(5)], replace(LONG, n=1))
    begun = (ended[0], replace(ended[0], token_ids=(), sampling_logprobs=(), finish_reason="unfinished", turns=()))
    reported = []
    with fake.awake(NO_WEIGHTS, version=1):
        [row] = fake.generate(
            [prompt(5)], LONG, until=Until(1, begun=(begun,)), on_group=lambda *group: reported.append(group)
        )
    assert row[0] == ended[0]
    assert row[1] == replace(ended[0], policy_version=1)
    assert reported == [(0, row)]


def test_required_groups_are_waited_for(tokenizer, letters):
    fake = engine(tokenizer, letters)
    prompts = [prompt(20), prompt(2), prompt(30)]
    with fake.awake(NO_WEIGHTS, version=0):
        rows = fake.generate(prompts, LONG, until=Until(1, num_required=1))
        none = fake.generate(prompts, LONG, until=Until(0))
    assert [row[0].finish_reason for row in rows] == ["stop", "stop", "unfinished"]
    assert [len(each.token_ids) for row in none for each in row] == [0] * 6
    assert {each.finish_reason for row in none for each in row} == {"unfinished"}


def test_a_worker_returns_a_group_that_failed_while_others_of_it_were_sampled(tokenizer, letters, monkeypatch):
    """Prompt 9: its first completion fails, and the second is pending when sampling stops."""
    failing = sample_seed(LONG.seed, draw=0, prompt_id="train:9", sample=0)

    def complete(so_far, version, seed):  # a worker's prompts have no ground truth
        so_far = replace(so_far, ground_truth=so_far.prompt_id.removeprefix("train:"))
        return None if seed == failing else letters(so_far, version, seed)

    fake = engine(tokenizer, complete)
    prompts, until = [prompt(3), prompt(9), prompt(30)], Until(1, begun=((), (), ()))
    monkeypatch.setattr("trigon.distributed.worker.ignore_stop_signals", lambda: None)  # of this process
    worker = Worker(0)
    worker._engines = WorkerEngines(None, None, fake, None, replica_rank=0)
    with fake.awake(NO_WEIGHTS, version=3):
        expected = fake.generate(prompts, LONG, until=until)
        worker.generate(pack((for_sampling(prompts, with_rows=False), until)), LONG, 1)
    assert [[each.finish_reason for each in row] for row in expected] == [["stop"] * 2, [], ["unfinished"] * 2]

    group = SimpleNamespace(receive=lambda message, phase: unpack(message), processed=SimpleNamespace(add=lambda *_: 0))
    finished = []
    progress = _GenerationProgress(
        group, 1, [range(3)], replica_size=1, on_progress=None, on_group=lambda index, _: finished.append(index)
    )
    progress.receive(0, worker.heartbeat(progress.request(0)))
    assert [progress.completions[index] for index in range(3)] == expected
    assert finished == [0, 1]  # once each


def test_the_parts_of_replicas_add_up():
    begun = tuple((Completion((number,), (0.0,), "unfinished", "", 0),) for number in range(3))
    until = Until(5, num_required=2, begun=begun)
    parts = until.of_shares([range(replica, 6, 2) for replica in range(2)])
    assert parts == [Until(3, 1, (begun[0], begun[2])), Until(2, 1, (begun[1],))]
    assert until.of_shares([range(6)]) == [until]


def test_an_engine_that_fails_is_started_anew_and_goes_on_with_the_same_tokens(tokenizer, letters):
    class FailingEngine(FakeEngine):
        calls = 0

        def generate(self, *arguments, **options):
            rows = super().generate(*arguments, **options)
            self.calls += 1
            if self.calls == 2:
                raise RolloutError("vLLM failed")
            return rows

        def restart(self):
            self._version = None

    def sample(make, **options):
        fake = make(
            tokenizer=tokenizer, stop_token_id=tokenizer.eos_token_id, complete=letters, tokens_per_step=2, **options
        )
        restarting = RestartingEngine(fake, warn=warned.append, same_command=SAME_COMMAND)
        with restarting.awake(NO_WEIGHTS, version=0):
            rows = restarting.generate([prompt(3), prompt(30)], LONG, until=Until(1))
            return restarting.generate([prompt(30)], LONG, until=Until(1, begun=(tuple(rows[1]),)))

    warned = []
    expected = sample(type("Restartable", (FakeEngine,), {"restart": FailingEngine.restart}))
    assert warned == []
    assert sample(FailingEngine) == expected
    assert len(warned) == 1


def test_ages_are_weighted_by_tokens():
    def group(*runs):
        count = sum(tokens for _, tokens in runs)
        completion = Completion((1,) * count, (0.0,) * count, "stop", "", runs[-1][0], policy_versions=runs)
        return RolloutGroup(prompt(0), (Rollout(completion, Score(0.0, {}, "ok", "")),))

    # Step 6 samples with version 5: ages 5, 3, 0 and 1 of 1, 2, 3 and 4 tokens.
    metrics = values(describe_staleness([group((0, 1), (2, 2), (5, 3)), group((4, 4))], version=5))
    assert metrics == {
        "staleness/mean": pytest.approx((5 * 1 + 3 * 2 + 1 * 4) / 10),
        "staleness/max": 5.0,
        "staleness/fraction_age_0": pytest.approx(0.3),
        "staleness/fraction_age_1": pytest.approx(0.4),
        "staleness/fraction_age_2": 0.0,
        "staleness/fraction_age_3_or_more": pytest.approx(0.3),
    }
    unfinished = Completion((1, 2), (0.0, 0.0), "unfinished", "", 3)
    carried = [Work(prompt(0), (unfinished, unfinished), 1), Work(prompt(1), (), 2)]
    assert values(describe_carried(carried)) == {
        "rollout/carried_groups": 2.0,
        "rollout/carried_tokens": 4.0,
    }


class Prompts:
    """A stream that builds prompts by their ids; that of row 9 can no longer be used."""

    def rebuild(self, prompt_id):
        if prompt_id == "train:9":
            raise BadRow("train:9: the file was deleted")
        return prompt(int(prompt_id.removeprefix("train:")))


def test_carried_groups_are_in_checkpoints_as_they_are():
    several = Completion((1, 2, 3), (-0.5, -0.25, -1.5), "unfinished", "", 4, policy_versions=((2, 1), (4, 2)))
    none = Completion((), (), "unfinished", "", 4)
    ended = Completion((5,), (-0.125,), "stop", "five", 3)
    groups = [Work(prompt(1), (several, ended), 2), Work(prompt(2), (none, none), 1)]
    groups.append(Work(prompt(3), (), 1))
    state = json.loads(json.dumps(work_state(groups)))
    warned = []
    loaded = load_work(state, Prompts(), num_completions=2, max_tokens=9, warn=warned.append)
    assert [(each.prompt.prompt_id, each.completions, each.num_carried) for each in loaded] == [
        (each.prompt.prompt_id, each.completions, each.num_carried) for each in groups
    ]
    assert warned == []
    surplus = [RolloutGroup(prompt(1), (Rollout(replace(several, finish_reason="stop"), Score(1.0, {}, "ok", "")),))]
    state = json.loads(json.dumps(groups_state(surplus)))
    [again], _ = load_groups(state, Prompts(), n=1, with_baseline=False, warn=warned.append)
    assert again.rollouts == surplus[0].rollouts
    assert load_completion(json.loads(json.dumps(completion_state(several)))) == several


def test_carried_groups_that_a_resumed_run_cannot_use():
    unfinished = Completion((1,), (0.0,), "unfinished", "", 4)
    groups = [Work(prompt(1), (unfinished,) * 2, 2), Work(prompt(9), (unfinished,) * 3, 1)]
    warned = []
    [group] = load_work(work_state(groups), Prompts(), num_completions=3, max_tokens=9, warn=warned.append)
    assert (group.prompt.prompt_id, group.completions, group.num_carried) == ("train:1", (), 2)
    assert len(warned) == 2
    assert "sampled again from the start, because a group now has 3" in warned[0]
    assert "train:9" in warned[1]


def test_carried_completions_that_are_too_long_for_a_resumed_run():
    """Ended ones may have as many tokens as before; unfinished ones need room for one more."""
    unfinished, ended = (
        Completion((1, 2, 3), (0.0,) * 3, "unfinished", "", 4),
        Completion((1,) * 9, (0.0,) * 9, "stop", "", 3),
    )
    state = work_state([Work(prompt(1), (ended, unfinished), 2)])
    warned = []
    [group] = load_work(state, Prompts(), num_completions=2, max_tokens=4, warn=warned.append)
    assert (group.completions, warned) == ((ended, unfinished), [])
    [group] = load_work(state, Prompts(), num_completions=2, max_tokens=3, warn=warned.append)
    assert (group.completions, group.num_carried) == ((), 2)
    assert "one has 3 tokens, and data.max_response_length is now 3" in warned[0]


def test_completions_that_an_earlier_step_ended_are_not_of_this_one():
    """Nor with the same version, as while only a critic learns."""
    ended = Completion((5,), (-0.125,), "stop", "five", 0)
    unfinished = replace(ended, finish_reason="unfinished")
    longer = replace(ended, token_ids=(5, 6), sampling_logprobs=(-1.0, -1.0))

    def group(number, *completions):
        return RolloutGroup(prompt(number), tuple(Rollout(each, Score(0.0, {}, "ok", "")) for each in completions))

    carried = [Work(prompt(1), (ended, unfinished), 1), Work(prompt(2), (), 1)]
    groups = [group(1, ended, longer), group(2, ended, ended), group(3, ended, ended)]
    assert [[each.completion for each in found.rollouts] for found in ended_in_step(groups, carried)] == [
        [longer],
        [ended, ended],
        [ended, ended],
    ]


def test_each_rank_gets_the_carried_tokens_of_its_replica_alone():
    """Two replicas of two ranks; what is begun returns to its replica."""
    begun = tuple(
        (Completion((number,) * 2, (0.0,) * 2, "unfinished", "", 0, replica=replica),)
        for number, replica in enumerate((0, 1, 0))
    )
    prompts, put, calls = [prompt(number) for number in range(3)], [], []

    def call_all(method, *arguments, per_rank, **options):
        calls.append((method, arguments, per_rank))
        if method is Worker.generate:
            return [None] * 4
        rows = [pack(row) for row in begun]
        groups = {0: ((0, rows[0]), (1, rows[2])), 2: ((0, rows[1]),)}
        return [Heartbeat(0, 0, "", 0, groups.get(rank, ())) for rank in range(4)]

    def put_payload(payload, *, phase):
        put.append(payload)
        return payload

    group = SimpleNamespace(
        workers=[None] * 4,
        processed=SimpleNamespace(add=lambda *_: 0),
        put=put_payload,
        receive=lambda message, phase: unpack(message),
        call_all=call_all,
    )
    rollout = WorkersRolloutEngine(group, tensor_parallel_size=2)
    rows = rollout.generate(prompts, replace(LONG, n=1), until=Until(2, num_required=1, begun=begun))
    assert [row[0].token_ids for row in rows] == [(0, 0), (1, 1), (2, 2)]
    _, _, per_rank = calls[0]
    assert len(put) == 2
    received = [(until, [each.prompt_id for each in sent]) for sent, until in map(unpack, per_rank)]
    first = (Until(1, 1, (begun[0], begun[2])), ["train:0", "train:2"])
    assert received == [first, first, *[(Until(1, 0, (begun[1],)), ["train:1"])] * 2]


# -- runs --

SETTINGS = {"oversampling": 0.5, "max_carried_steps": 2}


def long_tailed(so_far, version, seed):
    """Complete some prompts in a few tokens, and others in many more than a step waits for."""
    if int(so_far.ground_truth) % 3 == 0:
        return "no idea " * 12
    return so_far.ground_truth if seed % 2 else "no idea"


def oversampling_settings(steps, **settings):
    changes = full_settings(steps) | {"complete": long_tailed, "tokens_per_step": 3}
    return changes | SETTINGS | settings | {"sampling": replace(SAMPLING, max_tokens=40)}


@pytest.fixture(scope="module")
def uninterrupted(parts, tmp_path_factory):
    """Return the folder of a run of eight steps, and what happened in it."""
    folder = tmp_path_factory.mktemp("oversampling")
    with open_run(parts, folder, **oversampling_settings(8)) as run:
        train(run, None)
        return folder, record_of(run).events


def test_a_step_learns_from_as_many_groups_as_without_and_every_completion_has_ended(uninterrupted):
    folder, events = uninterrupted
    assert {event for event in events if event.startswith("learn")} == {"learn from 2"}  # two updates a step
    assert next(event for event in events if "until" in event) == "sample 6 for 1 until 4"
    for rows in rows_by_step(folder).values():
        assert len(rows) == 4 * SAMPLING.n
        assert {row["finish_reason"] for row in rows} <= {"stop", "length"}
        assert all(sum(count for _, count in runs_of(row)) == row["num_tokens"] for row in rows)
    several = [row for rows in rows_by_step(folder).values() for row in rows if row["policy_versions"]]
    assert several
    assert all(row["policy_version"] == row["policy_versions"][-1][0] for row in several)


def test_no_token_is_older_than_max_carried_steps(uninterrupted):
    folder, _ = uninterrupted
    for step, rows in rows_by_step(folder).items():
        ages = Counter()
        for row in rows:
            for version, count in runs_of(row):
                ages[step - 1 - version] += count
        assert min(ages) >= 0
        assert max(ages) <= SETTINGS["max_carried_steps"]
        line = lines_of(folder)[step]
        assert line["staleness/max"] == max(ages)
        assert line["staleness/mean"] == pytest.approx(sum(a * c for a, c in ages.items()) / ages.total())
        assert line["staleness/fraction_age_0"] == pytest.approx(ages[0] / ages.total())
    assert (
        max(line["staleness/max"] for step, line in lines_of(folder).items() if step) == SETTINGS["max_carried_steps"]
    )
    assert sum(line["rollout/carried_tokens"] for step, line in lines_of(folder).items() if step) > 0


def test_each_prompt_of_an_epoch_is_learned_from_once(parts, tmp_path):
    settings = oversampling_settings(2, oversampling=0.25)
    with open_run(parts, tmp_path, **settings) as run:
        train(run, None)
    learned = [row["prompt_id"] for rows in rows_by_step(tmp_path).values() for row in rows[:: SAMPLING.n]]
    assert len(learned) == len(set(learned)) == 8


def test_the_same_seed_gives_the_same_run(parts, tmp_path, uninterrupted):
    with open_run(parts, tmp_path, **oversampling_settings(8)) as run:
        train(run, None)
    assert lines_of(tmp_path) == lines_of(uninterrupted[0])
    assert rollouts_of(tmp_path) == rollouts_of(uninterrupted[0])


@pytest.mark.parametrize("stop_after", [2, 4])
def test_a_resumed_run_goes_on_with_the_tokens_of_the_saved_one(parts, tmp_path, uninterrupted, stop_after):
    with open_run(parts, tmp_path, **oversampling_settings(8)) as run:
        asked = itertools.count(1)
        train(changed(run, should_stop=lambda: next(asked) == stop_after), None)
    saved = latest_checkpoint(tmp_path)
    assert saved.step == stop_after
    assert saved.progress["buffer"]["work"]
    with open_run(parts, tmp_path, **oversampling_settings(8)) as run:
        train(run, saved)
    assert lines_of(tmp_path) == lines_of(uninterrupted[0])
    assert rollouts_of(tmp_path) == rollouts_of(uninterrupted[0])


def test_a_run_without_oversampling_samples_again_what_was_carried(parts, tmp_path):
    with open_run(parts, tmp_path, **oversampling_settings(8)) as run:
        asked = itertools.count(1)
        train(changed(run, should_stop=lambda: next(asked) == 2), None)
    carried = [each["prompt_id"] for each in latest_checkpoint(tmp_path).progress["buffer"]["work"]]
    settings = full_settings(4) | {"sampling": oversampling_settings(4)["sampling"]}
    stream = io.StringIO()
    with open_run(parts, tmp_path, **settings) as run:
        run.report._console = Console(stream=stream, progress=False)
        train(run, latest_checkpoint(tmp_path))
    assert "that the saved run had sampled ahead are sampled again" in " ".join(stream.getvalue().split())
    rows = [row for step in (3, 4) for row in rows_by_step(tmp_path)[step]]
    assert all(not row["policy_versions"] for row in rows)
    assert set(carried) <= {row["prompt_id"] for row in rows}


def test_groups_kept_from_the_last_step_may_suffice(parts, tmp_path):
    """With as many prompts again, a step in which all end at once leaves a whole batch."""
    settings = oversampling_settings(3, oversampling=1.0)
    settings |= {"complete": lambda so_far, version, seed: so_far.ground_truth, "tokens_per_step": 100}
    with open_run(parts, tmp_path, **settings) as run:
        train(run, None)
        events = [event for event in record_of(run).events if event.startswith(("sample 8", "sample 4"))]
    assert events == ["sample 8 for 1 until 4", "sample 4 for 3"]  # 3 is the last step
    assert [rows[0]["policy_version"] for rows in rows_by_step(tmp_path).values()] == [0, 0, 2]


def test_the_last_steps_leave_nothing(parts, uninterrupted, tmp_path):
    """Each prompt that is drawn is learned from once."""
    folder, _ = uninterrupted
    last = lines_of(folder)[8]
    assert (last["rollout/carried_groups"], last["response_length/max"]) == (0, 40)
    learned = [row["prompt_id"] for rows in rows_by_step(folder).values() for row in rows[:: SAMPLING.n]]
    assert latest_checkpoint(folder).progress["buffer"]["ready"] == []
    # A run that is continued with fewer steps has more groups than it needs. It waits for all.
    with open_run(parts, tmp_path, **oversampling_settings(1)) as run:
        drawn = Counter(each.prompt_id.partition("#")[0] for each in prompts_of(run).take(8 * 4))
        assert Counter(name.partition("#")[0] for name in learned) == drawn
        carried = [Work(prompts_of(run).rebuild(f"train:{number}"), (), 1) for number in range(6)]
        batch, state = batch_of(run, carried, step=1)
    assert [group.prompt for group in batch.groups] == [each.prompt for each in carried[:4]]
    assert (len(state["ready"]), state["work"]) == (2, [])


def batch_of(run, work, *, step):
    """Return the batch of a step that begins with this work, and what the step leaves."""
    buffer = run.buffer
    buffer._unfinished = list(work)
    return buffer.next(step, run.trainer.weights(), version=0), buffer.state(made=True)["buffer"]


def test_tokens_of_a_carried_group_that_failed_are_not_subtracted(parts, tmp_path):
    settings = oversampling_settings(8) | {
        "complete": lambda so_far, v, seed: None if "12" in so_far.text else "no idea",
        "plan": plan_of(steps=8, per_step=1, per_update=1),
    }
    with open_run(parts, tmp_path, **settings) as run:
        failing, other = prompts_of(run).rebuild("train:2"), prompts_of(run).rebuild("train:5")
        begun = Completion((1,) * 30, (0.0,) * 30, "unfinished", "", 0)
        batch, _ = batch_of(run, [Work(each, (begun,) * SAMPLING.n, 1) for each in (failing, other)], step=2)
    [group] = batch.groups
    assert group.prompt.prompt_id == other.prompt_id
    after = sum(rollout.completion.num_sampled for rollout in group.rollouts)
    assert batch.num_sampled_tokens == after - 30 * SAMPLING.n > 0


def test_a_step_with_no_complete_group_is_an_error_of_the_engine(parts, tmp_path):
    class NoneComplete(FakeEngine):
        """The groups of one replica failed, and the others had none to complete."""

        def generate(self, prompts, sampling, **options):
            if newest_draw(prompts) == 0:  # a validation
                return super().generate(prompts, sampling, **options)
            unfinished = [Completion((), (), "unfinished", "", 0)] * sampling.n
            return [[] if index % 2 else unfinished for index in range(len(prompts))]

    fake = NoneComplete(tokenizer=parts.processors.tokenizer, stop_token_id=0, complete=long_tailed)
    with (
        open_run(parts, tmp_path, **oversampling_settings(8), rollout=fake) as run,
        pytest.raises(EngineError, match="completed none of"),
    ):
        train(run, None)
