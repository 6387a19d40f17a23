"""Serialization of prompts, completions and tensors that move between driver and workers.

    message   [ section ][ section ] ... [ section ]
    section   [ count ][ length of each item ][ the items, concatenated ]

Counts and lengths are uint32; items are runs of int32, of float32, or bytes; everything is
little-endian. Decoding returns what was encoded, floats bit for bit, except for the fields that a
function documents as omitted.

Images and videos are encoded as their files, never as pixels: each file once, and none that the
receiver has received before (recent_files.py).

There is no version field: both ends run the same code in the same run, so a malformed message is a
bug, and asserted.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, compress, islice, pairwise, repeat
from typing import TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from trigon.distributed.recent_files import RecentFiles
from trigon.rollout.protocol import Until
from trigon.system.json_files import dump_columns
from trigon.types import (
    Completion,
    EncodedMedia,
    FinishReason,
    MediaKind,
    Prompt,
    Rollout,
    RolloutGroup,
    Score,
    TrainGroup,
    TrainSequence,
    Turn,
    Vision,
    parts_of,
)

Item = TypeVar("Item")
Part = Prompt | Completion | TrainSequence

_FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
_MEDIA_KINDS: tuple[MediaKind, ...] = get_args(MediaKind)
_NO_VALUES = torch.empty(0, dtype=torch.float32)


def encode_prompts(prompts: Sequence[Prompt], held: Container[str] = (), *, with_rows: bool = False) -> bytes:
    """Encode prompts, without text, ground_truth, row and image_refs. Media must not be pixels.

    held: hashes of the files that the receiver has, which are omitted. with_rows: with the columns
    of each row that JSON can represent, for environments.
    """
    writer = _Writer()
    _write_prompts(writer, prompts)
    _write_media(writer, prompts, held)
    writer.texts([dump_columns(prompt.row)[0] if with_rows else "" for prompt in prompts])
    return writer.message()


def decode_prompts(message: bytes, held: RecentFiles | None = None) -> list[Prompt]:
    """Decode prompts. The omitted fields are "", None, {} and ().

    held: the files that were omitted; None: none were.
    """
    reader = _Reader(message)
    prompts = _read_prompts(reader)
    media = _read_media(reader, held)
    rows = [json.loads(text) if text else {} for text in reader.texts()]
    reader.close()
    return [replace(prompt, vision=vision, row=row) for prompt, vision, row in zip(prompts, media, rows, strict=True)]


def encode_completions(rows: Sequence[Sequence[Completion]]) -> bytes:
    """Encode completions, one row for each prompt, with the images that they observed.

    sampling_logprobs are encoded as float32, the dtype in which all rollout engines compute them.
    Without replica, which the driver knows by the rank that the message comes from.
    """
    completions = list(chain.from_iterable(rows))
    writer = _Writer()
    writer.ints([[len(row) for row in rows]])
    writer.ints([completion.token_ids for completion in completions])
    writer.floats([completion.sampling_logprobs for completion in completions])
    writer.ints([[_FINISH_REASONS.index(completion.finish_reason) for completion in completions]])
    writer.ints([[completion.policy_version for completion in completions]])
    several = [number for number, completion in enumerate(completions) if completion.policy_versions]
    writer.ints([several, *(list(chain.from_iterable(completions[number].policy_versions)) for number in several)])
    writer.texts([completion.error for completion in completions])
    turns = [turn for completion in completions for turn in completion.turns]
    writer.ints([[len(completion.turns) for completion in completions]])
    writer.ints([[getattr(turn, name) for turn in turns] for name in ("start", "end", "num_images")])
    writer.ints([[side for turn in turns for size in turn.image_sizes for side in size]])
    writer.texts([text for turn in turns for text in (turn.text, turn.observation)])
    writer.texts(["" if turn.reward is None else repr(turn.reward) for turn in turns])  # all digits
    _write_media(writer, completions, ())
    return writer.message()


def decode_completions(message: bytes) -> list[list[Completion]]:
    """Decode completions, one row for each prompt."""
    reader = _Reader(message)
    [num_completions] = reader.ints()
    token_ids = reader.ints()
    sampling_logprobs = reader.floats()
    [finish_reasons] = reader.ints()
    [policy_versions] = reader.ints()
    several, *runs = reader.ints()
    version_runs = dict(zip(several, map(tuple, map(_pairs, runs)), strict=True))
    errors = reader.texts()
    [num_turns] = reader.ints()
    starts, ends, nums_images = reader.ints()
    [sides] = reader.ints()
    image_sizes = map(tuple, _split(_pairs(sides), nums_images))
    turn_texts = iter(reader.texts())
    rewards = (float(reward) if reward else None for reward in reader.texts())
    rows_of_turns = _split(
        (
            Turn(start, end, next(turn_texts), next(turn_texts), reward, num_images, sizes)
            for start, end, num_images, sizes, reward in zip(
                starts, ends, nums_images, image_sizes, rewards, strict=True
            )
        ),
        num_turns,
    )
    texts = ("\n".join(turn.text for turn in turns) for turns in rows_of_turns)
    media = _read_media(reader, None)
    reader.close()
    reasons = (_FINISH_REASONS[reason] for reason in finish_reasons)
    replicas = repeat(0, len(token_ids))
    fields = zip(
        token_ids,
        sampling_logprobs,
        reasons,
        texts,
        policy_versions,
        replicas,
        map(tuple, rows_of_turns),
        media,
        errors,
        (version_runs.get(number, ()) for number in range(len(token_ids))),
        strict=True,
    )
    return _split((Completion(*values) for values in fields), num_completions)


def encode_until(until: Until, prompts: bytes) -> bytes:
    """Encode when a call of generate stops, what it continues, and its encoded prompts.

    Without the images that unfinished completions have observed: an engine that continues an
    episode has kept it, and another one begins it again.
    """
    begun = [[replace(each, vision=None) if each.is_unfinished else each for each in row] for row in until.begun]
    writer = _Writer()
    writer.ints([[until.num_groups, until.num_required]])
    writer.blobs([encode_completions(begun), prompts])
    return writer.message()


def decode_until(message: bytes) -> tuple[Until, bytes]:
    """Decode what encode_until has encoded; the prompts stay encoded."""
    reader = _Reader(message)
    [[num_groups, num_required]] = reader.ints()
    begun, prompts = reader.blobs()
    reader.close()
    return Until(num_groups, num_required, tuple(map(tuple, decode_completions(begun)))), prompts


def encode_rollouts(groups: Sequence[RolloutGroup], held: Container[str] = ()) -> bytes:
    """Encode groups for computing log-probabilities.

    Prompts and held as in encode_prompts; of each rollout, only the completion's token_ids, which
    of them were sampled, and its images. Without baselines, of which nothing is learned.
    """
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    writer = _Writer()
    _write_prompts(writer, [group.prompt for group in groups])
    writer.ints([[len(group.rollouts) for group in groups]])
    writer.ints([completion.token_ids for completion in completions])
    writer.ints([list(chain.from_iterable(completion.sampled)) for completion in completions])
    _write_media(writer, list(group_parts(groups)), held)
    return writer.message()


def decode_rollouts(message: bytes, held: RecentFiles | None = None) -> list[RolloutGroup]:
    """Decode groups. Omitted fields of a completion are (), "stop", "" and 0; its score is 0.

    held: as in decode_prompts.
    """
    reader = _Reader(message)
    prompts = _read_prompts(reader)
    [num_rollouts] = reader.ints()
    token_ids = reader.ints()
    sampled = reader.ints()
    media = iter(_read_media(reader, held))
    reader.close()
    no_score = Score(overall=0.0, parts={}, outcome="ok", error="")
    fields = zip(token_ids, sampled, strict=True)
    groups = []
    for prompt, count in zip(prompts, num_rollouts, strict=True):
        prompt = replace(prompt, vision=next(media))
        rollouts = []
        for ids, ranges in islice(fields, count):
            turns = tuple(Turn(start, end, "") for start, end in _pairs(ranges))
            completion = Completion(ids, (), "stop", "", 0, turns=turns, vision=next(media))
            rollouts.append(Rollout(completion, no_score))
        groups.append(RolloutGroup(prompt, tuple(rollouts)))
    return groups


def encode_train(groups: Sequence[TrainGroup], held: Container[str] = ()) -> bytes:
    """Encode groups for an update: prompts as in encode_prompts, sequences with all fields."""
    sequences = [sequence for group in groups for sequence in group.sequences]
    writer = _Writer()
    _write_prompts(writer, [group.prompt for group in groups])
    writer.ints([[len(group.sequences) for group in groups]])
    writer.ints([sequence.token_ids for sequence in sequences])
    writer.ints([list(chain.from_iterable(sequence.sampled)) for sequence in sequences])
    writer.tensors([sequence.loss_mask for sequence in sequences])
    writer.tensors([sequence.advantages for sequence in sequences])
    writer.tensors([sequence.sampling_logprobs for sequence in sequences])
    writer.tensors([_none_to_empty(sequence.old_logprobs) for sequence in sequences])
    writer.tensors([_none_to_empty(sequence.ref_logprobs) for sequence in sequences])
    has_values = any(sequence.values is not None for sequence in sequences)
    writer.ints([[int(has_values)]])
    for of_critic in ([each.values for each in sequences], [each.returns for each in sequences]) if has_values else ():
        writer.tensors([_none_to_empty(values) for values in of_critic])
    _write_media(writer, list(group_parts(groups)), held)
    return writer.message()


def decode_train(message: bytes, held: RecentFiles | None = None) -> list[TrainGroup]:
    """Decode groups. The tensors of one field are views of one storage.

    held: as in decode_prompts.
    """
    reader = _Reader(message)
    prompts = _read_prompts(reader)
    [num_sequences] = reader.ints()
    token_ids = reader.ints()
    sampled = (tuple(_pairs(ranges)) for ranges in reader.ints())
    loss_mask, advantages, sampling_logprobs, old_logprobs, ref_logprobs = (reader.tensors() for _ in range(5))
    [[has_values]] = reader.ints()
    of_critic = [reader.tensors() if has_values else [_NO_VALUES] * len(token_ids) for _ in range(2)]
    values_and_returns = zip(*(map(_empty_to_none, each) for each in of_critic), strict=True)
    media = iter(_read_media(reader, held))
    reader.close()
    fields = zip(
        token_ids,
        loss_mask,
        advantages,
        sampling_logprobs,
        map(_empty_to_none, old_logprobs),
        map(_empty_to_none, ref_logprobs),
        sampled,
        strict=True,
    )
    groups = []
    for prompt, count in zip(prompts, num_sequences, strict=True):
        prompt = replace(prompt, vision=next(media))
        sequences = []
        for arguments in islice(fields, count):
            values, returns = next(values_and_returns)
            sequence = TrainSequence(*arguments)
            sequences.append(replace(sequence, vision=next(media), values=values, returns=returns))
        groups.append(TrainGroup(prompt, tuple(sequences)))
    return groups


def encode_logprobs(rows: Sequence[Sequence[Tensor]]) -> bytes:
    """Encode log-probabilities: a float32 CPU tensor [T] for each completion of each group."""
    writer = _Writer()
    writer.ints([[len(row) for row in rows]])
    writer.tensors(list(chain.from_iterable(rows)))
    return writer.message()


def decode_logprobs(message: bytes) -> list[list[Tensor]]:
    """Decode log-probabilities, one row for each group. The tensors are views of one storage."""
    reader = _Reader(message)
    [num_completions] = reader.ints()
    tensors = reader.tensors()
    reader.close()
    return _split(iter(tensors), num_completions)


def group_parts(groups: Sequence[RolloutGroup] | Sequence[TrainGroup]) -> Iterator[Part]:
    """Return the prompt and the completions of each group, in the order of their media."""
    return chain.from_iterable(map(parts_of, groups))


def _write_prompts(writer: _Writer, prompts: Sequence[Prompt]) -> None:
    writer.texts([prompt.prompt_id for prompt in prompts])
    writer.ints([prompt.token_ids for prompt in prompts])


def _read_prompts(reader: _Reader) -> list[Prompt]:
    """Return prompts without their media."""
    return [
        Prompt(prompt_id, token_ids, vision=None, text="", ground_truth=None, row={}, image_refs=())
        for prompt_id, token_ids in zip(reader.texts(), reader.ints(), strict=True)
    ]


def _write_media(writer: _Writer, parts: Sequence[Part], held: Container[str]) -> None:
    """Write the files of each part: each file once, and none that is held."""
    media = [_encoded_media(part) for part in parts]
    files: dict[str, bytes] = {}  # to be sent
    is_sent = []  # for each file of each part: 1 if it follows here, 0 if it is held or came before
    for each in media:
        for file_hash, file in zip(each.hashes, each.encoded, strict=True):
            is_sent.append(int(file_hash not in held and file_hash not in files))
            if is_sent[-1]:
                files[file_hash] = file
    writer.ints([[len(each.encoded) for each in media]])
    writer.texts([file_hash for each in media for file_hash in each.hashes])
    writer.ints([[_MEDIA_KINDS.index(each.kind) for each in media]])
    writer.ints([is_sent])
    writer.blobs(list(files.values()))


def _read_media(reader: _Reader, held: RecentFiles | None) -> list[EncodedMedia | None]:
    """Return the files of each part, None for one without any."""
    [num_files] = reader.ints()
    all_hashes = reader.texts()
    hashes = _split(iter(all_hashes), num_files)
    [kinds] = reader.ints()
    [is_sent] = reader.ints()
    files = dict(zip(compress(all_hashes, is_sent), reader.blobs(), strict=True))

    def file_of(file_hash: str) -> bytes:
        if file_hash in files:
            return files[file_hash]
        if held is None or file_hash not in held:
            raise AssertionError(f"the file {file_hash} was neither sent nor held")
        return held[file_hash]

    return [
        EncodedMedia(tuple(map(file_of, file_hashes)), tuple(file_hashes), _MEDIA_KINDS[kind]) if file_hashes else None
        for file_hashes, kind in zip(hashes, kinds, strict=True)
    ]


def _encoded_media(part: Part) -> EncodedMedia:
    name = part.prompt_id if isinstance(part, Prompt) else "a completion"
    assert not isinstance(part.vision, Vision), f"{name}: pixels are not serialized; use EncodedMedia"
    return EncodedMedia((), ()) if part.vision is None else part.vision


def _pairs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Return consecutive numbers two at a time."""
    return zip(numbers[::2], numbers[1::2], strict=True)


