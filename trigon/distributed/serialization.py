"""What moves between driver and workers, as bytes: token ids, floats, and images and videos as their files; never
pixels.

    message   [ section ][ section ] ... [ section ]
    section   [ count ][ length of each of its items ][ the items, end to end ]

Counts and lengths are uint32; items are runs of int32, of float32, or bytes; everything is little-endian. What comes
out equals what went in, floats bit for bit, except for the fields that a function says it leaves behind.

Knows the passports and which of their fields the other side needs. Refuses to know who sends and by which road, and
versions: both ends are the same code in the same run, so that a message which does not fit is a bug, not an input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, islice, pairwise
from typing import TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

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
    Vision,
)

Item = TypeVar("Item")

_FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
_MEDIA_KINDS: tuple[MediaKind, ...] = get_args(MediaKind)
_NO_VALUES = torch.empty(0, dtype=torch.float32)


def encode_prompts(prompts: Sequence[Prompt]) -> bytes:
    """Return prompts without their text, answer, row and image_refs. Images and videos must be files."""
    writer = _Writer()
    _write_prompts(writer, prompts)
    return writer.message()


def decode_prompts(message: bytes) -> list[Prompt]:
    """Return the prompts; what was left behind is "", None, {} and () here."""
    reader = _Reader(message)
    prompts = _read_prompts(reader)
    reader.close()
    return prompts


def encode_completions(rows: Sequence[Sequence[Completion]]) -> bytes:
    """Return completions whole. sampling_logprobs travel as float32, in which every engine computes them."""
    completions = list(chain.from_iterable(rows))
    writer = _Writer()
    writer.ints([[len(row) for row in rows]])
    writer.ints([completion.token_ids for completion in completions])
    writer.floats([completion.sampling_logprobs for completion in completions])
    writer.ints([[_FINISH_REASONS.index(completion.finish_reason) for completion in completions]])
    writer.texts([completion.text for completion in completions])
    writer.ints([[completion.policy_version for completion in completions]])
    return writer.message()


def decode_completions(message: bytes) -> list[list[Completion]]:
    """Return the completions, row by row."""
    reader = _Reader(message)
    [num_completions] = reader.ints()
    token_ids = reader.ints()
    sampling_logprobs = reader.floats()
    [finish_reasons] = reader.ints()
    texts = reader.texts()
    [policy_versions] = reader.ints()
    reader.close()
    reasons = (_FINISH_REASONS[reason] for reason in finish_reasons)
    fields = zip(token_ids, sampling_logprobs, reasons, texts, policy_versions, strict=True)
    return _in_rows((Completion(*each) for each in fields), num_completions)


def encode_rollouts(groups: Sequence[RolloutGroup]) -> bytes:
    """Return groups for those who score tokens: prompts as by encode_prompts, and each completion's token_ids alone."""
    writer = _Writer()
    _write_prompts(writer, [group.prompt for group in groups])
    writer.ints([[len(group.rollouts) for group in groups]])
    writer.ints([rollout.completion.token_ids for group in groups for rollout in group.rollouts])
    return writer.message()


def decode_rollouts(message: bytes) -> list[RolloutGroup]:
    """Return the groups. Of a rollout only the token_ids mean anything here; the rest is empty, 0 and a score of 0."""
    reader = _Reader(message)
    prompts = _read_prompts(reader)
    [num_rollouts] = reader.ints()
    token_ids = reader.ints()
    reader.close()
    no_score = Score(overall=0.0, parts={}, outcome="ok", error="")
    rollouts = (Rollout(Completion(ids, (), "stop", "", 0), no_score) for ids in token_ids)
    rows = _in_rows(rollouts, num_rollouts)
    return [RolloutGroup(prompt, tuple(row)) for prompt, row in zip(prompts, rows, strict=True)]


def encode_train(groups: Sequence[TrainGroup]) -> bytes:
    """Return groups for an update: prompts as by encode_prompts, sequences whole."""
    sequences = [sequence for group in groups for sequence in group.sequences]
    writer = _Writer()
    _write_prompts(writer, [group.prompt for group in groups])
    writer.ints([[len(group.sequences) for group in groups]])
    writer.ints([sequence.token_ids for sequence in sequences])
    writer.tensors([sequence.loss_mask for sequence in sequences])
    writer.tensors([sequence.advantages for sequence in sequences])
    writer.tensors([sequence.sampling_logprobs for sequence in sequences])
    writer.tensors([_or_empty(sequence.old_logprobs) for sequence in sequences])
    writer.tensors([_or_empty(sequence.ref_logprobs) for sequence in sequences])
    return writer.message()


def decode_train(message: bytes) -> list[TrainGroup]:
    """Return the groups. The tensors of one field are views of one storage."""
    reader = _Reader(message)
    prompts = _read_prompts(reader)
    [num_sequences] = reader.ints()
    token_ids = reader.ints()
    loss_mask, advantages, sampling_logprobs, old, ref = (reader.tensors() for _ in range(5))
    reader.close()
    fields = zip(
        token_ids,
        loss_mask,
        advantages,
        sampling_logprobs,
        map(_or_none, old),
        map(_or_none, ref),
        strict=True,
    )
    rows = _in_rows((TrainSequence(*each) for each in fields), num_sequences)
    return [TrainGroup(prompt, tuple(row)) for prompt, row in zip(prompts, rows, strict=True)]


