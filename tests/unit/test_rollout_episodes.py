"""Episodes of several turns over the fake engine: their tokens, limits, failures and schedule."""

import itertools
import random
from contextlib import closing
from dataclasses import replace

import pytest

from support.episodes import Answer, LocalEnvironments, Observed, drawing, load_pixels, make_settings
from support.models import processors_of
from support.rollout import NO_WEIGHTS
from trigon.data.media_processing import MediaProcessor
from trigon.data.vision import image_processor_of
from trigon.errors import DataError
from trigon.metrics import values
from trigon.rollout.episode_state import sample_seed, turn_seed
from trigon.rollout.fake import FakeEngine
from trigon.types import EncodedMedia, Prompt, SamplingParams, Turn

SAMPLING = SamplingParams(n=2, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=200, ignore_eos=False, seed=7)


@pytest.fixture(scope="module")
def processors(tiny_model):
    return processors_of(tiny_model("qwen2"))


@pytest.fixture(scope="module")
def vision_processors(tiny_vlm):
    return processors_of(tiny_vlm)


def prompt(number=0, **row):
    return Prompt(f"train:{number}", (1, 2, 3), None, "Play.", "", {"number": number, **row}, ())


def count_to(last):
    """Answer each action with the number of actions, until the last; the reward is that number."""

    def answer(row, actions):
        return Answer(0, Observed(f"So far {len(actions)}."), float(len(actions)), done=len(actions) == last)

    return answer


def engine(processors, environments, complete=lambda *_: "go on", *, turn_by_turn=True, **changes):
    return FakeEngine(
        tokenizer=processors.tokenizer,
        stop_token_id=processors.tokenizer.eos_token_id,
        complete=complete,
        turn_by_turn=turn_by_turn,
        episodes=make_settings(environments, processors, **changes),
    )


def generate(fake, prompts, sampling=SAMPLING, **callbacks):
    with fake.awake(NO_WEIGHTS, version=3):
        return fake.generate(prompts, sampling, **callbacks)


def ids(processors, text):
    return tuple(processors.tokenizer.encode(text, add_special_tokens=False))


def test_an_episode_is_its_observations_and_turns_in_order(processors):
    [[completion, other]] = generate(engine(processors, LocalEnvironments(count_to(2))), [prompt()])
    stop = (processors.tokenizer.eos_token_id,)
    opening = ids(processors, "<|im_start|>user\nSo far 0.<|im_end|>\n<|im_start|>assistant\n")
    reply = ids(processors, "\n<|im_start|>user\n") + ids(processors, "So far 1.<|im_end|>\n<|im_start|>assistant\n")
    action = (*ids(processors, "go on"), *stop)
    assert completion.token_ids == opening + action + reply + action
    starts = [len(opening), len(opening) + len(action) + len(reply)]
    assert completion.turns == (
        Turn(starts[0], starts[0] + len(action), "go on", "So far 0.", 1.0),
        Turn(starts[1], starts[1] + len(action), "go on", "So far 1.", 2.0),
    )
    assert completion.sampling_logprobs == (-1.0,) * completion.num_sampled
    assert (completion.text, completion.finish_reason, completion.error) == ("go on\ngo on", "stop", "")
    assert (completion.policy_version, completion.vision) == (3, None)
    assert other == completion


def test_the_greedy_completion_of_a_prompt_is_an_episode_of_its_own(processors):
    environments = LocalEnvironments(count_to(2))
    fake = engine(processors, environments, recorded(log := []))
    rows = generate(fake, [prompt(0), prompt(1)], replace(SAMPLING, with_baseline=True))
    assert environments.most == 6
    for row in rows:
        assert [len(each.turns) for each in row] == [2, 2, 2]
        assert [set(each.sampling_logprobs) for each in row] == [{-1.0}, {-1.0}, {0.0}]
    assert len(log) == 12
    plain = generate(engine(processors, LocalEnvironments(count_to(2)), recorded([])), [prompt(0), prompt(1)])
    assert [row[:2] for row in rows] == plain


