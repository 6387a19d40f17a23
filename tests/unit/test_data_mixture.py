"""Mixed datasets: how often each is drawn, the ids of prompts, and the order after a resume."""

import json
from collections import Counter

import datasets
import pytest

from support.builders import make_builder
from support.models import processors_of
from trigon.data.dataset import open_prompts
from trigon.data.stream import MixedPrompts, PromptStream, mix
from trigon.errors import CheckpointError, DataError


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("cache")
    yield
    datasets.config.HF_DATASETS_CACHE = before


@pytest.fixture(scope="module")
def open_set(tiny_model, tmp_path_factory):
    """Return a function that opens a dataset of count usable and bad unusable rows."""
    builder = make_builder(processors_of(tiny_model("qwen2")))

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
    return [entry.prompt_index for entry in prompts.draw_epoch(epoch, seed=seed, shuffle=shuffle)]


def test_a_single_dataset_is_returned_unchanged(ten):
    assert mix([ten], ()) is ten
    assert mix([ten], (1.0,)) is ten


def test_prompt_indices_are_consecutive(six, ten):
    prompts = mix([six, ten], ())
    assert len(prompts) == prompts.num_rows == prompts.prompts_per_epoch == 16
    assert names(prompts[i] for i in (0, 5, 6, 15)) == ["six:0", "six:5", "ten:0", "ten:9"]
    assert prompts[6].ground_truth == "0"
    assert drawn(prompts, 3) == list(range(16))


def test_datasets_of_the_same_name_get_numbers(open_set):
    prompts = mix([open_set("train", 2), open_set("train", 2), open_set("test", 1), open_set("train", 1)], ())
    assert names(prompts[i] for i in range(6)) == [
        "train:0",
        "train:1",
        "train~2:0",
        "train~2:1",
        "test:0",
        "train~3:0",
    ]


def test_an_epoch_draws_each_dataset_as_often_as_its_weight_says(six, ten):
    prompts = mix([six, ten], (2.0, 0.5))
    assert prompts.prompts_per_epoch == 2 * 6 + 5
    for epoch in range(4):
        times = Counter(drawn(prompts, epoch))
        assert [times[i] for i in range(6)] == [2] * 6
        assert sorted(times[i] for i in range(6, 16)) == [0] * 5 + [1] * 5


def test_a_weight_of_one_half_draws_the_other_half_in_the_next_epoch(six, ten):
    prompts = mix([six, ten], (1.0, 0.5))
    first, second, third = (set(drawn(prompts, epoch)) - set(range(6)) for epoch in range(3))
    assert first | second == set(range(6, 16))
    assert not first & second
    assert third not in (first, second)
    assert set(drawn(prompts, 0, seed=2)) - set(range(6)) != first


def test_a_weight_that_does_not_divide_continues_where_the_last_epoch_ended(ten):
    prompts = mix([ten], (0.7,))
    epochs = [drawn(prompts, epoch) for epoch in range(10)]
    assert [len(each) for each in epochs] == [7] * 10
    assert Counter(number for each in epochs for number in each) == dict.fromkeys(range(10), 7)


def test_a_weight_of_two_and_a_half(six):
    prompts = mix([six], (2.5,))
    times = Counter(drawn(prompts, 0))
    assert sorted(times.values()) == [2, 2, 2, 3, 3, 3]
    assert Counter([*drawn(prompts, 0), *drawn(prompts, 1)]) == dict.fromkeys(range(6), 5)


def test_without_shuffling_prompts_are_in_order(six, ten):
    prompts = mix([six, ten], (2.0, 0.5))
    assert drawn(prompts, 0, shuffle=False) == [*range(6), *range(6), *range(6, 11)]
    assert drawn(prompts, 1, shuffle=False) == [*range(6), *range(6), *range(11, 16)]


def test_drawn_prompts_are_the_same_in_every_version(six):
    """A run that is resumed with another version has to draw the same prompts."""
    assert [drawn(mix([six], (0.5,)), epoch) for epoch in range(4)] == LITERAL


