"""Rollouts and images are written in the background: complete, once, in order."""

from __future__ import annotations

import hashlib
import io
import threading
from dataclasses import replace

import pytest
import torch
from PIL import Image

from trigon.errors import BadRow
from trigon.report.rollouts import read_rollouts, rollout_rows
from trigon.report.run_folder import MAX_IMAGE_BYTES, MAX_PENDING, ImageStore, RunFolder, RunWriter
from trigon.types import (
    Completion,
    EncodedMedia,
    Prompt,
    Rollout,
    RolloutGroup,
    Score,
    TokenLogprobs,
    TrainGroup,
    TrainSequence,
    Turn,
)

SCORE = Score(1.0, {"overall": 1.0}, "ok", "")


def png(colour, side=20):
    stream = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(stream, "PNG")
    return stream.getvalue()


RED, BLUE = png("red"), png("blue")


def group(prompt_id, *, images=1, lengths=(2, 1)):
    prompt = Prompt(prompt_id, (1, 2, 3), None, "<image>How many?", "4", {}, ("a.png",) * images)
    completions = [Completion(tuple(range(5, 5 + n)), (-0.5,) * n, "stop", "4", 0) for n in lengths]
    return RolloutGroup(prompt, tuple(Rollout(each, SCORE) for each in completions))


def learned(source, *, mask=(1.0, 1.0), old=None):
    """Return what the update learns from a group: advantages 1, 2, ... of the first completion."""
    sequences = []
    for rollout, keep in zip(source.rollouts, mask, strict=True):
        length = len(rollout.completion.token_ids)
        sequences.append(
            TrainSequence(
                rollout.completion.token_ids,
                torch.full((length,), keep),
                torch.arange(1.0, length + 1),
                torch.full((length,), -0.5),
                None if old is None else torch.full((length,), old),
                None,
            )
        )
    return TrainGroup(source.prompt, tuple(sequences))


@pytest.fixture
def folder(tmp_path):
    with RunFolder(tmp_path) as folder:
        yield folder


@pytest.fixture
def warned():
    return []


@pytest.fixture
def recorder(folder, warned):
    recorder = RunWriter(
        folder,
        images=ImageStore(folder.path, max_side=64),
        token_texts=lambda ids: [f"<{token}>" for token in ids],
        warn=warned.append,
    )
    yield recorder
    recorder.close()


def written(folder, name):
    return list(read_rollouts(folder.path / "rollouts" / name))


def no_images(prompt_id):
    return []


def test_each_distinct_image_is_stored_once_as_its_file(folder, recorder, warned):
    images = {"train:1": [RED, BLUE], "train:2": [RED]}
    read = []

    def read_images(prompt_id):
        read.append(prompt_id)
        return images[prompt_id]

    rows = rollout_rows([group("train:1", images=2), group("train:2"), group("train:3", images=0)])
    for step in (1, 2):
        recorder.rollouts(step, "train", rows, read_images)
    recorder.flush()
    names = [f"images/{hashlib.sha256(each).hexdigest()}.png" for each in (RED, BLUE)]
    for name in ("step_000001.jsonl", "step_000002.jsonl"):
        by_prompt = {row.prompt_id: row.image_files for row in written(folder, name)}
        assert by_prompt == {"train:1": tuple(names), "train:2": (names[0],), "train:3": ()}
    assert [(folder.path / name).read_bytes() for name in names] == [RED, BLUE]
    assert len(list((folder.path / "images").iterdir())) == 2
    assert sorted(read) == ["train:1", "train:2"]  # not again in the second step
    recorder.rollouts(1, "validation", rows[:1], lambda _: [BLUE, BLUE])  # another prompt of the same id
    recorder.flush()
    assert written(folder, "validation_000001.jsonl")[0].image_files == (names[1], names[1])

    def fail(prompt_id):
        raise BadRow("the file is gone")

    recorder.rollouts(3, "train", rollout_rows([group("train:4")]), fail)
    recorder.flush()
    assert [row.image_files for row in written(folder, "step_000003.jsonl")] == [(), ()]
    assert warned == ["the images of train:4 are not recorded: the file is gone"]


def test_a_large_image_is_reduced_and_found_again_by_a_resumed_run(tmp_path):
    noise = Image.effect_noise((800, 400), 100)
    stream = io.BytesIO()
    noise.save(stream, "PNG")
    assert len(stream.getvalue()) > MAX_IMAGE_BYTES
    name = ImageStore(tmp_path, max_side=200).add(stream.getvalue(), where="x")
    assert name == f"images/{hashlib.sha256(stream.getvalue()).hexdigest()}.jpg"
    with Image.open(tmp_path / name) as image:
        assert image.size == (200, 100)
    before = (tmp_path / name).stat().st_mtime_ns
    assert ImageStore(tmp_path, max_side=100).add(stream.getvalue(), where="x") == name
    assert (tmp_path / name).stat().st_mtime_ns == before
    (tmp_path / name).write_bytes(b"")  # as a machine that lost power may leave it
    ImageStore(tmp_path, max_side=200).add(stream.getvalue(), where="x")
    assert (tmp_path / name).stat().st_size > 0


def test_the_run_continues_while_files_are_written_but_not_further_than_some_files(folder, recorder):
    release, wrote = threading.Event(), threading.Event()

    def read_images(prompt_id):
        assert release.wait(10)
        return [RED]

    rows = rollout_rows([group("train:1")])
    for step in range(1, MAX_PENDING + 1):
        recorder.rollouts(step, "train", rows, read_images)  # returns at once

    def one_more():
        recorder.rollouts(MAX_PENDING + 1, "train", rows, read_images)
        wrote.set()

    thread = threading.Thread(target=one_more)
    thread.start()
    assert not wrote.wait(0.2)
    release.set()
    assert wrote.wait(10)
    thread.join()
    recorder.flush()
    assert len(list((folder.path / "rollouts").iterdir())) == MAX_PENDING + 1