# A sequence has at least one token, so an empty tensor can represent None.


def _none_to_empty(values: Tensor | None) -> Tensor:
    assert values is None or len(values) > 0
    return _NO_VALUES if values is None else values


def _empty_to_none(values: Tensor) -> Tensor | None:
    return values if len(values) > 0 else None


def _split(items: Iterator[Item], lengths: Iterable[int]) -> list[list[Item]]:
    """Split items into consecutive rows of these lengths, which must cover all items."""
    rows = [list(islice(items, length)) for length in lengths]
    assert next(items, None) is None
    return rows


class _Writer:
    """Builds a message, one section per call."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def ints(self, items: Sequence[Sequence[int]]) -> None:
        self._numbers(items, "<i4")

    def floats(self, items: Sequence[Sequence[float]]) -> None:
        self._numbers(items, "<f4")

    def tensors(self, items: Sequence[Tensor]) -> None:
        assert all(item.dtype == torch.float32 and item.dim() == 1 for item in items)
        values = torch.cat([_NO_VALUES, *items]).numpy()
        self._section([len(item) for item in items], [values.astype("<f4", copy=False).tobytes()])

    def blobs(self, items: Sequence[bytes]) -> None:
        self._section([len(item) for item in items], items)

    def texts(self, items: Sequence[str]) -> None:
        # A file name that is not UTF-8 contains lone surrogates, which must be preserved.
        self.blobs([item.encode("utf-8", "surrogatepass") for item in items])

    def message(self) -> bytes:
        return b"".join(self._parts)

    def _numbers(self, items: Sequence[Sequence[float]], dtype: str) -> None:
        lengths = [len(item) for item in items]
        self._section(lengths, [np.fromiter(chain.from_iterable(items), dtype, sum(lengths)).tobytes()])

    def _section(self, lengths: Sequence[int], payload: Sequence[bytes]) -> None:
        self._parts += [np.array([len(lengths), *lengths], "<u4").tobytes(), *payload]


class _Reader:
    """Reads the sections of a message in the order in which they were written."""

    def __init__(self, message: bytes) -> None:
        self._message = memoryview(message)
        self._start = 0

    def ints(self) -> list[tuple[int, ...]]:
        spans, payload = self._section(4)
        values = np.frombuffer(payload, "<i4").tolist()
        return [tuple(values[start:end]) for start, end in spans]

    def floats(self) -> list[tuple[float, ...]]:
        spans, payload = self._section(4)
        values = np.frombuffer(payload, "<f4").tolist()
        return [tuple(values[start:end]) for start, end in spans]

    def tensors(self) -> list[Tensor]:
        spans, payload = self._section(4)
        values = torch.from_numpy(np.frombuffer(payload, "<f4").astype(np.float32))  # copied: aligned and writable
        return [values[start:end] for start, end in spans]

    def blobs(self) -> list[bytes]:
        spans, payload = self._section(1)
        return [bytes(payload[start:end]) for start, end in spans]

    def texts(self) -> list[str]:
        return [item.decode("utf-8", "surrogatepass") for item in self.blobs()]

    def close(self) -> None:
        assert self._start == len(self._message), f"{len(self._message) - self._start} bytes were not read"

    def _section(self, item_bytes: int) -> tuple[list[tuple[int, int]], memoryview]:
        """Return (start, end) of each item in units of item_bytes, and the bytes of all items."""
        [count] = np.frombuffer(self._take(4), "<u4").tolist()
        ends = list(accumulate(np.frombuffer(self._take(4 * count), "<u4").tolist(), initial=0))
        return list(pairwise(ends)), self._take(ends[-1] * item_bytes)

    def _take(self, num_bytes: int) -> memoryview:
        start, self._start = self._start, self._start + num_bytes
        assert self._start <= len(self._message), f"the message of {len(self._message)} bytes is truncated"
        return self._message[start : self._start]
