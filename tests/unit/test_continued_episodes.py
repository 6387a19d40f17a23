"""Episodes that a call of the engine leaves unfinished, and that the next one continues."""

from __future__ import annotations

import json
from contextlib import ExitStack
from copy import copy
from dataclasses import replace

import pytest

from support.episodes import Answer, LocalEnvironments, Observed, drawing, make_settings
from support.models import processors_of
from support.rollout import NO_WEIGHTS
from trigon.distributed.cluster import WorkerHandle
from trigon.distributed.messages import pack, unpack
from trigon.distributed.rollout_engine import LearnerReplicas, WorkersRolloutEngine
from trigon.distributed.worker import Worker, WorkerEngines
from trigon.distributed.worker_group import Call, WorkerGroup
from trigon.metrics import values
from trigon.rollout.fake import FakeEngine
from trigon.rollout.protocol import Interruption, Until
from trigon.rollout.saved import completion_state, load_completion
from trigon.types import Prompt, SamplingParams

SAMPLING = SamplingParams(n=2, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=300, ignore_eos=False, seed=7)
NUM_LETTERS = 5  # of a turn, each of them one token
BEGUN_AGAIN = "rollout/episodes_begun_again"


@pytest.fixture(scope="module")
def processors(tiny_vlm):
    return processors_of(tiny_vlm)


@pytest.fixture(scope="module")
def letter(processors):
    encode = processors.tokenizer.encode
    return next(each for each in "xyz0" if len(encode(each * 9, add_special_tokens=False)) == 9)


@pytest.fixture
def complete(processors, letter):
    """Complete each turn to NUM_LETTERS letters, or more of some prompts, however it was begun."""
    [token] = processors.tokenizer.encode(letter, add_special_tokens=False)

    def complete(so_far, version, seed):
        begun = 0
        while so_far.token_ids[-1 - begun] == token:
            begun += 1
        return letter * (NUM_LETTERS + 2 * so_far.row["number"] - begun)

    return complete


def prompt(number=0, **row):
    return Prompt(f"train:{number}", (1, 2, 3), None, "Play.", "", {"number": number, **row}, ())


PROMPTS = [prompt(0), prompt(1), prompt(2)]


def answer(row, actions):
    """Observe a text at every turn; the number of turns differs by prompt."""
    return Answer(0, Observed(f"So far {len(actions)}."), 0.5, len(actions) == 1 + row["number"])


def show(row, actions):
    """Show an image at every turn, too. How many passes it takes to process it is not known."""
    image = drawing(31 * row["number"] + len(actions))
    return replace(answer(row, actions), observation=Observed(f"So far {len(actions)}.", (image,)))


def engine(processors, environments, complete, *, tokens_per_step=1, turn_by_turn=True, **changes):
    return FakeEngine(
        tokenizer=processors.tokenizer,
        stop_token_id=processors.tokenizer.eos_token_id,
        complete=complete,
        tokens_per_step=tokens_per_step,
        turn_by_turn=turn_by_turn,
        episodes=make_settings(environments, processors, **changes),
    )


def generate(fake, prompts=PROMPTS, sampling=SAMPLING, *, version=3, **options):
    with fake.awake(NO_WEIGHTS, version=version):
        return fake.generate(prompts, sampling, **options)


def interrupted(fake, kind, *, after, prompts=PROMPTS, begun=(), when=None, **options):
    """Return the rows of a call that is interrupted after this many reports of progress.

    when: returns whether it is interrupted; in place of after.
    """
    interruption, passes = Interruption(), []

    def on_progress(_):
        passes.append(1)
        if len(passes) == after or (when is not None and when()):
            interruption.ask(kind)

    until = Until(len(prompts), begun=begun, interruption=interruption)
    return generate(fake, prompts, until=until, on_progress=on_progress, **options)


def begun_of(rows):
    return tuple(map(tuple, rows))


def is_unfinished(rows):
    return any(each.is_unfinished for row in rows for each in row)


def assert_begins(completion, whole):
    """Check that an unfinished completion is the beginning of what comes of it."""
    num_tokens, num_sampled = len(completion.token_ids), completion.num_sampled
    assert completion.token_ids == whole.token_ids[:num_tokens]
    assert completion.sampling_logprobs == whole.sampling_logprobs[:num_sampled]
    assert sum(count for _, count in completion.version_runs) == num_sampled
    if not num_tokens:
        return
    *ended, last = completion.turns
    assert tuple(ended) == whole.turns[: len(ended)]
    assert last.end == num_tokens
    assert replace(last, end=0, text="", reward=None) == replace(whole.turns[len(ended)], end=0, text="", reward=None)
    assert completion.text == "\n".join(turn.text for turn in completion.turns)
    num_images = sum(turn.num_images for turn in completion.turns)
    assert completion.vision.encoded == whole.vision.encoded[:num_images]


