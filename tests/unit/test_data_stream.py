"""Prompts come in a seeded order that does not depend on interruptions, damaged rows or threads."""

import json
import threading
from collections import Counter
from dataclasses import replace

import datasets
import pytest

from support.builders import make_builder, prompts_of, write_jsonl
from support.images import counting, png
from support.models import processors_of
from trigon.data.dataset import open_prompts
from trigon.data.stream import Prompts, PromptStream, load_contents, mix
from trigon.errors import CheckpointError, DataError
from trigon.metrics import values


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("cache")
    yield
    datasets.config.HF_DATASETS_CACHE = before


@pytest.fixture(scope="module")
def open_set(tiny_model, tmp_path_factory):
    """Return a function that opens a dataset of count usable and bad unusable rows."""
    builder = make_builder(processors_of(tiny_model("qwen2")), max_bad_row_fraction=0.5)

    def open_set(name, count, bad=0):
        path = tmp_path_factory.mktemp("data") / f"{name}.jsonl"
        rows = [{"problem": f"{name} {i}?", "answer": str(i) if i < count else None} for i in range(count + bad)]
        return open_prompts(write_jsonl(path, rows), builder, num_workers=1)

    return open_set


@pytest.fixture(scope="module")
def six(open_set):
    return open_set("six", 6)


@pytest.fixture(scope="module")
def ten(open_set):
    return open_set("rows", 10)


@pytest.fixture
def open_stream():
    opened = []

    def open_stream(prompts, **options):
        usual = {"batch_size": 4, "seed": 1, "shuffle": True, "prefetch": True, "num_workers": 2}
        opened.append(PromptStream(prompts if isinstance(prompts, Prompts) else mix([prompts]), **usual | options))
        return opened[-1]

    yield open_stream
    for stream in opened:
        stream.close()


def write_images(folder, count):
    """Write a dataset of rows with an image each, and return its path."""
    folder.mkdir(exist_ok=True)
    for number in range(count):
        (folder / f"{number}.png").write_bytes(png(seed=number))
    rows = ({"images": [f"{i}.png"], "problem": "<image>?", "answer": str(i)} for i in range(count))
    return write_jsonl(folder / "rows.jsonl", rows)


@pytest.fixture
def with_images(processors, tmp_path):
    def with_images(count, max_bad_row_fraction=0.0, *, written=False, own=processors):
        builder = make_builder(own, max_bad_row_fraction=max_bad_row_fraction)
        return prompts_of(str(tmp_path / "rows.jsonl") if written else write_images(tmp_path, count), builder)

    return with_images


def ground_truths(prompts):
    return [int(prompt.ground_truth) for prompt in prompts]


def names(prompts):
    return [prompt.prompt_id for prompt in prompts]


def saved(stream):
    return json.loads(json.dumps(stream.state()))


def drawn(prompts, epoch, *, seed=1, shuffle=True):
    return [entry.prompt_index for entry in prompts.draw_epoch(epoch, seed=seed, shuffle=shuffle)]


# Order


def test_the_order_is_the_same_on_every_machine(ten, six, open_stream):
    stream = open_stream(ten)
    assert [ground_truths(stream.take(4)) for _ in range(4)] == [[4, 6, 3, 0], [2, 9, 1, 7], [1, 8, 2, 3], [0, 7, 9, 5]]
    half = mix([six], (0.5,))
    assert [drawn(half, epoch) for epoch in range(4)] == [[2, 3, 4], [0, 1, 5], [0, 1, 3], [2, 4, 5]]


