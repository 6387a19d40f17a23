"""Serialization: decoding returns what was encoded, bit for bit; messages have little overhead."""

import hashlib
import math
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from trigon.distributed.serialization import (
    decode_completions,
    decode_logprobs,
    decode_prompts,
    decode_rollouts,
    decode_train,
    decode_until,
    encode_completions,
    encode_logprobs,
    encode_prompts,
    encode_rollouts,
    encode_train,
    encode_until,
)
from trigon.rollout.protocol import Until
from trigon.types import (
    Completion,
    EncodedMedia,
    Prompt,
    Rollout,
    RolloutGroup,
    Score,
    TrainGroup,
    TrainSequence,
    Turn,
    Vision,
)

# Two NaNs (one with a payload), infinities, zeros, the smallest denormal, the largest float, 0.1.
SPECIAL_BITS = np.array(
    [0x7FC00000, 0xFFC12345, 0x7F800000, 0xFF800000, 0x00000000, 0x80000000, 0x00000001, 0x7F7FFFFF, 0x3DCCCCCD],
    dtype=np.uint32,
)
TEXTS = ["", "plain", "Zoë: ∑ ≤ 3 😀", "nul \0 inside", "lone \udcff surrogate"]


def encoded_images(*files):
    return EncodedMedia(files, tuple(hashlib.sha256(file).hexdigest() for file in files))


def prompt(name="train:0", token_ids=(1, 2, 3), vision=None):
    return Prompt(name, token_ids, vision, "a question", {"answer": 4}, {"level": 5}, ("figure.png",))


def assert_same_prompt(sent, received):
    assert (received.prompt_id, received.token_ids) == (sent.prompt_id, sent.token_ids)
    if sent.vision is None:
        assert received.vision is None
    else:
        assert (received.vision.encoded, received.vision.hashes) == (sent.vision.encoded, sent.vision.hashes)
    assert (received.text, received.ground_truth, received.row, received.image_refs) == ("", None, {}, ())


def special_floats(length):
    return torch.from_numpy(np.resize(SPECIAL_BITS, length).view(np.float32).copy())


def assert_same_bits(sent, received):
    assert received.dtype == torch.float32
    assert torch.equal(sent.view(torch.int32), received.view(torch.int32))


PROMPTS = [
    prompt(),
    prompt("train:1", (2**31 - 1,)),
    prompt("bücher 📚\udcff:2", (7, 0, 151655), encoded_images(b"\x89PNG", b"", bytes(range(256)))),
    prompt("", (), encoded_images(b"one")),
]


@pytest.mark.parametrize("sent", [[], PROMPTS[:1], PROMPTS])
def test_prompts_keep_their_ids_and_files(sent):
    received = decode_prompts(encode_prompts(sent))
    assert len(received) == len(sent)
    for before, after in zip(sent, received, strict=True):
        assert_same_prompt(before, after)


def test_pixels_are_rejected():
    vision = Vision(torch.zeros(4, 8), torch.tensor([[1, 2, 2]]), ("",))
    with pytest.raises(AssertionError, match="train:0: pixels are not serialized"):
        encode_prompts([prompt(vision=vision)])


def test_token_ids_beyond_32_bits_are_an_error():
    with pytest.raises(OverflowError):
        encode_prompts([prompt(token_ids=(2**31,))])


def test_completions_keep_all_fields():
    long = tuple(range(1000))
    sent = [
        [],
        [
            Completion((5,), (-0.5,), "stop", TEXTS[0], 0),
            Completion(long, tuple(-token / 1024 for token in long), "length", TEXTS[1], 2**31 - 1),
        ],
        [],
        [Completion((5, 6), (0.0, -0.0), "length", text, 17) for text in TEXTS],
        [],
    ]
    assert decode_completions(encode_completions(sent)) == sent
    assert decode_completions(encode_completions([])) == []
    assert decode_completions(encode_completions([[], []])) == [[], []]


def test_sampling_logprobs_keep_their_float32_bits():
    values = special_floats(len(SPECIAL_BITS))
    sent = Completion((1,) * len(values), tuple(values.tolist()), "stop", "", 0)
    [[received]] = decode_completions(encode_completions([[sent]]))
    assert all(type(value) is float for value in received.sampling_logprobs)
    numbers = ~values.isnan()
    assert_same_bits(values[numbers], torch.tensor(received.sampling_logprobs)[numbers])
    assert [math.isnan(value) for value in received.sampling_logprobs] == (~numbers).tolist()