CALL = '<tool_call>{"name": "crop", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (f"{CALL}<tool_response>invented</tool_response><answer>42</answer>", CALL),
        (f"I look.\n{CALL}\nThe answer is 42.", f"I look.\n{CALL}"),
        (f"{CALL}\n{CALL} Then I see 42.", f"{CALL}\n{CALL}"),  # two calls are one after the other
        (f"{CALL} Then {CALL}", CALL),
        (
            f"<think>First {CALL} and 42.</think>{CALL}<think>I see.</think>42",
            f"<think>First {CALL} and 42.</think>{CALL}",
        ),
        (f"{CALL}\n", f"{CALL}\n"),
        ("The answer is 42.", "The answer is 42."),
        (f"<think>{CALL}</think> The answer is 42.", f"<think>{CALL}</think> The answer is 42."),
    ],
)
def test_a_turn_ends_with_its_calls_and_what_comes_after_is_dropped_and_counted(processors, text, kept):
    actions = []

    def answer(row, done):
        actions.append(list(done))
        return Answer(0, Observed("4") if len(done) == 1 else None, done=len(done) == 2)

    def complete(so_far, version, seed):
        return text if len(so_far.token_ids) == 3 else "done"

    fake = engine(
        processors, LocalEnvironments(answer), complete, opens=False, tool_format="hermes", max_turn_tokens=400
    )
    sampling = replace(SAMPLING, n=1, max_tokens=1000)
    [[completion]] = generate(fake, [prompt()], sampling)
    first, last = completion.turns
    num_dropped = values(fake.pop_metrics())["rollout/dropped_tokens"]
    sampled = completion.token_ids[first.start : first.end]
    if kept == text:  # with its end-of-sequence token
        assert (sampled, num_dropped) == ((*ids(processors, text), processors.tokenizer.eos_token_id), 0)
    else:
        assert sampled + ids(processors, text)[len(sampled) :] == ids(processors, text)
        assert num_dropped == len(ids(processors, text)) + 1 - len(sampled) > 0
    # The last token of the call may have more characters.
    assert processors.tokenizer.decode(sampled, skip_special_tokens=True).startswith(kept)
    assert len(first.text) <= len(kept) + 2
    assert (actions[1], last.text) == ([first.text], "done")
    assert len(completion.sampling_logprobs) == len(sampled) + last.end - last.start


def test_a_seed_does_not_change_between_versions_of_trigon():
    assert sample_seed(1, draw=2, prompt_id="train:17", sample=3) == 7240194199493609275


def test_each_argument_changes_the_seed():
    seeds = {
        sample_seed(run_seed, draw=step, prompt_id=f"train:{row}", sample=sample)
        for run_seed in range(3)
        for step in range(10)
        for row in range(20)
        for sample in range(8)
    }
    assert len(seeds) == 3 * 10 * 20 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    # Arguments that concatenate to the same text.
    assert sample_seed(1, draw=11, prompt_id="a", sample=1) != sample_seed(11, draw=1, prompt_id="a", sample=1)


def test_a_first_turn_has_the_seed_of_a_completion_and_later_ones_others(processors):
    def complete(so_far, version, seed):
        return f"{seed}"

    [row] = generate(engine(processors, LocalEnvironments(count_to(3)), complete), [prompt(0)])
    seeds = [[int(turn.text) for turn in completion.turns] for completion in row]
    first = [sample_seed(7, draw=0, prompt_id="train:0", sample=sample) for sample in range(2)]
    assert seeds == [[turn_seed(seed, turn) for turn in range(3)] for seed in first]
    assert [turns[0] for turns in seeds] == first
    assert len({seed for turns in seeds for seed in turns}) == 6
    assert all(0 <= seed < 2**63 for turns in seeds for seed in turns)


def test_the_limit_of_turns_ends_an_episode_after_its_last_answer(processors):
    fake = engine(processors, LocalEnvironments(count_to(100)), max_turns=3)
    [[completion, _]] = generate(fake, [prompt()])
    assert completion.finish_reason == "turns"
    assert [turn.reward for turn in completion.turns] == [1.0, 2.0, 3.0]
    metrics = fake.pop_metrics()
    seconds = {name for name in metrics if name.startswith("perf/")}
    assert seconds == {"perf/environment_step_seconds", "perf/environment_wait_fraction"}
    assert {name: value for name, value in values(metrics).items() if name not in seconds} == {
        "rollout/dropped_tokens": 0,
        "rollout/episodes_begun_again": 0,
        "rollout/episodes_ended_by_length": 0,
        "rollout/episodes_failed": 0,
        "rollout/num_turns": 3,
    }
    assert fake.pop_metrics() == {}