def test_an_epoch_has_complete_batches_without_repetition(ten, open_stream):
    stream = open_stream(ten)
    assert stream.prompts_per_epoch == 8
    epochs = [ground_truths(stream.take(4)) + ground_truths(stream.take(4)) for _ in range(20)]
    assert all(len(set(epoch)) == 8 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 20
    assert set().union(*epochs) == set(range(10))  # prompts left over by one epoch are in others
    assert ground_truths(open_stream(ten, seed=2).take(8)) != epochs[0]
    unshuffled = open_stream(ten, shuffle=False)
    assert [ground_truths(unshuffled.take(8)) for _ in range(2)] == [list(range(8))] * 2
    with pytest.raises(DataError, match=r"10 usable prompts.* 11 .*data\.rollout_batch_size"):
        open_stream(ten, batch_size=11)


def test_take_sizes_and_prefetching_do_not_change_the_order(ten, open_stream):
    expected = ground_truths(open_stream(ten).take(24))
    for prefetch in (True, False):
        stream = open_stream(ten, prefetch=prefetch)
        assert [truth for size in (1, 3, 8, 4, 8) for truth in ground_truths(stream.take(size))] == expected
        assert values(stream.metrics()) == {"data/epoch": 3.0, "data/num_skipped": 0.0}


# Mixtures


def test_prompt_indices_are_consecutive_and_names_do_not_collide(six, ten, open_set):
    prompts = mix([six, ten])
    assert len(prompts) == prompts.num_rows == prompts.prompts_per_epoch == 16
    assert names(prompts[i] for i in (0, 5, 6, 15)) == ["six:0", "six:5", "rows:0", "rows:9"]
    assert drawn(prompts, 3) == list(range(16))
    two = open_set("train", 2)
    for given, found in (
        ([two, two, open_set("test", 1), two], ["train", "train~2", "test", "train~3"]),
        ([two, two, open_set("train~2", 2)], ["train", "train~3", "train~2"]),
    ):
        assert [part.name for part in mix(given).parts] == found
    assert names(mix([two, two])[i] for i in range(4)) == ["train:0", "train:1", "train~2:0", "train~2:1"]


def test_an_epoch_draws_each_dataset_as_often_as_its_weight_says(six, ten):
    prompts = mix([six, ten], (2.0, 0.5))
    assert prompts.prompts_per_epoch == 2 * 6 + 5
    for epoch in range(4):
        times = Counter(drawn(prompts, epoch))
        assert [times[i] for i in range(6)] == [2] * 6
        assert sorted(times[i] for i in range(6, 16)) == [0] * 5 + [1] * 5
    assert drawn(prompts, 0, shuffle=False) == [*range(6), *range(6), *range(6, 11)]
    assert drawn(prompts, 1, shuffle=False) == [*range(6), *range(6), *range(11, 16)]


@pytest.mark.parametrize(
    ("weight", "epochs", "times"), [(0.5, 2, [1] * 10), (0.7, 10, [7] * 10), (2.5, 2, [5] * 10), (2.5, 1, [2, 3] * 5)]
)
def test_an_epoch_continues_where_the_last_one_ended(ten, weight, epochs, times):
    prompts = mix([ten], (weight,))
    order = [drawn(prompts, epoch) for epoch in range(epochs)]
    assert {len(each) for each in order} == {int(10 * weight)}
    assert sorted(Counter(number for each in order for number in each).values()) == sorted(times)
    if weight == 0.5:
        assert set(drawn(prompts, 2)) not in (set(order[0]), set(order[1]))
        assert drawn(prompts, 0, seed=2) != order[0]


def test_skipped_rows_are_added_up(open_set):
    prompts = mix([open_set("one", 3, bad=1), open_set("two", 2, bad=2)])
    assert (prompts.num_skipped, len(prompts), prompts.num_rows) == ({"answer": 3}, 5, 8)
    with pytest.raises(DataError, match=r"data\.train_weights: 0\.05 of the 3 prompts of 'one'"):
        mix(prompts.parts, (0.05, 1.0))


def test_every_taken_prompt_can_be_rebuilt_by_its_id(open_stream, six, ten, open_set):
    stream = open_stream(mix([six, ten, open_set("set#2", 3)], [2.0, 0.5, 1.0]), batch_size=20)
    taken = stream.take(20)
    assert any("six:" in name and "#2" in name for name in names(taken))
    assert len(set(names(taken))) == 20
    for prompt in taken:
        again = stream.rebuild(prompt.prompt_id)
        assert (again.prompt_id, again.token_ids, again.text) == (prompt.prompt_id, prompt.token_ids, prompt.text)
    for unknown in ("six:99", "seven:0", "six", "six:x"):
        with pytest.raises(CheckpointError, match=f"{unknown}.*not among the training prompts"):
            stream.rebuild(unknown)


# Position


@pytest.mark.parametrize("taken", [0, 6, 12])
@pytest.mark.parametrize("weights", [(), (2.0, 0.5)])
def test_a_resumed_stream_continues_with_identical_prompts(ten, six, open_stream, taken, weights):
    prompts = mix([six, ten], weights) if weights else mix([ten])
    stream = open_stream(prompts)
    stream.take(taken)
    state = saved(stream)
    uninterrupted = stream.take(30)
    resumed = open_stream(prompts)
    resumed.take(3)  # an arbitrary position before
    resumed.load_state(state)
    assert resumed.state() == state
    again = resumed.take(30)
    assert names(again) == names(uninterrupted)
    assert [prompt.token_ids for prompt in again] == [prompt.token_ids for prompt in uninterrupted]
    assert resumed.state() == stream.state()


def test_the_ids_of_prompts_do_not_change_if_files_are_renamed_before_a_resume(ten, six, open_stream):
    stream = open_stream(mix([ten, six]), batch_size=8)
    kept = stream.take(3)
    state = json.loads(json.dumps(stream.state()))
    renamed = mix([replace(ten, name="geometry"), replace(six, name="rows")])
    resumed = open_stream(renamed.numbered_as(state), batch_size=8)
    resumed.load_state(state)
    assert [prompt.prompt_id for prompt in resumed.take(20)] == [prompt.prompt_id for prompt in stream.take(20)]
    assert [resumed.rebuild(prompt.prompt_id).text for prompt in kept] == [prompt.text for prompt in kept]
    assert resumed.state() == stream.state()


def test_other_data_or_another_order_are_named_by_their_options(processors, tmp_path, ten, open_set, open_stream):
    state = saved(open_stream(ten))
    nine = open_set("nine", 9)
    then, now = ten.content.spec, nine.content.spec
    changed = replace(nine, content=replace(nine.content, spec=then))
    for prompts, options, found in (
        (ten, {"seed": 2}, {"data.seed": "was 1, and is now 2"}),
        (ten, {"shuffle": False}, {"data.shuffle": "was true, and is now false"}),
        (nine, {}, {"data.train_files": f"was {then}, and is now {now}"}),
        (mix([ten, nine]), {}, {"data.train_files": f"was {then}, and is now {then}, {now}"}),
        (changed, {}, {"data.train_files": f"{then} has other rows (10 usable ones then, 9 now)"}),
        (mix([ten], [2]), {}, {"data.train_weights": "was [1.0], and is now [2.0]"}),
        (open_set("rows", 10), {}, {}),  # moved
    ):
        stream = open_stream(prompts, **options)
        assert stream.changes(state) == found
        assert stream.continues(state) == (not {"data.train_files", "data.train_weights"} & found.keys())

    def images(name, *, seed=1):
        path = write_images(tmp_path / name, 10)
        (tmp_path / name / "1.png").write_bytes(png(seed=seed))
        [part] = prompts_of(path, make_builder(processors)).parts
        return replace(part, content=replace(part.content, spec="rows.jsonl"))

    state = saved(open_stream(images("first")))
    assert open_stream(images("moved")).changes(state) == {}
    [text] = open_stream(images("changed", seed=20)).changes(state).values()
    assert text.startswith("rows.jsonl has other images")


def test_other_data_are_drawn_from_their_beginning_and_another_seed_continues_at_the_same_place(
    ten, open_set, open_stream
):
    stream = open_stream(ten)
    stream.take(12)
    state = saved(stream)
    nine = open_set("nine", 9)
    other, seeded, expected = open_stream(nine), open_stream(ten, seed=2), open_stream(ten, seed=2)
    other.load_state(state)
    assert ground_truths(other.take(8)) == ground_truths(open_stream(nine).take(8))
    seeded.load_state(state)
    expected.take(12)
    assert ground_truths(seeded.take(8)) == ground_truths(expected.take(8))


# Rows that become unusable


def test_a_prompt_whose_image_was_deleted_is_replaced_by_the_next_one(with_images, tmp_path, open_stream):
    prompts = with_images(10, 0.2)
    stream = open_stream(prompts, shuffle=False)
    (tmp_path / "1.png").unlink()
    assert ground_truths(stream.take(4)) == [0, 2, 3, 4]
    assert stream.state()["skipped"] == [[1, "image_missing"]]
    assert values(stream.metrics())["data/num_skipped"] == 1
    assert ground_truths(stream.take(4)) == [5, 6, 7, 8]
    (tmp_path / "1.png").write_bytes(png(seed=1))
    # Skipped prompts stay skipped, so that a resume gives the same order.
    assert ground_truths(stream.take(4)) == [0, 2, 3, 4]
    resumed = open_stream(prompts, shuffle=False)
    resumed.load_state(saved(stream))
    assert ground_truths(resumed.take(4)) == ground_truths(stream.take(4)) == [5, 6, 7, 8]
    assert resumed.state()["skipped"] == [[1, "image_missing"]]


@pytest.mark.faults
def test_rows_that_become_unusable_or_usable_do_not_change_the_order_of_a_resumed_stream(
    with_images, tmp_path, open_stream
):
    image = tmp_path / "7.png"
    with_images(10)
    (tmp_path / "9.png").unlink()  # before the run begins
    stream = open_stream(with_images(10, 0.3, written=True), batch_size=2, prefetch=False)
    stream.take(2)
    state = saved(stream)
    image.unlink()
    (tmp_path / "9.png").write_bytes(png(seed=9))
    uninterrupted = names(stream.take(24))
    scanned = with_images(10, 0.3, written=True)
    assert scanned.parts[0].row_indices == (0, 1, 2, 3, 4, 5, 6, 8, 9)
    prompts = scanned.numbered_as(state)
    lost, gained = prompts.changed_usability(load_contents(state["datasets"]))
    assert "1 rows can no longer be used: rows:7 (image_missing)" in lost
    assert "1 rows could not be used before, and can now: rows:9" in gained
    resumed = open_stream(prompts, batch_size=2)
    resumed.load_state(state)
    assert names(resumed.take(24)) == uninterrupted
    assert "rows:7" not in uninterrupted
    later = saved(resumed)
    assert later == saved(stream)

    image.write_bytes(png(seed=7))  # it stays skipped, as in the uninterrupted run
    restored = open_stream(with_images(10, 0.3, written=True).numbered_as(later), batch_size=2)
    restored.load_state(later)
    assert names(restored.take(24)) == names(stream.take(24))
    image.write_bytes(png(seed=70))
    (tmp_path / "8.png").write_bytes(png(seed=80))
    changed = open_stream(with_images(10, 0.3, written=True).numbered_as(later), batch_size=2)
    assert "has other images" in changed.changes(later)["data.train_files"]


@pytest.mark.faults
def test_prompts_that_a_lower_limit_makes_too_long_are_no_bad_rows_of_a_resumed_stream(
    processors, tmp_path, open_stream
):
    rows = [{"problem": "a " * (10 + 30 * (i % 2)), "answer": str(i)} for i in range(8)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    state = saved(open_stream(prompts_of(path, make_builder(processors)), batch_size=2))
    [part] = prompts_of(path, make_builder(processors, max_prompt_length=40)).numbered_as(state).parts
    assert part.lost == dict.fromkeys((1, 3, 5, 7), "overlong")
    resumed = open_stream(mix([part]), batch_size=2)
    resumed.load_state(state)
    assert sorted(ground_truths(resumed.take(4))) == [0, 2, 4, 6]


def test_too_many_deleted_images_are_an_error(with_images, tmp_path, open_stream):
    stream = open_stream(with_images(10, 0.1), shuffle=False)
    before = stream.state()
    for i in (1, 2):
        (tmp_path / f"{i}.png").unlink()
    with pytest.raises(DataError, match=r"2 of 10 rows(.|\n)*rows:2/images/0 \(2.png\): no such file"):
        stream.take(4)
    assert stream.state() == before
    for i in (1, 2):
        (tmp_path / f"{i}.png").write_bytes(png(seed=i))
    assert ground_truths(stream.take(4)) == [0, 1, 2, 3]
    short = open_stream(with_images(4, 0.5), shuffle=False)
    (tmp_path / "3.png").unlink()  # an epoch without spare prompts ends early
    assert [ground_truths(short.take(4)) for _ in range(2)] == [[0, 1, 2, 0], [1, 2, 0, 1]]
    gone = open_stream(with_images(4, 1.0))
    for i in range(4):
        (tmp_path / f"{i}.png").unlink()
    with pytest.raises(DataError, match="no row of the dataset"):
        gone.take(4)


# Threads


def test_each_prompt_is_processed_once_and_the_next_batch_is_built_in_advance(processors, with_images, open_stream):
    own = counting(processors)
    prompts, processor = with_images(12, own=own), own.image_processor
    stream = open_stream(prompts, prefetch=False)
    for step in (1, 2, 3):
        stream.take(4)
        assert processor.calls == 4 * step
    ahead = open_stream(prompts)
    ahead.take(4)
    ahead.close()  # waits for prompts being built
    assert 16 <= processor.calls <= 20


def test_close_ends_the_threads(ten, open_stream):
    stream = open_stream(ten)
    stream.take(4)
    stream.close()
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prompts")]
    with pytest.raises(RuntimeError):
        stream.take(8)