def test_rollouts_keep_prompts_and_token_ids():
    score = Score(1.0, {"overall": 1.0}, "ok", "")
    sent = [
        RolloutGroup(
            one, tuple(Rollout(Completion(ids, (-0.5,) * len(ids), "length", "text", 3), score) for ids in token_ids)
        )
        for one, token_ids in zip(PROMPTS, [[(1,), (2, 3)], [(4,)], [], [(5, 6, 7), (8,)]], strict=True)
    ]
    received = decode_rollouts(encode_rollouts(sent))
    for before, after in zip(sent, received, strict=True):
        assert_same_prompt(before.prompt, after.prompt)
        assert [rollout.completion.token_ids for rollout in after.rollouts] == [
            rollout.completion.token_ids for rollout in before.rollouts
        ]
    assert received[0].rollouts[0] == Rollout(Completion((1,), (), "stop", "", 0), Score(0.0, {}, "ok", ""))
    assert decode_rollouts(encode_rollouts([])) == []


def sequence(length, *, old, ref, seed=0):
    random = torch.Generator().manual_seed(seed)

    def values():
        return torch.randn(length, generator=random)

    return TrainSequence(
        token_ids=tuple(range(length)),
        loss_mask=(values() > 0).float(),
        advantages=values(),
        sampling_logprobs=special_floats(length),
        old_logprobs=values() if old else None,
        ref_logprobs=values() if ref else None,
    )


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("ref", [True, False])
@pytest.mark.parametrize("critic", [True, False])
def test_train_groups_are_equal_bit_for_bit(old, ref, critic):
    sent = [
        TrainGroup(PROMPTS[0], (sequence(1, old=old, ref=ref), sequence(300, old=old, ref=ref, seed=1))),
        TrainGroup(PROMPTS[1], ()),
        TrainGroup(PROMPTS[2], (sequence(17, old=old, ref=ref, seed=2),)),
    ]
    if critic:
        sent = [
            replace(
                group,
                sequences=tuple(
                    replace(each, values=-each.advantages, returns=2 * each.advantages) for each in group.sequences
                ),
            )
            for group in sent
        ]
    received = decode_train(encode_train(sent))
    assert [len(group.sequences) for group in received] == [2, 0, 1]
    for before, after in zip(sent, received, strict=True):
        assert_same_prompt(before.prompt, after.prompt)
        for one, other in zip(before.sequences, after.sequences, strict=True):
            assert one.token_ids == other.token_ids
            fields = ("loss_mask", "advantages", "sampling_logprobs", "old_logprobs", "ref_logprobs")
            for field in (*fields, "values", "returns"):
                if getattr(one, field) is None:
                    assert getattr(other, field) is None
                else:
                    assert_same_bits(getattr(one, field), getattr(other, field))
    assert decode_train(encode_train([])) == []


def test_old_and_ref_logprobs_may_be_missing_for_single_sequences():
    sent = [sequence(2, old=True, ref=False), sequence(2, old=False, ref=True), sequence(2, old=False, ref=False)]
    [group] = decode_train(encode_train([TrainGroup(PROMPTS[0], tuple(sent))]))
    assert [one.old_logprobs is None for one in group.sequences] == [False, True, True]
    assert [one.ref_logprobs is None for one in group.sequences] == [True, False, True]


def test_logprobs_are_equal_bit_for_bit():
    values = special_floats(50)
    sent = [[], [values[:1], values[3:20]], [values[20:]], []]  # views, as of a packed row
    received = decode_logprobs(encode_logprobs(sent))
    assert [len(row) for row in received] == [0, 2, 1, 0]
    for before, after in zip(chain(*sent), chain(*received), strict=True):
        assert_same_bits(before, after)
    assert decode_logprobs(encode_logprobs([])) == []
    assert decode_logprobs(encode_logprobs([[]])) == [[]]


def test_other_dtypes_are_an_error():
    with pytest.raises(AssertionError):
        encode_logprobs([[torch.zeros(3, dtype=torch.float64)]])


def test_decoded_tensors_are_writable():
    [[logprobs]] = decode_logprobs(encode_logprobs([[torch.zeros(3)]]))
    logprobs += 1
    assert logprobs.tolist() == [1.0, 1.0, 1.0]


def test_a_truncated_or_too_long_message_is_an_error():
    message = encode_prompts(PROMPTS)
    for wrong in (message[:-1], message + b"x", message[:3]):
        with pytest.raises((AssertionError, ValueError)):
            decode_prompts(wrong)


