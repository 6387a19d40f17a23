"""Prompts come in a seeded order that does not depend on interruptions, damaged rows or threads."""

import io
import json
import threading
from dataclasses import replace

import datasets
import pytest
from PIL import Image

from support.builders import make_builder
from trigon.data.dataset import open_prompts
from trigon.data.mixture import mix
from trigon.data.stream import PromptStream
from trigon.errors import CheckpointError, DataError
from trigon.metrics import values


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("cache")
    yield
    datasets.config.HF_DATASETS_CACHE = before


def png(seed):
    stream = io.BytesIO()
    Image.new("RGB", (56, 56), (seed, 2 * seed, 3 * seed)).save(stream, "PNG")
    return stream.getvalue()


def write(folder, num_rows, *, images=False):
    rows = []
    for i in range(num_rows):
        if images:
            (folder / f"{i}.png").write_bytes(png(i))
        rows.append(
            {"images": [f"{i}.png"] if images else [], "problem": "<image>?" if images else "?", "answer": str(i)}
        )
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def scan(path, processors, *, max_bad_row_fraction=0.0):
    builder = make_builder(processors)
    return open_prompts(
        str(path),
        builder,
        filter_overlong_prompts=True,
        max_bad_row_fraction=max_bad_row_fraction,
        num_workers=2,
    )


@pytest.fixture(scope="module")
def ten(processors, tmp_path_factory):
    return scan(write(tmp_path_factory.mktemp("ten"), 10), processors)


@pytest.fixture
def open_stream():
    opened = []

    def open_stream(prompt_set, *, batch_size=4, seed=1, shuffle=True, prefetch=True, accepted_changes=()):
        stream = PromptStream(
            prompt_set,
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            prefetch=prefetch,
            num_workers=2,
            accepted_changes=accepted_changes,
        )
        opened.append(stream)
        return stream

    yield open_stream
    for stream in opened:
        stream.close()


def ground_truths(prompts):
    return [int(prompt.ground_truth) for prompt in prompts]


# Order


def test_the_order_is_the_same_on_every_machine(ten, open_stream):
    stream = open_stream(ten)
    assert [ground_truths(stream.take(4)) for _ in range(4)] == [[4, 6, 3, 0], [2, 9, 1, 7], [1, 8, 2, 3], [0, 7, 9, 5]]


