"""Several datasets as one: how often each is drawn, by which names, and in the same order after a restart."""

import json
from collections import Counter

import datasets
import pytest

from support.builders import make_builder
from trigon.data.dataset import open_prompts
from trigon.data.mixture import MixedPrompts, mixed
from trigon.data.stream import PromptStream
from trigon.errors import CheckpointError, DataError
from trigon.models.load import load_processors


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("cache")
    yield
    datasets.config.HF_DATASETS_CACHE = before


@pytest.fixture(scope="module")
def open_set(tiny_model, tmp_path_factory):
    """Return a function that opens a dataset of so many questions, the last `bad` of them without an answer."""
    builder = make_builder(load_processors(str(tiny_model("qwen2"))))

    def open_set(name, count, bad=0):
        path = tmp_path_factory.mktemp("data") / f"{name}.jsonl"
        rows = [{"problem": f"{name} {i}?", "answer": str(i) if i < count else None} for i in range(count + bad)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return open_prompts(str(path), builder, filter_overlong_prompts=True, max_bad_row_fraction=0.5, num_workers=1)

    return open_set


@pytest.fixture(scope="module")
def six(open_set):
    return open_set("six", 6)


@pytest.fixture(scope="module")
def ten(open_set):
    return open_set("ten", 10)


@pytest.fixture
def stream():
    opened = []

    def stream(prompts, *, batch_size=1, seed=1, shuffle=True):
        opened.append(
            PromptStream(prompts, batch_size=batch_size, seed=seed, shuffle=shuffle, prefetch=True, num_workers=2)
        )
        return opened[-1]

    yield stream
    for each in opened:
        each.close()


def names(prompts):
    return [prompt.prompt_id for prompt in prompts]


def drawn(prompts, epoch, *, seed=1, shuffle=True):
    return [draw.number for draw in prompts.of_epoch(epoch, seed=seed, shuffle=shuffle)]


def test_one_dataset_stays_what_it_is(ten):
    assert mixed([ten], ()) is ten
    assert mixed([ten], (1.0,)) is ten


def test_datasets_are_numbered_through(six, ten):
    prompts = mixed([six, ten], ())
    assert len(prompts) == prompts.num_rows == prompts.prompts_per_epoch == 16
    assert names(prompts[i] for i in (0, 5, 6, 15)) == ["six:0", "six:5", "ten:0", "ten:9"]
    assert prompts[6].ground_truth == "0"
    assert drawn(prompts, 3) == list(range(16))


def test_datasets_of_one_name_are_told_apart(open_set):
    prompts = mixed([open_set("train", 2), open_set("train", 2), open_set("test", 1), open_set("train", 1)], ())
    assert names(prompts[i] for i in range(6)) == [
        "train:0",
        "train:1",
        "train~2:0",
        "train~2:1",
        "test:0",
        "train~3:0",
    ]


def test_an_epoch_goes_through_each_as_often_as_its_weight_says(six, ten):
    prompts = mixed([six, ten], (2.0, 0.5))
    assert prompts.prompts_per_epoch == 2 * 6 + 5
    for epoch in range(4):
        times = Counter(drawn(prompts, epoch))
        assert [times[i] for i in range(6)] == [2] * 6
        assert sorted(times[i] for i in range(6, 16)) == [0] * 5 + [1] * 5


def test_another_half_each_epoch(six, ten):
    prompts = mixed([six, ten], (1.0, 0.5))
    first, second, third = (set(drawn(prompts, epoch)) - set(range(6)) for epoch in range(3))
    assert first | second == set(range(6, 16))
    assert not first & second
    assert third not in (first, second)
    assert set(drawn(prompts, 0, seed=2)) - set(range(6)) != first


def test_a_share_that_does_not_divide_goes_on_where_it_stopped(ten):
    prompts = mixed([ten], (0.7,))
    epochs = [drawn(prompts, epoch) for epoch in range(10)]
    assert [len(each) for each in epochs] == [7] * 10
    assert Counter(number for each in epochs for number in each) == dict.fromkeys(range(10), 7)


def test_two_and_a_half_passes(six):
    prompts = mixed([six], (2.5,))
    times = Counter(drawn(prompts, 0))
    assert sorted(times.values()) == [2, 2, 2, 3, 3, 3]
    assert Counter([*drawn(prompts, 0), *drawn(prompts, 1)]) == dict.fromkeys(range(6), 5)


def test_without_shuffling_all_is_in_order(six, ten):
    prompts = mixed([six, ten], (2.0, 0.5))
    assert drawn(prompts, 0, shuffle=False) == [*range(6), *range(6), *range(6, 11)]
    assert drawn(prompts, 1, shuffle=False) == [*range(6), *range(6), *range(11, 16)]


def test_the_draws_are_these(six):
    """Literal, since a run resumed by another version has to go on alike."""
    assert [drawn(mixed([six], (0.5,)), epoch) for epoch in range(4)] == LITERAL


LITERAL = [[2, 3, 4], [0, 1, 5], [0, 1, 3], [2, 4, 5]]


def test_what_is_drawn_again_in_an_epoch_has_a_name_of_its_own(six, stream):
    taken = names(stream(mixed([six], (3.0,))).take(18))
    assert sorted(taken) == sorted(f"six:{i}{again}" for i in range(6) for again in ("", "#2", "#3"))


def test_the_stream_mixes_and_ends_its_epochs(six, ten, stream):
    prompts = stream(mixed([six, ten], (2.0, 0.5)), batch_size=4)
    assert prompts.prompts_per_epoch == 16
    first = [*names(prompts.take(4)), *names(prompts.take(12))]
    assert prompts.epoch == 0
    assert {name.partition(":")[0] for name in first[:8]} == {"six", "ten"}
    prompts.take(4)
    assert prompts.epoch == 1
    assert names(stream(mixed([six, ten], (2.0, 0.5)), batch_size=4).take(16)) == first


def test_a_resumed_stream_goes_on_with_the_very_prompts(six, ten, stream):
    prompts = stream(mixed([six, ten], (2.0, 0.5)), batch_size=3)
    prompts.take(9)
    state = json.loads(json.dumps(prompts.state()))
    rest = names(prompts.take(30))
    again = stream(mixed([six, ten], (2.0, 0.5)), batch_size=3)
    again.load_state(state)
    assert names(again.take(30)) == rest


@pytest.mark.parametrize("other", [(2.0, 0.6), (2.0, 1.0), ()])
def test_other_weights_are_other_data(six, ten, stream, other):
    state = stream(mixed([six, ten], (2.0, 0.5))).state()
    with pytest.raises(CheckpointError, match="fingerprint"):
        stream(mixed([six, ten], other)).load_state(state)


def test_what_was_set_aside_is_counted_together(open_set):
    prompts = mixed([open_set("one", 3, bad=1), open_set("two", 2, bad=2)], ())
    assert isinstance(prompts, MixedPrompts)
    assert prompts.report == {"answer": 3}
    assert (len(prompts), prompts.num_rows, prompts.max_bad_row_fraction) == (5, 8, 0.5)


def test_a_weight_that_gives_nothing_is_refused(six, ten):
    with pytest.raises(DataError, match=r"0\.05 of the 6 prompts of 'six' is not even one an epoch"):
        mixed([six, ten], (0.05, 1.0))


def test_every_prompt_that_was_taken_can_be_built_again_by_its_name(stream, six, ten):
    drawn = stream(mixed([six, ten], [2.0, 0.5]), batch_size=17)
    taken = drawn.take(17)
    assert any("#2" in prompt.prompt_id for prompt in taken)
    assert len({prompt.prompt_id for prompt in taken}) == 17
    for prompt in taken:
        again = drawn.rebuilt(prompt.prompt_id)
        assert (again.prompt_id, again.token_ids, again.text) == (prompt.prompt_id, prompt.token_ids, prompt.text)


@pytest.mark.parametrize("prompt_id", ["six:99", "seven:0", "six", "six:x"])
def test_a_name_that_is_nobodys_is_refused(stream, six, prompt_id):
    with pytest.raises(CheckpointError, match="not among the training prompts"):
        stream(six).rebuilt(prompt_id)


def test_made_up_names_are_nobody_elses(open_set):
    parts = [open_set("train", 2), open_set("train", 2), open_set("train~2", 2)]
    assert [part.name for part in mixed(parts, ()).parts] == ["train", "train~3", "train~2"]


def test_a_dataset_may_have_a_hash_in_its_name(stream, open_set):
    drawn = stream(open_set("set#2", 3))
    [prompt] = drawn.take(1)
    assert drawn.rebuilt(prompt.prompt_id).token_ids == prompt.token_ids