@pytest.mark.extended(but=["4-4-False"])
@pytest.mark.parametrize("turn_by_turn", [True, False])
@pytest.mark.parametrize("delay", [0, 4])
@pytest.mark.parametrize("after", [1, 4, 7, 29])
def test_episodes_that_are_stopped_again_and_again_are_those_of_one_call(
    processors, complete, turn_by_turn, delay, after
):
    environments = LocalEnvironments(show, lambda row, number: delay)
    fake = engine(processors, environments, complete, turn_by_turn=turn_by_turn)
    expected = generate(engine(processors, LocalEnvironments(show), complete))
    history = [interrupted(fake, "stop", after=after)]
    while is_unfinished(history[-1]):
        assert len(environments.running) <= 6
        history.append(interrupted(fake, "stop", after=after + 2, begun=begun_of(history[-1])))
        assert len(history) < 100
    assert history[-1] == expected
    assert unpack(pack(history[0])) == history[0]
    for rows in history:
        for row, whole in zip(rows, expected, strict=True):
            for completion, its_whole in zip(row, whole, strict=True):
                assert completion == its_whole or completion.is_unfinished
                if completion.is_unfinished:
                    assert_begins(completion, its_whole)
    assert environments.num_started == 6
    assert environments.running == {}
    assert values(fake.pop_metrics())[BEGUN_AGAIN] == 0


def test_each_token_has_the_version_that_sampled_it(processors, complete):
    fake = engine(processors, LocalEnvironments(answer, lambda row, number: 2), complete)
    rows, version = interrupted(fake, "stop", after=4, version=0), 0
    while is_unfinished(rows):
        version += 1
        before, rows = rows, interrupted(fake, "stop", after=5, version=version, begun=begun_of(rows))
        for old, new in zip([c for row in before for c in row], [c for row in rows for c in row], strict=True):
            old_versions = [run for run, count in old.version_runs for _ in range(count)]
            new_versions = [run for run, count in new.version_runs for _ in range(count)]
            assert new_versions == old_versions + [version] * (new.num_sampled - old.num_sampled)
            assert new.policy_version == (new_versions[-1] if new_versions else version)
            assert len(new.sampling_logprobs) == new.num_sampled
    assert version > 4
    whole = generate(engine(processors, LocalEnvironments(answer), complete))
    assert [[c.token_ids for c in row] for row in rows] == [[c.token_ids for c in row] for row in whole]


@pytest.mark.parametrize("turn_by_turn", [True, False])
def test_an_environment_answers_while_another_call_samples(processors, complete, turn_by_turn):
    environments = LocalEnvironments(answer)
    fake = engine(processors, environments, complete, turn_by_turn=turn_by_turn)
    expected = generate(engine(processors, LocalEnvironments(answer), complete))
    environments.delay = lambda row, number: 1000 * (number == 1)  # to the first turn
    begun = interrupted(fake, "stop", after=0, when=lambda: len(environments.owing) == 6)
    assert all(len(each.turns) == 1 and each.turns[0].reward is None for row in begun for each in row)
    waiting = set(environments.running)
    environments.delay = None
    environments.answer_all()
    # A validation, with a prompt of the same name: it receives the answers, and keeps them.
    validated = generate(fake, [PROMPTS[1]])
    assert validated == [expected[1]]
    assert set(environments.running) == waiting
    assert generate(fake, until=Until(3, begun=begun_of(begun))) == expected
    assert environments.num_started == 6 + 2
    assert environments.running == {}


CALL = '<tool_call>{"name": "crop", "arguments": {}}</tool_call>'