def encode_logprobs(rows: Sequence[Sequence[Tensor]]) -> bytes:
    """Return log-probabilities, float32 [R] on the CPU for each completion of each group."""
    writer = _Writer()
    writer.ints([[len(row) for row in rows]])
    writer.tensors(list(chain.from_iterable(rows)))
    return writer.message()


def decode_logprobs(message: bytes) -> list[list[Tensor]]:
    """Return the log-probabilities, group by group. They are views of one storage."""
    reader = _Reader(message)
    [num_completions] = reader.ints()
    tensors = reader.tensors()
    reader.close()
    return _in_rows(iter(tensors), num_completions)


def _write_prompts(writer: _Writer, prompts: Sequence[Prompt]) -> None:
    media = [_files(prompt) for prompt in prompts]
    writer.texts([prompt.prompt_id for prompt in prompts])
    writer.ints([prompt.token_ids for prompt in prompts])
    writer.ints([[len(each.encoded) for each in media]])
    writer.files([file for each in media for file in each.encoded])
    writer.texts([name for each in media for name in each.hashes])
    writer.ints([[_MEDIA_KINDS.index(each.kind) for each in media]])


def _read_prompts(reader: _Reader) -> list[Prompt]:
    prompt_ids = reader.texts()
    token_ids = reader.ints()
    [num_files] = reader.ints()
    files = _in_rows(iter(reader.files()), num_files)
    hashes = _in_rows(iter(reader.texts()), num_files)
    [kinds] = reader.ints()
    return [
        Prompt(
            prompt_id=prompt_id,
            token_ids=ids,
            vision=EncodedMedia(tuple(encoded), tuple(names), _MEDIA_KINDS[kind]) if encoded else None,
            text="",
            ground_truth=None,
            row={},
            image_refs=(),
        )
        for prompt_id, ids, encoded, names, kind in zip(prompt_ids, token_ids, files, hashes, kinds, strict=True)
    ]


def _files(prompt: Prompt) -> EncodedMedia:
    assert not isinstance(prompt.vision, Vision), f"{prompt.prompt_id}: pixels do not travel; build it with files"
    return EncodedMedia((), ()) if prompt.vision is None else prompt.vision


# A sequence has at least one token, so that an empty tensor is free to stand for None.


def _or_empty(values: Tensor | None) -> Tensor:
    assert values is None or len(values) > 0
    return _NO_VALUES if values is None else values


def _or_none(values: Tensor) -> Tensor | None:
    return values if len(values) > 0 else None


def _in_rows(items: Iterator[Item], lengths: Iterable[int]) -> list[list[Item]]:
    """Lay items out in rows of these lengths, which they fill exactly."""
    rows = [list(islice(items, length)) for length in lengths]
    assert next(items, None) is None
    return rows


class _Writer:
    """Puts sections one behind the other."""

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

    def files(self, items: Sequence[bytes]) -> None:
        self._section([len(item) for item in items], items)

    def texts(self, items: Sequence[str]) -> None:
        # A file name that is not UTF-8 comes with lone surrogates, which must come through as well.
        self.files([item.encode("utf-8", "surrogatepass") for item in items])

    def message(self) -> bytes:
        return b"".join(self._parts)

    def _numbers(self, items: Sequence[Sequence[float]], dtype: str) -> None:
        lengths = [len(item) for item in items]
        self._section(lengths, [np.fromiter(chain.from_iterable(items), dtype, sum(lengths)).tobytes()])

    def _section(self, lengths: Sequence[int], payload: Sequence[bytes]) -> None:
        self._parts += [np.array([len(lengths), *lengths], "<u4").tobytes(), *payload]


class _Reader:
    """Takes a message apart, section by section, in the order in which it was written."""

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
        values = torch.from_numpy(np.frombuffer(payload, "<f4").astype(np.float32))  # a copy: aligned, and writable
        return [values[start:end] for start, end in spans]

    def files(self) -> list[bytes]:
        spans, payload = self._section(1)
        return [bytes(payload[start:end]) for start, end in spans]

    def texts(self) -> list[str]:
        return [item.decode("utf-8", "surrogatepass") for item in self.files()]

    def close(self) -> None:
        assert self._start == len(self._message), f"{len(self._message) - self._start} bytes left over"

    def _section(self, item_bytes: int) -> tuple[list[tuple[int, int]], memoryview]:
        """Return (start, end) of each item, counted in units of item_bytes, and the bytes in which they lie."""
        [count] = np.frombuffer(self._take(4), "<u4").tolist()
        ends = list(accumulate(np.frombuffer(self._take(4 * count), "<u4").tolist(), initial=0))
        return list(pairwise(ends)), self._take(ends[-1] * item_bytes)

    def _take(self, num_bytes: int) -> memoryview:
        start, self._start = self._start, self._start + num_bytes
        assert self._start <= len(self._message), f"a message of {len(self._message)} bytes ends too early"
        return self._message[start : self._start]