def test_an_epoch_has_complete_batches_without_repetition(ten, open_stream):
    stream = open_stream(ten)
    assert stream.prompts_per_epoch == 8
    epochs = [ground_truths(stream.take(4)) + ground_truths(stream.take(4)) for _ in range(20)]
    assert all(len(set(epoch)) == 8 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 20
    assert set().union(*epochs) == set(range(10))  # prompts left over by one epoch are in others


def test_the_order_depends_on_the_seed(ten, open_stream):
    assert ground_truths(open_stream(ten, seed=1).take(8)) == ground_truths(open_stream(ten, seed=1).take(8))
    assert ground_truths(open_stream(ten, seed=1).take(8)) != ground_truths(open_stream(ten, seed=2).take(8))


def test_without_shuffling_the_order_is_the_datasets(ten, open_stream):
    stream = open_stream(ten, shuffle=False)
    assert ground_truths(stream.take(8)) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert ground_truths(stream.take(8)) == [0, 1, 2, 3, 4, 5, 6, 7]


def test_take_sizes_and_prefetching_do_not_change_the_order(ten, open_stream):
    expected = ground_truths(open_stream(ten).take(24))
    for prefetch in (True, False):
        stream = open_stream(ten, prefetch=prefetch)
        assert [truth for size in (1, 7, 3, 5, 8) for truth in ground_truths(stream.take(size))] == expected


def test_metrics_have_the_position_in_epochs(ten, open_stream):
    stream = open_stream(ten)
    assert values(stream.metrics()) == {"data/epoch": 0.0, "data/num_skipped": 0.0}
    stream.take(4)
    assert values(stream.metrics()) == {"data/epoch": 0.5, "data/num_skipped": 0.0}
    stream.take(8)
    assert values(stream.metrics()) == {"data/epoch": 1.5, "data/num_skipped": 0.0}
    assert stream.epoch == 1


def test_fewer_prompts_than_a_batch_are_an_error(ten):
    with pytest.raises(DataError, match="10 usable prompts, fewer than the 11 of one batch"):
        PromptStream(ten, batch_size=11, seed=1, shuffle=True, prefetch=True, num_workers=1)


# Position


@pytest.mark.parametrize("taken", [0, 4, 6, 8, 12])
def test_a_resumed_stream_continues_with_identical_prompts(ten, open_stream, taken):
    stream = open_stream(ten)
    stream.take(taken)
    state = json.loads(json.dumps(stream.state()))
    uninterrupted = stream.take(16)
    resumed = open_stream(ten)
    resumed.take(3)  # an arbitrary position before
    resumed.load_state(state)
    assert resumed.state() == state
    again = resumed.take(16)
    assert [prompt.prompt_id for prompt in again] == [prompt.prompt_id for prompt in uninterrupted]
    assert [prompt.token_ids for prompt in again] == [prompt.token_ids for prompt in uninterrupted]
    assert resumed.state() == stream.state()


def test_a_position_in_other_data_is_an_error(ten, processors, tmp_path, open_stream):
    state = open_stream(ten).state()
    nine = scan(write(tmp_path, 9), processors)
    with pytest.raises(CheckpointError, match=r"data\.seed was 1, and is now 2; restore it"):
        open_stream(ten, seed=2).load_state(state)
    with pytest.raises(CheckpointError, match=r"data\.shuffle was true, and is now false"):
        open_stream(ten, shuffle=False).load_state(state)
    old = {key: value for key, value in state.items() if key != "datasets"}
    with pytest.raises(CheckpointError, match=r"10 usable rows then, and has 9 now in \S+rows\.jsonl; restore it"):
        open_stream(nine).load_state(old)
    open_stream(ten).load_state(old)


def test_a_position_in_other_data_names_the_files(ten, processors, tmp_path, open_stream):
    def problem(prompts):
        state = json.loads(json.dumps(open_stream(ten).state()))
        with pytest.raises(CheckpointError) as caught:
            open_stream(prompts).check_state(state)
        assert ten.fingerprint not in str(caught.value)
        return str(caught.value)

    nine = scan(write(tmp_path, 9), processors)
    assert f"data.train_files was {ten.spec}, and is now {nine.spec};" in problem(nine)
    assert f"data.train_files was {ten.spec}, and is now {ten.spec}, {nine.spec};" in problem(mix([ten, nine], []))
    changed = replace(nine, spec=ten.spec)
    assert f"{ten.spec} has other rows (10 usable ones then, 9 now);" in problem(changed)
    assert "data.train_weights was [1.0], and is now [2.0];" in problem(mix([ten], [2]))
    moved = scan(write(tmp_path, 10), processors)
    open_stream(moved).check_state(open_stream(ten).state())


def test_accepted_data_are_drawn_from_their_beginning_and_an_accepted_seed_at_the_same_place(
    ten, processors, tmp_path, open_stream
):
    stream = open_stream(ten)
    stream.take(12)
    state = json.loads(json.dumps(stream.state()))
    nine = scan(write(tmp_path, 9), processors)
    other = open_stream(nine, accepted_changes=("data.train_files",))
    other.load_state(state)
    assert not other.continues(state)
    assert ground_truths(other.take(8)) == ground_truths(open_stream(nine).take(8))
    seeded = open_stream(ten, seed=2, accepted_changes=("data.seed",))
    seeded.load_state(state)
    assert seeded.continues(state)
    expected = open_stream(ten, seed=2)
    expected.take(12)
    assert ground_truths(seeded.take(8)) == ground_truths(expected.take(8))
    with pytest.raises(CheckpointError, match=r"data\.train_files was"):
        open_stream(nine, accepted_changes=("data.seed",)).load_state(state)
    open_stream(nine, seed=2, accepted_changes=("all",)).load_state(state)


@pytest.mark.faults
def test_an_image_file_with_other_content_is_other_data(processors, tmp_path, open_stream):
    def images(name, *, number=1):
        folder = tmp_path / name
        folder.mkdir()
        prompts_file = write(folder, 10, images=True)
        (folder / "1.png").write_bytes(png(number))
        return replace(scan(prompts_file, processors), spec="rows.jsonl")

    state = json.loads(json.dumps(open_stream(images("first")).state()))
    open_stream(images("moved")).load_state(state)
    changed = images("changed", number=2)
    assert changed.fingerprint == state["fingerprint"]
    with pytest.raises(
        CheckpointError, match=r"rows\.jsonl has other images or videos in the files that its rows name"
    ):
        open_stream(changed).load_state(state)
    without = state | {
        "datasets": [{key: value for key, value in each.items() if key != "files"} for each in state["datasets"]]
    }
    open_stream(changed).load_state(without)  # of an earlier version


# Rows that become unusable


def test_a_prompt_whose_image_was_deleted_is_replaced_by_the_next_one(processors, tmp_path, open_stream):
    prompts = scan(write(tmp_path, 10, images=True), processors, max_bad_row_fraction=0.2)
    stream = open_stream(prompts, shuffle=False)
    (tmp_path / "1.png").unlink()
    assert ground_truths(stream.take(4)) == [0, 2, 3, 4]
    assert stream.num_skipped == {"image_missing": 1}
    assert values(stream.metrics())["data/num_skipped"] == 1
    assert ground_truths(stream.take(4)) == [5, 6, 7, 8]
    (tmp_path / "1.png").write_bytes(png(1))
    assert ground_truths(stream.take(4)) == [
        0,
        2,
        3,
        4,
    ]  # skipped prompts stay skipped, so that a resume gives the same order
    state = stream.state()
    resumed = open_stream(prompts, shuffle=False)
    resumed.load_state(json.loads(json.dumps(state)))
    assert ground_truths(resumed.take(4)) == ground_truths(stream.take(4)) == [5, 6, 7, 8]
    assert resumed.num_skipped == {"image_missing": 1}


def test_an_epoch_without_spare_prompts_ends_early(processors, tmp_path, open_stream):
    prompts = scan(write(tmp_path, 4, images=True), processors, max_bad_row_fraction=0.5)
    stream = open_stream(prompts, shuffle=False)
    (tmp_path / "3.png").unlink()
    assert ground_truths(stream.take(4)) == [0, 1, 2, 0]
    assert ground_truths(stream.take(4)) == [1, 2, 0, 1]


def test_too_many_deleted_images_are_an_error(processors, tmp_path, open_stream):
    prompts = scan(write(tmp_path, 10, images=True), processors, max_bad_row_fraction=0.1)
    stream = open_stream(prompts, shuffle=False)
    before = stream.state()
    for i in (1, 2):
        (tmp_path / f"{i}.png").unlink()
    with pytest.raises(DataError, match=r"2 of 10 rows cannot be used(.|\n)*rows:2/images/0 \(2.png\): no such file"):
        stream.take(4)
    assert stream.state() == before
    for i in (1, 2):
        (tmp_path / f"{i}.png").write_bytes(png(i))
    assert ground_truths(stream.take(4)) == [0, 1, 2, 3]


def test_a_stream_without_usable_prompts_is_an_error(processors, tmp_path, open_stream):
    prompts = scan(write(tmp_path, 4, images=True), processors, max_bad_row_fraction=1.0)
    for i in range(4):
        (tmp_path / f"{i}.png").unlink()
    with pytest.raises(DataError, match="no row of the dataset can be used any more"):
        open_stream(prompts).take(4)


# Threads


def test_each_prompt_is_processed_once(processors, tmp_path, open_stream):
    prompts = scan(write(tmp_path, 12, images=True), processors)
    stream = open_stream(prompts, prefetch=False)
    for step in (1, 2, 3):
        stream.take(4)
        assert prompts.builder.image_processor.calls == 4 * step


def test_the_next_batch_is_built_in_advance(processors, tmp_path, open_stream):
    prompts = scan(write(tmp_path, 12, images=True), processors)
    stream = open_stream(prompts)
    stream.take(4)
    stream.close()  # waits for prompts being built
    started = prompts.builder.image_processor.calls - 4
    assert 0 <= started <= 4
    again = open_stream(prompts)
    first = again.take(4)
    second = again.take(4)
    assert [prompt.prompt_id for prompt in first + second] == [
        prompt.prompt_id for prompt in open_stream(prompts, prefetch=False).take(8)
    ]


def test_close_ends_the_threads(ten, open_stream):
    stream = open_stream(ten)
    stream.take(4)
    stream.close()
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prompts")]
    with pytest.raises(RuntimeError):
        stream.take(8)