@pytest.mark.faults
@pytest.mark.parametrize("most", range(1, 60))
def test_every_limit_of_a_completion_ends_it_with_a_sampled_token(processors, most):
    """A limit inside a turn cuts it; one inside an observation, or at its end, ends before it."""
    sampling = SamplingParams(n=1, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=most, ignore_eos=False, seed=7)
    [[full]] = generate(engine(processors, LocalEnvironments(count_to(4))), [prompt()], SAMPLING_OF_ONE)
    fake = engine(processors, LocalEnvironments(count_to(4)))
    [[completion]] = generate(fake, [prompt()], sampling)
    cut = values(fake.pop_metrics())
    if most <= full.turns[0].start:
        assert f"first observation has {full.turns[0].start} tokens" in completion.error
        assert f"a completion has at most {most} tokens (data.max_response_length, or max_tokens of" in completion.error
        assert len(completion.token_ids) == 1
        assert cut["rollout/episodes_failed"] == 1
        return
    assert completion.error == ""
    assert len(completion.token_ids) <= most
    assert completion.token_ids == full.token_ids[: len(completion.token_ids)]
    assert completion.turns[-1].end == len(completion.token_ids)
    was_cut = len(completion.token_ids) < len(full.token_ids)
    assert completion.finish_reason == ("length" if was_cut else "stop")
    assert cut["rollout/episodes_ended_by_length"] == was_cut
    # As long as it can be: the next token is observed and no sampled one fits after it, or the
    # limit is reached.
    following = next((turn.start for turn in full.turns if turn.start >= len(completion.token_ids)), None)
    assert len(completion.token_ids) == most or not was_cut or (following is not None and following >= most)


SAMPLING_OF_ONE = SamplingParams(n=1, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=200, ignore_eos=False, seed=7)


def test_a_turn_that_reaches_its_own_limit_ends_the_episode(processors):
    texts = itertools.cycle(["ok", "one two three four five six seven"])
    fake = engine(processors, LocalEnvironments(count_to(9)), lambda *_: next(texts), max_turn_tokens=4)
    [[completion]] = generate(fake, [prompt()], SAMPLING_OF_ONE)
    assert completion.finish_reason == "length"
    assert [turn.end - turn.start for turn in completion.turns] == [3, 4]
    assert [turn.reward for turn in completion.turns] == [1.0, None]  # a cut action is not carried out
    assert values(fake.pop_metrics())["rollout/episodes_ended_by_length"] == 1


@pytest.mark.faults
@pytest.mark.parametrize("after", range(4))
def test_an_environment_that_fails_costs_its_episode_alone(processors, after):
    expected = generate(engine(processors, LocalEnvironments(count_to(3))), [prompt(0), prompt(1), prompt(2)])
    number = itertools.count()

    def answer(row, actions):
        if row["number"] == 1 and len(actions) == after and next(number) == 0:
            return Answer(0, error="ZeroDivisionError: division\n by zero", done=True)
        return count_to(3)(row, actions)

    environments = LocalEnvironments(answer)
    fake = engine(processors, environments)
    groups = []
    rows = generate(fake, [prompt(0), prompt(1), prompt(2)], on_group=lambda *group: groups.append(group))
    assert [rows[0], rows[2], rows[1][1:]] == [expected[0], expected[2], expected[1][1:]]
    [failed, _], [whole, _] = rows[1], expected[1]
    assert failed.error == "ZeroDivisionError: division by zero"
    if after:
        assert failed.token_ids == whole.token_ids[: len(failed.token_ids)]
        assert [turn.reward for turn in failed.turns] == [*[float(turn + 1) for turn in range(after - 1)], None]
    else:
        assert failed.token_ids == (processors.tokenizer.eos_token_id,)
        assert failed.turns == (Turn(0, 1, ""),)
    assert len(failed.sampling_logprobs) == failed.num_sampled
    assert dict(groups) == dict(enumerate(rows))
    assert len(groups) == 3
    assert environments.running == {}
    metrics = values(fake.pop_metrics())
    assert (metrics["rollout/episodes_failed"], metrics["rollout/num_turns"]) == (1, 3)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("opening", "answer", "error"),
    [
        (Answer(0, Observed("Go.")), Answer(0, Observed("impossible")), "an observation that cannot be shown"),
        (Answer(0, Observed("Go.")), Answer(0, None), "is not done, but returned no observation"),
        (Answer(0, Observed("Go.")), Answer(0, Observed("Look.", (drawing(1),))), "image 0 is truncated"),
        (Answer(0, Observed("Go."), done=True), None, "done before the first turn"),
    ],
)
def test_an_observation_that_cannot_be_shown_costs_its_episode(vision_processors, opening, answer, error):
    def load(media):
        raise DataError("image 0 is truncated")

    environments = LocalEnvironments(lambda row, actions: answer if actions else opening)
    [[first, second]] = generate(engine(vision_processors, environments, load_pixels=load), [prompt()])
    assert error in first.error
    assert first == second
    assert (len(first.turns), first.vision) == (1, None)
    assert environments.running == {}


def delays(seed):
    """Return delays that differ by episode and turn."""
    return lambda row, number: random.Random(f"{seed} {row['number']} {number}").randrange(6)


