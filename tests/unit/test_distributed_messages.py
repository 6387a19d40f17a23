"""Messages between driver and workers: what is read arrives bit for bit, each file once."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from trigon.distributed import messages
from trigon.distributed.messages import (
    Message,
    StoredFiles,
    for_sampling,
    for_scoring,
    for_update,
    pack,
    unpack,
    without_observed_images,
)
from trigon.rollout.protocol import Interruption, Until
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
    Vision,
)

SPECIAL_BITS = np.array(
    [0x7FC00000, 0xFFC12345, 0x7F800000, 0xFF800000, 0x00000000, 0x80000000, 0x00000001, 0x7F7FFFFF, 0x3DCCCCCD],
    dtype=np.uint32,
)
"""NaNs (one with a payload), infinities, zeros, the smallest denormal, the largest float, 0.1."""

FIRST, SECOND = b"first", bytes(range(256))
SCORE = Score(1.0, {"overall": 1.0}, "ok", "")


def media(*files):
    return EncodedMedia(files, tuple(hashlib.sha256(file).hexdigest() for file in files))


def prompt(name="train:0", vision=None, row=None):
    row = {"level": 5} if row is None else row
    return Prompt(name, (1, 2, 151655), vision, "a question", 4, row, ("figure.png",), read_media=lambda: None)


EPISODE = Completion(
    (1, 2, 9, 9, 3),
    (-0.5, -0.25, -1.0),
    "turns",
    "a\nb",
    7,
    turns=(Turn(0, 2, "a", reward=0.1), Turn(4, 5, "b", "<image>\udcff", -1e-300, 2, ((56, 28), (84, 56)))),
    vision=media(FIRST, SECOND),
    policy_versions=((6, 2), (7, 1)),
)


def test_completions_keep_all_fields_and_the_files_of_their_images():
    failed = Completion((2,), (0.0,), "stop", "nul \0 😀 \udcff", 7, error="the environment raised KeyError: 'x'")
    received = unpack(pack([[EPISODE, failed], []]))
    assert received == [[EPISODE, failed], []]
    assert received[0][0].vision.encoded == (FIRST, SECOND)


def test_tensors_keep_their_bits_and_can_be_written():
    values = torch.from_numpy(np.resize(SPECIAL_BITS, 50).view(np.float32).copy())
    [[part], empty] = unpack(pack([[values[3:20]], values[:0]]))  # a view, as of a packed row
    assert torch.equal(part.view(torch.int32), values[3:20].view(torch.int32))
    assert (part.dtype, len(empty)) == (torch.float32, 0)
    part += 1
    outputs = TokenLogprobs(values, values, None)
    assert torch.equal(unpack(pack({3: [outputs]}))[3][0].entropy.view(torch.int32), values.view(torch.int32))


def test_prompts_are_sent_with_what_an_engine_reads():
    sent = [prompt(vision=media(FIRST), row={"level": 5, "image": object()}), prompt("bücher \udcff:2")]
    assert [each.row for each in unpack(pack(for_sampling(sent, with_rows=True)))] == [{"level": 5}, {"level": 5}]
    received = unpack(pack(for_sampling(sent, with_rows=False)))
    for before, after in zip(sent, received, strict=True):
        assert (after.prompt_id, after.token_ids, after.vision) == (before.prompt_id, before.token_ids, before.vision)
        assert (after.text, after.ground_truth, after.row, after.image_refs) == ("", None, {}, ())
        assert after.read_media is None
    assert received[0].vision.encoded == (FIRST,)


def test_scoring_gets_tokens_and_media_and_an_update_all_tensors():
    one = prompt(vision=media(SECOND))
    group = RolloutGroup(one, (Rollout(EPISODE, SCORE),), baseline=Rollout(EPISODE, SCORE))
    [scored] = unpack(pack(for_scoring([group])))
    [rollout] = scored.rollouts
    assert (rollout.completion.token_ids, rollout.completion.sampled) == (EPISODE.token_ids, EPISODE.sampled)
    assert (rollout.completion.sampling_logprobs, rollout.completion.text, scored.baseline) == ((), "", None)
    assert (scored.prompt.vision.encoded, rollout.completion.vision.encoded) == ((SECOND,), (FIRST, SECOND))

    values = torch.tensor([1.0, 2.0, 3.0])
    trained = TrainSequence(
        EPISODE.token_ids, values, values, values, None, values, EPISODE.sampled, EPISODE.vision, returns=values
    )
    [received] = unpack(pack(for_update([TrainGroup(one, (trained,))])))
    [sequence] = received.sequences
    assert (sequence.sampled, sequence.vision, sequence.old_logprobs) == (EPISODE.sampled, EPISODE.vision, None)
    assert torch.equal(sequence.returns, values)
    assert received.prompt.row == {}


def test_pixels_are_no_part_of_a_message():
    vision = Vision(torch.zeros(4, 8), torch.tensor([[1, 2, 2]]), ("",))
    with pytest.raises(AssertionError, match="pixels"):
        pack([prompt(vision=vision)])


def test_images_are_sent_with_begun_completions_that_have_ended_only():
    unfinished = replace(EPISODE, finish_reason="unfinished")
    until = Until(5, num_required=2, begun=((EPISODE, unfinished), ()), interruption=Interruption())
    message = pack(without_observed_images(until))
    assert set(message.files.values()) == {FIRST, SECOND}
    begun = ((EPISODE, replace(unfinished, vision=None)), ())
    assert unpack(message) == Until(5, num_required=2, begun=begun)
    assert not pack(without_observed_images(replace(until, begun=((unfinished,),)))).files


def test_a_file_is_stored_once_and_the_least_recently_used_are_dropped(monkeypatch):
    puts, store = [], {}

    def put(file):
        puts.append(file)
        store[name := f"reference {len(puts)}"] = file
        return name

    monkeypatch.setattr(messages.ray, "put", put)
    monkeypatch.setattr(messages.ray, "get", lambda names: [store[name] for name in names])
    files = StoredFiles(max_bytes=len(FIRST) + len(SECOND))
    for sent, num_stored in (((FIRST, SECOND), 2), ((FIRST,), 2), ((b"third",), 3), ((FIRST,), 3), ((SECOND,), 4)):
        message = pack(for_sampling([prompt(vision=media(*sent))] * 2, with_rows=False))
        before = len(puts)
        stored, num_bytes = files.store(message)
        assert len(puts) == num_stored
        assert num_bytes == len(message.content) + sum(map(len, puts[before:]))
        assert [each.vision.encoded for each in unpack(stored)] == [sent, sent]
    assert Message(b"abc", {"a": b"12", "b": object()}).num_bytes == 5
