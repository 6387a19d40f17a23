"""What is sent is what arrives, bit for bit, and costs little more than its payload."""

import hashlib
import math
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
    encode_completions,
    encode_logprobs,
    encode_prompts,
    encode_rollouts,
    encode_train,
)
from trigon.types import (
    Completion,
    EncodedMedia,
    Prompt,
    Rollout,
    RolloutGroup,
    Score,
    TrainGroup,
    TrainSequence,
    Vision,
)

# Two nans, one with a payload, infinities, both zeros, the smallest denormal, the largest float, 0.1.
ODD_BITS = np.array(
    [0x7FC00000, 0xFFC12345, 0x7F800000, 0xFF800000, 0x00000000, 0x80000000, 0x00000001, 0x7F7FFFFF, 0x3DCCCCCD],
    dtype=np.uint32,
)
TEXTS = ["", "plain", "Zoë: ∑ ≤ 3 😀", "nul \0 inside", "lone \udcff surrogate"]


def images(*files):
    return EncodedMedia(files, tuple(hashlib.sha256(file).hexdigest() for file in files))


def prompt(name="train:0", token_ids=(1, 2, 3), vision=None):
    return Prompt(name, token_ids, vision, "a question", {"answer": 4}, {"level": 5}, ("figure.png",))


def same_prompt(sent, arrived):
    assert (arrived.prompt_id, arrived.token_ids) == (sent.prompt_id, sent.token_ids)
    if sent.vision is None:
        assert arrived.vision is None
    else:
        assert (arrived.vision.encoded, arrived.vision.hashes) == (sent.vision.encoded, sent.vision.hashes)
    assert (arrived.text, arrived.ground_truth, arrived.row, arrived.image_refs) == ("", None, {}, ())


def odd_floats(length):
    return torch.from_numpy(np.resize(ODD_BITS, length).view(np.float32).copy())


def same_bits(sent, arrived):
    assert arrived.dtype == torch.float32
    assert torch.equal(sent.view(torch.int32), arrived.view(torch.int32))


PROMPTS = [
    prompt(),
    prompt("train:1", (2**31 - 1,)),
    prompt("bücher 📚\udcff:2", (7, 0, 151655), images(b"\x89PNG", b"", bytes(range(256)))),
    prompt("", (), images(b"one")),
]


@pytest.mark.parametrize("sent", [[], PROMPTS[:1], PROMPTS])
def test_prompts_arrive_with_their_ids_and_files(sent):
    arrived = decode_prompts(encode_prompts(sent))
    assert len(arrived) == len(sent)
    for before, after in zip(sent, arrived, strict=True):
        same_prompt(before, after)


def test_pixels_do_not_travel():
    vision = Vision(torch.zeros(4, 8), torch.tensor([[1, 2, 2]]), ("",))
    with pytest.raises(AssertionError, match="train:0: pixels do not travel"):
        encode_prompts([prompt(vision=vision)])


def test_token_ids_beyond_32_bits_are_refused_not_cut():
    with pytest.raises(OverflowError):
        encode_prompts([prompt(token_ids=(2**31,))])


def test_completions_arrive_whole():
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


def test_sampling_logprobs_arrive_with_their_float32_bits():
    values = odd_floats(len(ODD_BITS))
    sent = Completion((1,) * len(values), tuple(values.tolist()), "stop", "", 0)
    [[arrived]] = decode_completions(encode_completions([[sent]]))
    assert all(type(value) is float for value in arrived.sampling_logprobs)
    numbers = ~values.isnan()
    same_bits(values[numbers], torch.tensor(arrived.sampling_logprobs)[numbers])
    assert [math.isnan(value) for value in arrived.sampling_logprobs] == (~numbers).tolist()


def test_rollouts_arrive_with_what_scoring_needs():
    score = Score(1.0, {"overall": 1.0}, "ok", "")
    sent = [
        RolloutGroup(
            one, tuple(Rollout(Completion(ids, (-0.5,) * len(ids), "length", "text", 3), score) for ids in token_ids)
        )
        for one, token_ids in zip(PROMPTS, [[(1,), (2, 3)], [(4,)], [], [(5, 6, 7), (8,)]], strict=True)
    ]
    arrived = decode_rollouts(encode_rollouts(sent))
    for before, after in zip(sent, arrived, strict=True):
        same_prompt(before.prompt, after.prompt)
        assert [rollout.completion.token_ids for rollout in after.rollouts] == [
            rollout.completion.token_ids for rollout in before.rollouts
        ]
    assert arrived[0].rollouts[0] == Rollout(Completion((1,), (), "stop", "", 0), Score(0.0, {}, "ok", ""))
    assert decode_rollouts(encode_rollouts([])) == []