def recorded(log):
    """Return a function whose texts depend on all tokens before them, and log their order."""

    def complete(so_far, version, seed):
        log.append((so_far.prompt_id, len(so_far.token_ids), seed))
        return f"move {sum(so_far.token_ids) % 97} {seed % 89}"

    return complete


def lengths_differ(row, actions):
    done = len(actions) >= 1 + row["number"] % 3
    return Answer(0, Observed(f"{row['number']}: {' '.join(actions)}"), 0.5, done)


@pytest.mark.parametrize("max_episodes", [None, 1, 3])
def test_turn_by_turn_the_engine_gets_the_same_requests_in_the_same_order(processors, max_episodes):
    prompts = [prompt(number) for number in range(7)]
    logs, results = [], []
    for seed in range(4):
        log, environments = [], LocalEnvironments(lengths_differ, delays(seed))
        fake = engine(processors, environments, recorded(log), max_episodes=max_episodes)
        results.append(generate(fake, prompts))
        logs.append(log)
        assert environments.running == {}
        assert environments.most == (max_episodes or 14)
    assert logs[0] == logs[1] == logs[2] == logs[3]
    assert results[0] == results[1] == results[2] == results[3]
    log, environments = [], LocalEnvironments(lengths_differ, delays(1))
    fake = engine(processors, environments, recorded(log), max_episodes=max_episodes, turn_by_turn=False)
    assert generate(fake, prompts) == results[0]  # of an engine whose results do not depend on the batch
    assert environments.most == (max_episodes or 14)
    assert max_episodes == 1 or log != logs[1]


def test_continuously_an_environment_does_not_hold_up_others(processors):
    log = []
    environments = LocalEnvironments(count_to(3), lambda row, number: 1000 if row["number"] == 1 else 0)
    groups = []
    rows = generate(
        engine(processors, environments, recorded(log), turn_by_turn=False),
        [prompt(number) for number in range(3)],
        on_group=lambda index, row: groups.append(index),
    )
    assert groups == [0, 2, 1]
    assert [name for name, *_ in log][-6:] == ["train:1"] * 6
    assert [len(row) for row in rows] == [2, 2, 2]


def test_progress_counts_each_episode_once_and_says_when_it_only_waits(processors):
    progress = []
    environments = LocalEnvironments(count_to(2), lambda row, number: 5)
    generate(engine(processors, environments), [prompt(0), prompt(1)], on_progress=progress.append)
    assert sum(filter(None, progress)) == 4
    assert None in progress
    assert environments.num_polls_waiting > 0


def test_images_of_observations_reach_the_completion_in_order(vision_processors):
    files = [drawing(colour) for colour in range(3)]

    def answer(row, actions):
        return Answer(0, Observed("Look.", (files[len(actions)],)), 1.0, done=len(actions) == 2)

    question = EncodedMedia((drawing(9),), ("of the prompt",))
    pad = vision_processors.family.image_token_id(vision_processors.hf_config)
    asked = Prompt("train:0", (1, *[pad] * 9, 2), question, "<image>", "", {"number": 0}, ("a.png",))
    environments = LocalEnvironments(answer)
    fake = engine(vision_processors, environments)
    [[completion, other]] = generate(fake, [asked])
    assert completion.vision.encoded == tuple(files[:2])
    assert len(set(completion.vision.hashes)) == 2
    assert completion.vision.kind == "image"
    assert completion == other
    assert [turn.observation for turn in completion.turns] == ["<image>Look.", "<image>Look."]
    assert environments.images == [question.encoded] * 2


def test_a_step_processes_each_observed_image_once_also_when_those_of_the_last_step_fill_the_cache(vision_processors):
    files = [drawing(10 * number) for number in range(7)]
    media = MediaProcessor(
        image_processor_of(vision_processors),
        max_image_pixels=10**6,
        num_workers=2,
        max_bytes=2 * load_pixels(vision_processors, files[0]).pixel_values.nbytes,
    )

    def answer(row, actions):
        return Answer(0, Observed("Look.", (files[2 * row["number"] + len(actions)],)), 1.0, done=len(actions) == 2)

    settings = {"load_pixels": lambda files: media.process_images(files, "an observation"), "media": media}
    fake = engine(vision_processors, LocalEnvironments(answer), **settings)
    with closing(media):
        for number in range(3):
            [[completion, _]] = generate(fake, [prompt(number)])
            for _ in range(3):  # passes of the trainer
                media.process_images(completion.vision, "a completion")
            assert values(fake.pop_metrics())["perf/images_processed"] == 2