def test_a_message_is_little_larger_than_its_payload():
    num_sequences, length = 64, 100
    ids = tuple(range(length))
    file = bytes(5000)
    one = prompt("train:12345", ids, encoded_images(file))
    prompt_bytes = len("train:12345") + 4 * length + len(file)
    completion = Completion(ids, (-0.5,) * length, "stop", "x" * 200, 1)
    group = RolloutGroup(one, (Rollout(completion, Score(0.0, {}, "ok", "")),) * num_sequences)
    train = TrainGroup(one, (sequence(length, old=True, ref=True),) * num_sequences)

    assert len(encode_prompts([one] * num_sequences)) <= num_sequences * (prompt_bytes + 100) + 50
    assert len(encode_completions([[completion] * num_sequences])) <= num_sequences * (8 * length + 200 + 60) + 50
    assert len(encode_rollouts([group])) <= prompt_bytes + num_sequences * (4 * length + 24) + 200
    assert len(encode_train([train])) <= prompt_bytes + num_sequences * (24 * length + 48) + 200
    assert len(encode_logprobs([[torch.zeros(length)] * num_sequences])) <= num_sequences * (4 * length + 4) + 50


def test_episodes_keep_their_turns_and_images():
    first, second = b"first", b"second"
    episode = Completion(
        (1, 2, 9, 9, 3),
        (-0.5, -0.25, -1.0),
        "turns",
        "a\nb",
        7,
        turns=(
            Turn(0, 2, "a", reward=0.1),
            Turn(4, 5, "b", "<image>\udcff", -1e-300, 2, ((56, 28), (84, 56))),
        ),
        vision=encoded_images(first, second),
    )
    failed = Completion((2,), (0.0,), "stop", "", 7, error="the environment raised KeyError: 'x'")
    [received] = decode_completions(encode_completions([[episode, failed]]))
    assert [replace(each, vision=None) for each in received] == [replace(episode, vision=None), failed]
    assert received[0].vision.encoded == (first, second)
    assert received[0].vision.hashes == episode.vision.hashes

    one = prompt(vision=encoded_images(second))
    sent = RolloutGroup(one, (Rollout(episode, Score(0.0, {}, "ok", "")), Rollout(failed, Score(0.0, {}, "ok", ""))))
    message = encode_rollouts([sent])
    assert message.count(second) == 1, "prompt and completion share a file"
    [group] = decode_rollouts(message)
    assert_same_prompt(one, group.prompt)
    assert [each.completion.sampled for each in group.rollouts] == [((0, 2), (4, 5)), ((0, 1),)]
    assert group.rollouts[0].completion.vision.encoded == (first, second)
    assert group.rollouts[1].completion.vision is None

    values = torch.tensor([1.0, 2.0, 3.0])
    trained = TrainSequence(
        episode.token_ids, values, values, values, None, values, sampled=episode.sampled, vision=episode.vision
    )
    [received_group] = decode_train(
        encode_train([TrainGroup(one, (trained,))], held={one.vision.hashes[0]}), Held(second)
    )
    [sequence] = received_group.sequences
    assert sequence.sampled == episode.sampled
    assert sequence.vision.encoded == (first, second)
    assert torch.equal(sequence.ref_logprobs, values)


class Held(dict):
    """Files that the receiver has."""

    def __init__(self, *files):
        super().__init__({hashlib.sha256(file).hexdigest(): file for file in files})


def test_unfinished_completions_keep_the_version_of_each_token():
    several = Completion((1, 2, 3), (-0.5, -0.25, -1.0), "unfinished", "", 9, policy_versions=((7, 2), (9, 1)))
    none = Completion((), (), "unfinished", "", 9)
    ended = Completion((4,), (-2.0,), "stop", "four", 8)
    rows = [[ended, several, none], [], [none, none, none]]
    assert decode_completions(encode_completions(rows)) == rows
    until = Until(5, num_required=2, begun=tuple(map(tuple, rows)))
    assert decode_until(encode_until(until, b"prompts")) == (until, b"prompts")
    assert decode_until(encode_until(Until(1), b"")) == (Until(1), b"")


def test_images_are_sent_with_begun_completions_that_have_ended_only():
    file = b"an image"
    media = EncodedMedia((file,), (hashlib.sha256(file).hexdigest(),))
    turns = (Turn(2, 4, "", "<image>", num_images=1, image_sizes=((28, 28),)),)
    unfinished = Completion((1, 2, 3, 4), (-1.0,) * 2, "unfinished", "", 9, turns=turns, vision=media)
    ended = replace(unfinished, finish_reason="stop")
    message = encode_until(Until(1, begun=((ended, unfinished),)), b"")
    assert message.count(file) == 1
    [[first, second]] = decode_until(message)[0].begun
    assert (first, second) == (ended, replace(unfinished, vision=None))
    assert first.vision.encoded == (file,)
    assert encode_completions([[unfinished]]).count(file) == 1  # with the results of an engine