def test_what_cannot_be_written_is_lost_with_one_warning_and_later_files_are_written(folder, recorder, warned):
    (folder.path / "rollouts").write_text("not a folder")
    for step in (1, 2):
        recorder.rollouts(step, "train", rollout_rows([group("train:1")]), no_images)
    recorder.flush()
    [warning] = warned
    assert warning.startswith("rollouts cannot be written: ")
    assert warning.endswith("They are lost; the run continues and tries again in each step")
    (folder.path / "rollouts").unlink()
    recorder.rollouts(3, "train", rollout_rows([group("train:1")]), no_images)
    recorder.flush()
    assert warned[1:] == ["rollouts are written again"]
    assert [path.name for path in (folder.path / "rollouts").iterdir()] == ["step_000003.jsonl"]


@pytest.mark.parametrize("call", ["rollouts", "flush", "close"])
def test_any_other_error_is_raised_by_a_later_call(folder, recorder, call):
    def read_images(prompt_id):
        raise ZeroDivisionError

    recorder.rollouts(1, "train", rollout_rows([group("train:1")]), read_images)
    while not recorder._pending[0].done():
        pass
    arguments = (2, "train", [], no_images) if call == "rollouts" else ()
    with pytest.raises(ZeroDivisionError):
        getattr(recorder, call)(*arguments)


def test_a_restarted_run_moves_the_images_with_the_rollouts_and_stores_them_again(folder, recorder):
    recorder.rollouts(1, "train", rollout_rows([group("train:1")]), lambda _: [RED])
    recorder.flush()
    store = ImageStore(folder.path, max_side=64)  # as a run opens it, before it resumes
    moved = folder.rewind(0)
    assert moved is not None
    [row, _] = read_rollouts(moved / "rollouts" / "step_000001.jsonl")
    assert (moved / row.image_files[0]).read_bytes() == RED
    assert not (folder.path / "images").exists()
    assert (folder.path / store.add(RED, where="x")).read_bytes() == RED


def test_tokens_have_the_values_of_the_update(folder, recorder):
    groups = [group("train:1", lengths=(2, 1))]
    third = torch.tensor([1 / 3, 2 / 3])
    scored = [TokenLogprobs(-third, third, None), TokenLogprobs(-third[:1], third[:1], None)]
    trained = [learned(groups[0], mask=(1.0, 0.0))]
    rows = rollout_rows(groups, learned=trained, recorded={0: scored})
    recorder.rollouts(1, "train", rows, no_images)
    recorder.flush()
    assert [row.advantage for row in rows] == [1.5, None]
    first, second = [row.tokens for row in written(folder, "step_000001.jsonl")]
    assert (first.ids, first.texts, first.sampling_logprobs) == ([5, 6], ["<5>", "<6>"], [-0.5, -0.5])
    assert (first.advantages, first.old_logprobs, first.entropy) == (
        [1.0, 2.0],
        [-0.333333, -0.666667],
        [0.333333, 0.666667],
    )
    assert (second.advantages, second.entropy) == (None, [0.333333])


def test_old_logprobs_are_those_of_the_loss_where_it_has_them():
    groups = [group("train:1", lengths=(1, 1))]
    scored = [TokenLogprobs(torch.tensor([-0.25]), torch.tensor([0.5]), None)] * 2
    trained = [learned(groups[0], old=-0.125)]
    rows = rollout_rows(groups, learned=trained, recorded={0: scored})
    assert [row.tokens.old_logprobs for row in rows] == [[-0.125], [-0.125]]
    assert [row.advantage for row in rows] == [1.0, 1.0]
    without = rollout_rows(groups, recorded={0: None})
    assert [(row.tokens.old_logprobs, row.tokens.entropy) for row in without] == [(None, None)] * 2
    assert replace(without[0], tokens=None) == rollout_rows(groups)[0]


def test_turns_are_written_with_the_images_of_their_observations(folder, recorder):
    images = EncodedMedia((RED, BLUE), tuple(hashlib.sha256(file).hexdigest() for file in (RED, BLUE)))
    episode = Completion(
        (5, 6, 9, 9, 7),
        (-0.5,) * 3,
        "stop",
        "left\nright",
        0,
        turns=(
            Turn(0, 2, "left", reward=0.0),
            Turn(
                4, 5, "right", "<image><image> You moved.", reward=1.0, num_images=2, image_sizes=((28, 56), (84, 28))
            ),
        ),
        vision=images,
    )
    prompt = group("train:0", images=0).prompt
    one = RolloutGroup(prompt, (Rollout(episode, SCORE), *group("train:0", images=0).rollouts[:1]))
    recorder.rollouts(1, "train", rollout_rows([one]), no_images)
    recorder.flush()
    first, second = written(folder, "step_000001.jsonl")
    assert [(turn.text, turn.observation, turn.num_tokens, turn.reward) for turn in first.turns] == [
        ("left", "", 2, 0.0),
        ("right", "<image><image> You moved.", 1, 1.0),
    ]
    assert first.num_tokens == 3
    assert [turn.image_sizes for turn in first.turns] == [(), ((28, 56), (84, 28))]
    assert first.turns[0].image_files == ()
    assert [(folder.path / name).read_bytes() for name in first.turns[1].image_files] == [RED, BLUE]
    assert second.turns == ()