def test_versions_of_tokens_that_are_dropped_after_a_call_are_dropped(processors):
    """The turn is interrupted after its call, in what the model invents."""

    def complete(so_far, version, seed):
        return f"{CALL} and so on" + " and on" * 40 if version == 3 else " and on" * 10

    def answer_once(row, done):
        return Answer(0, Observed("4") if len(done) == 1 else None, done=len(done) == 2)

    fake = engine(
        processors,
        LocalEnvironments(answer_once),
        complete,
        tokens_per_step=4,
        opens=False,
        tool_format="hermes",
        max_turn_tokens=400,
    )
    sampling = replace(SAMPLING, n=1, max_tokens=1000)

    num_tokens = len(processors.tokenizer.encode(f"{CALL} and", add_special_tokens=False))
    [[begun]] = interrupted(fake, "stop", after=num_tokens // 4 + 4, prompts=PROMPTS[:1], sampling=sampling, version=3)
    assert len(begun.token_ids) > num_tokens
    [[completion]] = generate(fake, PROMPTS[:1], sampling, version=4, until=Until(1, begun=((begun,),)))
    first, second = completion.turns
    assert first.end < len(begun.token_ids)
    assert completion.version_runs == ((3, first.end), (4, second.end - second.start))
    assert len(completion.sampling_logprobs) == completion.num_sampled


@pytest.mark.faults
def test_what_the_next_call_does_not_continue_is_stopped(processors, complete):
    environments = LocalEnvironments(answer)
    fake = engine(processors, environments, complete)
    rows = interrupted(fake, "stop", after=4)
    assert len(environments.running) == 6
    again = generate(fake, PROMPTS[1:2], until=Until(0, begun=begun_of(rows[1:2])))
    assert again == rows[1:2]
    assert len(environments.running) == 2
    generate(fake, [prompt(7)])  # no until: a validation, which stops none
    assert len(environments.running) == 2
    # A group that begins again has nothing to do with the one before.
    generate(fake, PROMPTS[1:2], until=Until(1))
    assert environments.running == {}
    assert values(fake.pop_metrics())[BEGUN_AGAIN] == 0
    interrupted(fake, "stop", after=4)
    fake.close()
    assert environments.running == {}


def test_limits_of_a_turn_and_of_episodes_at_a_time_hold_over_several_calls(processors, complete):
    expected = generate(engine(processors, LocalEnvironments(answer), complete, max_turn_tokens=8))
    assert {each.finish_reason for each in expected[2]} == {"length"}
    environments = LocalEnvironments(answer)
    fake = engine(processors, environments, complete, max_turn_tokens=8, max_episodes=2, turn_by_turn=False)
    rows = interrupted(fake, "stop", after=9)
    while is_unfinished(rows):
        rows = interrupted(fake, "stop", after=3, begun=begun_of(rows))
    assert rows == expected
    assert (environments.most, environments.num_started) == (2, 6)
    groups = []  # a prompt that has ended before is complete
    assert generate(fake, until=Until(3, begun=begun_of(rows)), on_group=lambda *each: groups.append(each)) == rows
    assert groups == list(enumerate(rows))


@pytest.mark.faults
@pytest.mark.parametrize("callback", ["on_progress", "on_group"])
def test_an_error_in_a_call_stops_also_what_it_continues(processors, complete, callback):
    """It fails while four episodes wait for their environments; the others have ended before."""
    environments = LocalEnvironments(answer, lambda row, number: 1000 * (number == 1 and row["number"] > 0))
    fake = engine(processors, environments, complete, turn_by_turn=False)
    rows = interrupted(fake, "stop", after=0, when=lambda: len(environments.owing) == 4)
    assert len(environments.running) == 4
    fake.pop_metrics()

    def fail(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(fake, until=Until(3, begun=begun_of(rows)), **{callback: fail})
    assert environments.running == {}
    assert fake.pop_metrics() == {}  # of episodes that will run again
    environments.delay = None
    expected = generate(engine(processors, LocalEnvironments(answer), complete))
    assert generate(fake, until=Until(3, begun=begun_of(rows))) == expected
    assert values(fake.pop_metrics())[BEGUN_AGAIN] == 4


@pytest.mark.faults
def test_another_engine_begins_episodes_again_and_counts_those_that_had_tokens(processors, complete):
    """As after a checkpoint, whose completions are JSON values."""
    first = engine(processors, LocalEnvironments(answer), complete, max_episodes=3)
    rows = interrupted(first, "stop", after=4)
    num_begun = sum(bool(each.token_ids) for row in rows for each in row)
    assert num_begun == 3
    resumed = [tuple(load_completion(json.loads(json.dumps(completion_state(each)))) for each in row) for row in rows]
    assert resumed == list(begun_of(rows))
    environments = LocalEnvironments(answer)
    second = engine(processors, environments, complete)
    assert generate(second, until=Until(3, begun=tuple(resumed))) == generate(first)
    assert values(second.pop_metrics())[BEGUN_AGAIN] == num_begun
    assert environments.num_started == 6


@pytest.mark.parametrize("turn_by_turn", [True, False])
def test_a_drained_call_ends_its_turns_and_begins_none(processors, complete, turn_by_turn):
    environments = LocalEnvironments(answer, lambda row, number: 3 * (number == 0))
    fake = engine(processors, environments, complete, turn_by_turn=turn_by_turn, max_episodes=5)
    expected = generate(engine(processors, LocalEnvironments(answer), complete))
    passes = []

    def has_tokens():
        passes.append(not environments.owing)
        return sum(passes) == 3

    rows = interrupted(fake, "drain", after=0, when=has_tokens)
    drained, whole = ([each for row in part for each in row] for part in (rows, expected))
    assert (drained[5].token_ids, environments.num_started) == ((), 5)  # it has not begun
    for each, its_whole in zip(drained[:5], whole[:5], strict=True):
        assert [turn.end for turn in each.turns] == [its_whole.turns[0].end]  # to its end
        assert each.turns[0].text == its_whole.turns[0].text
    # The first prompt has one turn, which its environment ends while others are sampled.
    assert [each.is_unfinished for each in drained] == [False, False, True, True, True, True]
    assert generate(fake, until=Until(3, begun=begun_of(rows))) == expected
    assert environments.num_started == 6


def test_turn_by_turn_a_call_stops_at_the_same_tokens_however_long_environments_take(processors, complete):
    results = []
    for seed in range(3):
        environments = LocalEnvironments(
            answer, lambda row, number, seed=seed: (seed * 7 + row["number"] * 3 + number) % 6
        )
        fake = engine(processors, environments, complete, turn_by_turn=True)
        first = generate(fake, until=Until(1))
        assert is_unfinished(first)
        second = generate(fake, PROMPTS[1:], until=Until(1, begun=begun_of(first[1:])))
        results.append((first, second))
    assert all(result == results[0] for result in results)


# -- several replicas --


class LocalCall(Call):
    """A call that has ended as soon as it is made."""

    def __init__(self, results):
        self.error, self._pending, self._found = None, {}, results

    def result(self):
        return self._found


class LocalWorkers(WorkerGroup):
    """Workers of this process, each with an engine of its own."""

    def __init__(self, engines):
        handles = [WorkerHandle(rank, "", 0, Worker(rank), is_local=True) for rank in range(len(engines))]
        super().__init__(handles, "cpu", 60.0)
        for rank, fake in enumerate(engines):
            self.replace(rank, fake)

    def replace(self, rank, fake):
        """Replace a worker by one that has kept nothing."""
        self.workers[rank].actor._engines = WorkerEngines(None, None, fake, None, replica_rank=0)

    def part(self, first, end):
        group = copy(self)
        group.workers = self.workers[first:end]
        return group

    def put(self, payload, *, phase):
        return payload

    def call(self, method, *arguments, per_rank=None, phase, listener=None):
        firsts = [()] * len(self.workers) if per_rank is None else [(each,) for each in per_rank]
        pairs = zip(self.workers, firsts, strict=True)
        return LocalCall([method(worker.actor, *first, *arguments) for worker, first in pairs])


@pytest.mark.faults
def test_begun_episodes_return_to_the_replica_that_has_them(processors, complete, monkeypatch):
    monkeypatch.setattr("trigon.distributed.worker.ignore_stop_signals", lambda: None)  # of this process
    prompts = [prompt(number) for number in (3, 1, 0, 2, 2, 1)]
    prompts = [replace(each, prompt_id=f"train:{place}") for place, each in enumerate(prompts)]
    environments = [LocalEnvironments(answer) for _ in range(3)]
    fakes = [engine(processors, each, complete) for each in environments]
    group = LocalWorkers(fakes[:2])
    rollout = WorkersRolloutEngine(LearnerReplicas(group, replica_size=1), sends_rows=True)
    with ExitStack() as stack:
        for fake in fakes:
            stack.enter_context(fake.awake(NO_WEIGHTS, version=3))

        def sample(numbers, until=None):
            chosen = [prompts[number] for number in numbers]
            return dict(zip(numbers, rollout.generate(chosen, SAMPLING, until=until), strict=True))

        whole = sample(range(6))
        assert [row[0].replica for row in whole.values()] == [0, 1, 0, 1, 0, 1]
        num_started = [each.num_started for each in environments]

        rows = sample(range(6), Until(2))
        left = [number for number, row in rows.items() if is_unfinished([row])]
        assert {0, 3, 4} <= set(left)
        # In another order, and without one: dealt in turn, they would go to other replicas.
        left = sorted(left, key=lambda number: -number)[1:]
        again = sample(left, Until(len(left) - 1, begun=tuple(tuple(rows[number]) for number in left)))
        last = [number for number, row in again.items() if is_unfinished([row])]
        assert last
        group.replace(1, fakes[2])
        last_of_lost = [number for number in last if rows[number][0].replica == 1]
        final = sample(last, Until(len(last), begun=tuple(tuple(again[number]) for number in last)))
    for found in (rows, again, final):
        for number, row in found.items():
            assert is_unfinished([row]) or row == whole[number]
            assert [each.replica for each in row] == [number % 2] * 2
    assert [each.num_started for each in environments[:2]] == [2 * count for count in num_started[:2]]
    assert environments[2].num_started == 2 * len(last_of_lost)
    assert environments[0].running == environments[2].running == {}
    counts = [values(fake.pop_metrics())[BEGUN_AGAIN] for fake in fakes]
    assert counts == [0, 0, environments[2].num_started]