def sequence(length, *, old, ref, seed=0):
    random = torch.Generator().manual_seed(seed)

    def values():
        return torch.randn(length, generator=random)

    return TrainSequence(
        token_ids=tuple(range(length)),
        loss_mask=(values() > 0).float(),
        advantages=values(),
        sampling_logprobs=odd_floats(length),
        old_logprobs=values() if old else None,
        ref_logprobs=values() if ref else None,
    )


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("ref", [True, False])
def test_train_groups_arrive_bit_for_bit(old, ref):
    sent = [
        TrainGroup(PROMPTS[0], (sequence(1, old=old, ref=ref), sequence(300, old=old, ref=ref, seed=1))),
        TrainGroup(PROMPTS[1], ()),
        TrainGroup(PROMPTS[2], (sequence(17, old=old, ref=ref, seed=2),)),
    ]
    arrived = decode_train(encode_train(sent))
    assert [len(group.sequences) for group in arrived] == [2, 0, 1]
    for before, after in zip(sent, arrived, strict=True):
        same_prompt(before.prompt, after.prompt)
        for one, other in zip(before.sequences, after.sequences, strict=True):
            assert one.token_ids == other.token_ids
            for field in ("loss_mask", "advantages", "sampling_logprobs", "old_logprobs", "ref_logprobs"):
                if getattr(one, field) is None:
                    assert getattr(other, field) is None
                else:
                    same_bits(getattr(one, field), getattr(other, field))
    assert decode_train(encode_train([])) == []


def test_each_sequence_may_lack_its_own_logprobs():
    sent = [sequence(2, old=True, ref=False), sequence(2, old=False, ref=True), sequence(2, old=False, ref=False)]
    [group] = decode_train(encode_train([TrainGroup(PROMPTS[0], tuple(sent))]))
    assert [one.old_logprobs is None for one in group.sequences] == [False, True, True]
    assert [one.ref_logprobs is None for one in group.sequences] == [True, False, True]


def test_logprobs_arrive_bit_for_bit():
    whole = odd_floats(50)
    sent = [[], [whole[:1], whole[3:20]], [whole[20:]], []]  # views, as they come from a packed row
    arrived = decode_logprobs(encode_logprobs(sent))
    assert [len(row) for row in arrived] == [0, 2, 1, 0]
    for before, after in zip(chain(*sent), chain(*arrived), strict=True):
        same_bits(before, after)
    assert decode_logprobs(encode_logprobs([])) == []
    assert decode_logprobs(encode_logprobs([[]])) == [[]]


def test_other_floats_are_refused_not_rounded():
    with pytest.raises(AssertionError):
        encode_logprobs([[torch.zeros(3, dtype=torch.float64)]])


def test_what_arrived_can_be_changed():
    [[logprobs]] = decode_logprobs(encode_logprobs([[torch.zeros(3)]]))
    logprobs += 1
    assert logprobs.tolist() == [1.0, 1.0, 1.0]


def test_a_message_that_does_not_fit_is_noticed():
    message = encode_prompts(PROMPTS)
    for wrong in (message[:-1], message + b"x", message[:3]):
        with pytest.raises((AssertionError, ValueError)):
            decode_prompts(wrong)


def test_a_message_is_little_more_than_its_payload():
    num_sequences, length = 64, 100
    ids = tuple(range(length))
    file = bytes(5000)
    one = prompt("train:12345", ids, images(file))
    prompt_bytes = len("train:12345") + 4 * length + len(file)
    completion = Completion(ids, (-0.5,) * length, "stop", "x" * 200, 1)
    group = RolloutGroup(one, (Rollout(completion, Score(0.0, {}, "ok", "")),) * num_sequences)
    train = TrainGroup(one, (sequence(length, old=True, ref=True),) * num_sequences)

    assert len(encode_prompts([one] * num_sequences)) <= num_sequences * (prompt_bytes + 100) + 50
    assert len(encode_completions([[completion] * num_sequences])) <= num_sequences * (8 * length + 200 + 24) + 50
    assert len(encode_rollouts([group])) <= prompt_bytes + num_sequences * (4 * length + 8) + 200
    assert len(encode_train([train])) <= prompt_bytes + num_sequences * (24 * length + 32) + 200
    assert len(encode_logprobs([[torch.zeros(length)] * num_sequences])) <= num_sequences * (4 * length + 4) + 50
