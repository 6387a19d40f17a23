"""Episodes that a call of the engine leaves unfinished, and that the next one continues."""

from __future__ import annotations

import json
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from support.episodes import Answer, LocalEnvironments, Observed, drawing, load_pixels, make_settings
from support.models import processors_of
from support.rollout import NO_WEIGHTS
from trigon.distributed.engines import WorkersRolloutEngine
from trigon.distributed.messages import pack, unpack
from trigon.distributed.worker import Worker, WorkerEngines
from trigon.distributed.worker_group import WorkerGroup
from trigon.environments.pool import EnvironmentPool
from trigon.environments.settings import EnvironmentSettings, find_environment
from trigon.errors import DataError, RolloutError
from trigon.metrics import values
from trigon.rollout.fake import FakeEngine
from trigon.rollout.protocol import Interruption, Until
from trigon.rollout.restart import RestartingEngine
from trigon.rollout.saved import completion_state, load_completion
from trigon.rollout.seeds import sample_seed
from trigon.system.resuming import SAME_COMMAND
from trigon.types import EncodedMedia, Prompt, SamplingParams

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


def engine(processors, environments, complete, *, tokens_per_step=1, **changes):
    return FakeEngine(
        tokenizer=processors.tokenizer,
        stop_token_id=processors.tokenizer.eos_token_id,
        complete=complete,
        tokens_per_step=tokens_per_step,
        episodes=make_settings(environments, processors, **changes),
    )


def generate(fake, prompts=PROMPTS, sampling=SAMPLING, *, version=3, **options):
    with fake.awake(NO_WEIGHTS, version=version):
        return fake.generate(prompts, sampling, **options)