LITERAL = [[2, 3, 4], [0, 1, 5], [0, 1, 3], [2, 4, 5]]


def test_repeated_prompts_of_an_epoch_have_ids_of_their_own(six, stream):
    taken = names(stream(mix([six], (3.0,))).take(18))
    assert sorted(taken) == sorted(f"six:{i}{again}" for i in range(6) for again in ("", "#2", "#3"))


def test_the_stream_mixes_datasets_and_counts_epochs(six, ten, stream):
    prompts = stream(mix([six, ten], (2.0, 0.5)), batch_size=4)
    assert prompts.prompts_per_epoch == 16
    first = [*names(prompts.take(4)), *names(prompts.take(12))]
    assert prompts.epoch == 0
    assert {name.partition(":")[0] for name in first[:8]} == {"six", "ten"}
    prompts.take(4)
    assert prompts.epoch == 1
    assert names(stream(mix([six, ten], (2.0, 0.5)), batch_size=4).take(16)) == first


def test_a_resumed_stream_continues_with_the_same_prompts(six, ten, stream):
    prompts = stream(mix([six, ten], (2.0, 0.5)), batch_size=3)
    prompts.take(9)
    state = json.loads(json.dumps(prompts.state()))
    rest = names(prompts.take(30))
    again = stream(mix([six, ten], (2.0, 0.5)), batch_size=3)
    again.load_state(state)
    assert names(again.take(30)) == rest


@pytest.mark.parametrize("other", [(2.0, 0.6), (2.0, 1.0), ()])
def test_other_weights_cannot_be_resumed(six, ten, stream, other):
    state = stream(mix([six, ten], (2.0, 0.5))).state()
    with pytest.raises(CheckpointError, match=r"data\.train_weights was \[2\.0, 0\.5\], and is now"):
        stream(mix([six, ten], other)).load_state(state)


def test_skipped_rows_are_added_up(open_set):
    prompts = mix([open_set("one", 3, bad=1), open_set("two", 2, bad=2)], ())
    assert isinstance(prompts, MixedPrompts)
    assert prompts.num_skipped == {"answer": 3}
    assert (len(prompts), prompts.num_rows, prompts.max_bad_row_fraction) == (5, 8, 0.5)


def test_a_weight_that_gives_no_prompt_is_an_error(six, ten):
    with pytest.raises(DataError, match=r"0\.05 of the 6 prompts of 'six' is not even one an epoch"):
        mix([six, ten], (0.05, 1.0))


def test_every_taken_prompt_can_be_rebuilt_by_its_id(stream, six, ten):
    drawn = stream(mix([six, ten], [2.0, 0.5]), batch_size=17)
    taken = drawn.take(17)
    assert any("#2" in prompt.prompt_id for prompt in taken)
    assert len({prompt.prompt_id for prompt in taken}) == 17
    for prompt in taken:
        again = drawn.rebuild(prompt.prompt_id)
        assert (again.prompt_id, again.token_ids, again.text) == (prompt.prompt_id, prompt.token_ids, prompt.text)


@pytest.mark.parametrize("prompt_id", ["six:99", "seven:0", "six", "six:x"])
def test_an_unknown_id_is_an_error(stream, six, prompt_id):
    with pytest.raises(CheckpointError, match="not among the training prompts"):
        stream(six).rebuild(prompt_id)


def test_generated_names_do_not_collide(open_set):
    parts = [open_set("train", 2), open_set("train", 2), open_set("train~2", 2)]
    assert [part.name for part in mix(parts, ()).parts] == ["train", "train~3", "train~2"]


def test_a_dataset_may_have_a_hash_in_its_name(stream, open_set):
    drawn = stream(open_set("set#2", 3))
    [prompt] = drawn.take(1)
    assert drawn.rebuild(prompt.prompt_id).token_ids == prompt.token_ids
