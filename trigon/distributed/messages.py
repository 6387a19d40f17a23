"""What moves between the driver and its workers: pickled values with the fields that are read.

Images and videos move as their files, never as pixels. The pickled value names a file by its hash;
the files are beside it, so that the driver can put each of them once into Ray's object store, from
which a node fetches it once for all of its workers.
"""

from __future__ import annotations

import io
import json
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
import torch

from trigon.rollout.protocol import Until
from trigon.system.files import dump_columns
from trigon.types import (
    Completion,
    EncodedMedia,
    MediaKind,
    Prompt,
    Rollout,
    RolloutGroup,
    Score,
    TrainGroup,
    Turn,
    Vision,
)

MAX_STORED_BYTES = 2**30
"""Media files that the driver keeps in Ray's object store. The least recently used are dropped."""

_NO_SCORE = Score(overall=0.0, parts={}, outcome="ok", error="")


@dataclass(frozen=True, slots=True)
class Message:
    """A pickled value, and the media files that it names.

    files: the content of each file by its hash, or Ray's reference to it.
    """

    content: bytes
    files: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the value and of the files whose content is in the message."""
        return len(self.content) + sum(len(file) for file in self.files.values() if isinstance(file, bytes))


def pack(value: object) -> Message:
    """Return the message with a value. Tensors must be on the CPU; media must be files."""
    stream = io.BytesIO()
    packer = _Packer(stream)
    packer.dump(value)
    return Message(stream.getvalue(), packer.files)


def unpack(message: Message) -> Any:
    """Return the value of a message. Its files are fetched where they are references."""
    stored = {name: file for name, file in message.files.items() if not isinstance(file, bytes)}
    fetched = dict(zip(stored, ray.get(list(stored.values())), strict=True)) if stored else {}
    return _Unpacker(io.BytesIO(message.content), {**message.files, **fetched}).load()


class StoredFiles:
    """The media files that the driver has put into Ray's object store."""

    def __init__(self, max_bytes: int = MAX_STORED_BYTES) -> None:
        """Start empty. max_bytes: total size of the files that are kept for later messages."""
        self._max_bytes = max_bytes
        self._files: OrderedDict[str, tuple[Any, int]] = OrderedDict()  # the least recently used first
        self._num_bytes = 0

    def store(self, message: Message) -> tuple[Message, int]:
        """Return the message with references to its files, and the number of bytes that are new."""
        num_bytes = len(message.content)
        references = {}
        for name, file in message.files.items():
            if name not in self._files:
                self._files[name] = ray.put(file), len(file)
                self._num_bytes += len(file)
                num_bytes += len(file)
            self._files.move_to_end(name)
            references[name] = self._files[name][0]
        while self._num_bytes > self._max_bytes:
            _, (_, size) = self._files.popitem(last=False)
            self._num_bytes -= size
        return Message(message.content, references), num_bytes


def for_sampling(prompts: Sequence[Prompt], *, with_rows: bool) -> list[Prompt]:
    """Return prompts with what a rollout engine reads.

    with_rows: keep the columns of each row that JSON can represent, which environments read.
    """
    return [_bare_prompt(prompt, json.loads(dump_columns(prompt.row)[0]) if with_rows else {}) for prompt in prompts]


def without_observed_images(until: Until) -> Until:
    """Return what a call of generate continues, without the images of unfinished completions.

    An engine that continues an episode has kept the images that it observed, and another engine
    begins it again. The interruption stays in this process.
    """
    begun = tuple(
        tuple(replace(each, vision=None) if each.is_unfinished else each for each in row) for row in until.begun
    )
    return replace(until, begun=begun, interruption=None)


def for_scoring(groups: Iterable[RolloutGroup]) -> list[RolloutGroup]:
    """Return groups with what log-probabilities and values depend on.

    These are the tokens, which of them were sampled, media, and the experts used. Baselines are
    left out, since nothing is learned from them.
    """
    return [
        RolloutGroup(
            _bare_prompt(group.prompt, {}),
            tuple(Rollout(_bare_completion(rollout.completion), _NO_SCORE) for rollout in group.rollouts),
        )
        for group in groups
    ]


def for_update(groups: Iterable[TrainGroup]) -> list[TrainGroup]:
    """Return groups with what an update reads."""
    return [replace(group, prompt=_bare_prompt(group.prompt, {})) for group in groups]


def _bare_prompt(prompt: Prompt, row: Mapping[str, Any]) -> Prompt:
    return Prompt(
        prompt.prompt_id,
        prompt.token_ids,
        prompt.vision,
        text="",
        ground_truth=None,
        row=row,
        image_refs=(),
        draw=prompt.draw,
    )


def _bare_completion(completion: Completion) -> Completion:
    turns = tuple(Turn(start, end, "") for start, end in completion.sampled)
    return Completion(
        completion.token_ids,
        (),
        "stop",
        "",
        0,
        turns=turns,
        vision=completion.vision,
        routed_experts=completion.routed_experts,
    )


class _Packer(pickle.Pickler):
    """Pickles tensors as arrays, and media as the hashes of their files."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self.files: dict[str, bytes] = {}

    def reducer_override(self, value: Any) -> Any:
        """See pickle.Pickler."""
        if isinstance(value, torch.Tensor):
            return torch.from_numpy, (value.detach().numpy(),)
        if isinstance(value, EncodedMedia):
            self.files.update(zip(value.hashes, value.encoded, strict=True))
            return _media_with_hashes, (value.hashes, value.kind)
        assert not isinstance(value, Vision), "pixels do not move between processes; use EncodedMedia"
        return NotImplemented


class _Unpacker(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, files: Mapping[str, bytes]) -> None:
        super().__init__(stream)
        self._files = files

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        """See pickle.Unpickler. The files of media come from this message."""
        if (module, name) == (__name__, _media_with_hashes.__name__):
            return lambda hashes, kind: EncodedMedia(tuple(self._files[each] for each in hashes), hashes, kind)
        found: Callable[..., Any] = super().find_class(module, name)
        return found


def _media_with_hashes(hashes: Sequence[str], kind: MediaKind) -> EncodedMedia:
    """Stand in a pickled value for what _Unpacker calls instead."""
    raise NotImplementedError