def interrupted(fake, kind, *, after, prompts=PROMPTS, begun=(), when=None, **options):
    """Return the rows of a call that is interrupted after so many reports of progress.

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


@pytest.mark.parametrize("turn_by_turn", [True, False])
@pytest.mark.parametrize("delay", [0, 4])
@pytest.mark.parametrize("after", [1, 2, 3, 4, 5, 6, 7, 13, 29])
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


def test_images_that_are_being_processed_are_finished(processors, complete):
    may_load, loading = threading.Event(), threading.Event()

    def load(media):
        loading.set()
        assert may_load.wait(20)
        return load_pixels(processors, *media.encoded)

    environments = LocalEnvironments(show, lambda row, number: 1000 * (number == 0 and row["number"] > 0))
    fake = engine(processors, environments, complete, load_pixels=load, turn_by_turn=False)
    expected = generate(engine(processors, LocalEnvironments(show), complete))
    interruption = Interruption()
    timer = threading.Timer(0.3, may_load.set)

    def on_progress(_):
        interruption.ask("stop")
        timer.start()

    rows = generate(fake, until=Until(3, interruption=interruption), on_progress=on_progress)
    assert loading.is_set()
    assert {len(each.token_ids) for row in rows for each in row} == {0}
    environments.answer_all()
    assert generate(fake, until=Until(3, begun=begun_of(rows))) == expected
    assert environments.num_started == 6


def test_an_observation_that_fails_while_a_call_stops_ends_its_episode(processors, complete):
    environments = LocalEnvironments(
        lambda row, actions: Answer(0, error="it broke", done=True) if actions else answer(row, actions)
    )
    environments.delay = lambda row, number: number
    fake, groups = engine(processors, environments, complete, turn_by_turn=False), []
    rows = interrupted(fake, "stop", after=0, when=lambda: len(environments.owing) > 0)
    rows = generate(fake, until=Until(3, begun=begun_of(rows)), on_group=lambda index, _: groups.append(index))
    assert {each.error for row in rows for each in row} == {"it broke"}
    assert sorted(groups) == [0, 1, 2]
    assert environments.running == {}


@pytest.mark.parametrize("callback", ["on_progress", "on_group"])
def test_an_error_while_images_are_processed_stops_all_environments(processors, complete, callback):
    """on_group: it raises for a group that has ended while others were left for the next call."""
    may_load = threading.Event()
    timer = threading.Timer(0.3, may_load.set)

    def load(media):
        assert may_load.wait(20)
        raise DataError("image 0 is truncated")

    environments = LocalEnvironments(show, lambda row, number: 1000 * (row["number"] > 0))
    fake = engine(processors, environments, complete, load_pixels=load, turn_by_turn=False)
    interruption = Interruption()

    def on_progress(_):
        if callback == "on_progress":
            timer.start()
            raise KeyboardInterrupt
        interruption.ask("stop")
        if not may_load.is_set():
            timer.start()

    def on_group(index, completions):
        assert (index, {each.error for each in completions}) == (0, {"image 0 is truncated"})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(fake, until=Until(3, interruption=interruption), on_progress=on_progress, on_group=on_group)
    assert environments.running == {}


def test_the_time_between_calls_is_not_that_of_an_environment(processors, complete):
    environments = LocalEnvironments(answer, lambda row, number: 1000)
    fake = engine(processors, environments, complete, turn_by_turn=False)
    rows = interrupted(fake, "stop", after=3)
    fake.pop_metrics()
    time.sleep(0.5)
    environments.delay = None
    environments.answer_all()
    generate(fake, until=Until(3, begun=begun_of(rows)))
    assert values(fake.pop_metrics())["perf/environment_step_seconds"] < 0.1  # on average


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
    # A group that begins anew has nothing to do with the one before.
    generate(fake, PROMPTS[1:2], until=Until(1))
    assert environments.running == {}
    assert values(fake.pop_metrics())[BEGUN_AGAIN] == 0


@pytest.mark.faults
def test_closing_the_engine_stops_what_is_kept(processors, complete):
    environments = LocalEnvironments(answer)
    fake = engine(processors, environments, complete)
    interrupted(fake, "stop", after=4)
    fake.close()
    assert environments.running == {}


@pytest.mark.faults
@pytest.mark.parametrize("callback", ["on_progress", "on_group"])
def test_an_error_in_a_call_stops_also_what_it_continues(processors, complete, callback):
    environments = LocalEnvironments(answer)
    fake = engine(processors, environments, complete)
    rows = interrupted(fake, "stop", after=4)

    def fail(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(fake, until=Until(3, begun=begun_of(rows)), **{callback: fail})
    assert environments.running == {}
    fake.pop_metrics()
    expected = generate(engine(processors, LocalEnvironments(answer), complete))
    assert generate(fake, until=Until(3, begun=begun_of(rows))) == expected
    assert values(fake.pop_metrics())[BEGUN_AGAIN] == 6


def test_the_others_of_a_prompt_that_fails_are_stopped(processors, complete):
    failing = sample_seed(SAMPLING.seed, draw=0, prompt_id="train:1", sample=0)
    environments = LocalEnvironments(answer)
    fake = engine(
        processors,
        environments,
        lambda so_far, version, seed: None if seed == failing else complete(so_far, version, seed),
    )
    rows = interrupted(fake, "stop", after=4)
    assert [len(row) for row in rows] == [2, 0, 2]
    assert sorted(row["number"] for row, _ in environments.running.values()) == [0, 0, 2, 2]


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


@pytest.mark.faults
def test_an_engine_that_is_started_again_begins_episodes_again(processors, complete):
    class Failing(FakeEngine):
        calls = 0

        def generate(self, *arguments, **options):
            self.calls += 1
            if self.calls == 2:
                raise RolloutError("vLLM failed")
            return super().generate(*arguments, **options)

        def restart(self):
            self._episodes.stop()
            self._version = None

    environments = LocalEnvironments(answer)
    fake = Failing(
        tokenizer=processors.tokenizer,
        stop_token_id=processors.tokenizer.eos_token_id,
        complete=complete,
        tokens_per_step=1,
        episodes=make_settings(environments, processors),
    )
    restarting = RestartingEngine(fake, warn=lambda text: None, same_command=SAME_COMMAND)
    rows = interrupted(restarting, "stop", after=4)
    expected = generate(engine(processors, LocalEnvironments(answer), complete))
    assert generate(restarting, until=Until(3, begun=begun_of(rows))) == expected
    assert environments.running == {}
    assert values(restarting.pop_metrics())[BEGUN_AGAIN] == 6


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
    for seed in range(5):
        environments = LocalEnvironments(
            answer, lambda row, number, seed=seed: (seed * 7 + row["number"] * 3 + number) % 6
        )
        fake = engine(processors, environments, complete, turn_by_turn=True)
        first = generate(fake, until=Until(1))
        assert is_unfinished(first)
        second = generate(fake, PROMPTS[1:], until=Until(1, begun=begun_of(first[1:])))
        results.append((first, second))
    assert all(result == results[0] for result in results)


def test_no_more_episodes_run_at_a_time_than_allowed(processors, complete):
    environments = LocalEnvironments(answer)
    fake = engine(processors, environments, complete, max_episodes=2, turn_by_turn=False)
    expected = generate(engine(processors, LocalEnvironments(answer), complete))
    rows = interrupted(fake, "stop", after=9)
    while is_unfinished(rows):
        rows = interrupted(fake, "stop", after=9, begun=begun_of(rows))
    assert rows == expected
    assert (environments.most, environments.num_started) == (2, 6)


def test_a_limit_of_tokens_of_a_turn_counts_those_of_earlier_calls(processors, complete):
    limits = {"max_turn_tokens": 8}
    expected = generate(engine(processors, LocalEnvironments(answer), complete, **limits))
    assert {each.finish_reason for each in expected[2]} == {"length"}
    fake = engine(processors, LocalEnvironments(answer), complete, **limits)
    rows = interrupted(fake, "stop", after=4)
    while is_unfinished(rows):
        rows = interrupted(fake, "stop", after=3, begun=begun_of(rows))
    assert rows == expected


def test_unfinished_episodes_with_images_are_sent_as_they_are(processors, complete):
    fake = engine(processors, LocalEnvironments(show), complete)
    rows = interrupted(fake, "stop", after=1)
    while not any(isinstance(each.vision, EncodedMedia) and len(each.turns) > 1 for each in rows[2]):
        rows = interrupted(fake, "stop", after=1, begun=begun_of(rows))
    assert unpack(pack(rows)) == rows


def test_a_prompt_that_has_ended_before_is_complete(processors, complete):
    fake, groups = engine(processors, LocalEnvironments(answer), complete), []
    rows = generate(fake)
    until = Until(3, begun=begun_of(rows))
    assert generate(fake, until=until, on_group=lambda *group: groups.append(group)) == rows
    assert groups == list(enumerate(rows))


def test_probes_of_one_turn_leave_episodes_alone(processors, complete):
    environments = LocalEnvironments(answer)
    fake = engine(processors, environments, complete)
    rows = interrupted(fake, "stop", after=4)
    [[probe]] = generate(fake, PROMPTS[:1], replace(SAMPLING, n=1, one_turn=True), until=Until(1))
    assert len(probe.turns) == 1
    assert len(environments.running) == 6
    expected = generate(engine(processors, LocalEnvironments(answer), complete))
    assert generate(fake, until=Until(3, begun=begun_of(rows))) == expected
    assert environments.num_started == 6


ENVIRONMENT = """
import time

class Counter:
    def reset(self, row):
        self.row, self.number = row, 0
        return "So far 0."

    def step(self, action):
        self.number += 1
        time.sleep(0.5 if self.row["number"] == 1 else 0)
        return f"So far {self.number}.", 0.5, self.number == 1 + self.row["number"]
"""


def test_a_validation_runs_while_as_many_episodes_are_kept_as_may_have_a_process(
    processors, complete, tmp_path, monkeypatch
):
    monkeypatch.setattr("trigon.rollout.episodes.POLL_SECONDS", 0.05)
    (tmp_path / "counter.py").write_text(ENVIRONMENT)
    source = find_environment(f"{tmp_path / 'counter.py'}:Counter")
    settings = EnvironmentSettings(environment=source, max_episodes=2)
    expected = generate(engine(processors, LocalEnvironments(answer), complete))
    with closing(EnvironmentPool(settings)) as pool:
        fake = engine(processors, pool, complete, max_episodes=2, turn_by_turn=False)
        chosen = PROMPTS[1:]
        rows = interrupted(
            fake,
            "stop",
            after=0,
            when=lambda: [each.owed for each in pool._episodes.values()] == ["step"] * 2,
            prompts=chosen,
        )
        assert [len(each.token_ids) > 0 for row in rows for each in row] == [True, True, False, False]
        assert generate(fake, [prompt(2), prompt(0)]) == [expected[2], expected[0]]
        assert generate(fake, chosen, until=Until(2, begun=begun_of(rows))) == expected[1:]
        assert values(fake.pop_metrics())[BEGUN_AGAIN] == 0
        assert pool._episodes == {}


# -- several replicas --


class LocalWorkers(WorkerGroup):
    """Workers of this process, each with an engine of its own."""

    def __init__(self, engines):
        super().__init__([Worker(rank) for rank in range(len(engines))], "cpu", 60.0)
        for rank, fake in enumerate(engines):
            self.replace(rank, fake)

    def replace(self, rank, fake):
        """Replace a worker by one that has kept nothing."""
        self.workers[rank]._engines = WorkerEngines(None, None, fake, None, replica_rank=0, has_episodes=True)

    def put(self, payload, *, phase):
        return payload

    def call_all(self, method, *arguments, per_rank=None, phase, listener=None):
        firsts = [()] * len(self.workers) if per_rank is None else [(each,) for each in per_rank]
        return [method(worker, *first, *arguments) for worker, first in zip(self.workers, firsts, strict=True)]


@pytest.mark.faults
def test_begun_episodes_return_to_the_replica_that_has_them(processors, complete, monkeypatch):
    monkeypatch.setattr("trigon.distributed.worker.ignore_stop_signals", lambda: None)  # of this process
    prompts = [prompt(number) for number in (3, 1, 0, 2, 2, 1)]
    prompts = [replace(each, prompt_id=f"train:{place}") for place, each in enumerate(prompts)]
    environments = [LocalEnvironments(answer) for _ in range(3)]
    fakes = [engine(processors, each, complete) for each in environments]
    group = LocalWorkers(fakes[:2])
    rollout = WorkersRolloutEngine(group, tensor_parallel_size=1, sends_rows=True)
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
