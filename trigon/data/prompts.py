"""From a dataset row to a prompt: one piece of code that counts, builds and feeds.

    row --format_prompt--> messages --chat template--> text --tokenizer--> ids --placeholders expanded--> token_ids

Knows column names, chat messages, `<image>` and `<video>` markers and tokenizers. A prompt's token ids follow from its
text, the sizes of its images, and the sizes and times of its videos alone, so a row is counted without decoding more
than a video's first frame, and what was counted is what both engines receive. Nothing is ever cut. Refuses to know
where rows come from, in which order, and how an image or a video is decoded.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

from jinja2 import StrictUndefined, Template, TemplateError, meta
from jinja2.sandbox import SandboxedEnvironment

from trigon.config.paths import is_inline_template
from trigon.data.bad_rows import UnusableRow
from trigon.data.images import encoded_image, image_size, open_image
from trigon.data.media_files import file_name
from trigon.data.videos import (
    DEFAULT_SAMPLING,
    FRAMES_PER_PATCH,
    FrameSampling,
    VideoLayout,
    encoded_video,
    open_video,
    video_layout,
)
from trigon.data.vision import image_processor_of, video_processor_of
from trigon.errors import ConfigError, DataError
from trigon.suggestions import nearest
from trigon.types import EncodedMedia, MediaKind, Prompt, Vision

if TYPE_CHECKING:
    from trigon.models.load import Processors

IMAGE_MARKER = "<image>"
"""Stands in a row's text where an image belongs, once for each image."""

VIDEO_MARKER = "<video>"
"""The same for a video."""


_MARKERS: dict[MediaKind, str] = {"image": IMAGE_MARKER, "video": VIDEO_MARKER}
_MARKER = re.compile("(<image>|<video>)")

Size = tuple[int, int] | VideoLayout
"""What a prompt's tokens depend on: an image's (width, height), or what will be seen of a video."""


@dataclass(frozen=True, slots=True)
class _Message:
    """One chat message; its content holds a marker for each image or video."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class _Layout:
    """A prompt but for its pixels. media_tokens: how many placeholders each image or video was given."""

    token_ids: tuple[int, ...]
    media_tokens: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class _Media:
    """The images or the videos of a row, as the row has them. names: of each, for reports."""

    kind: MediaKind
    sources: tuple[Any, ...]
    names: tuple[str, ...]


class PromptBuilder:
    """Turns rows into prompts for one model. Safe to use from several threads.

    image_processor, video_processor: count their calls; None for a model that takes no images, or no videos.
    """

    def __init__(
        self,
        processors: Processors,
        *,
        prompt_key: str,
        answer_key: str,
        image_key: str,
        image_dir: Path | None,
        format_prompt: str | None,
        system_prompt: str | None,
        max_prompt_length: int,
        max_image_pixels: int,
        limit_images: int,
        process_images: bool = True,
        video_key: str = "videos",
        video_sampling: FrameSampling = DEFAULT_SAMPLING,
    ) -> None:
        """Prepare to build prompts.

        Args:
            prompt_key: the column with the question, a text or a list of chat messages ({"role", "content"}).
            answer_key: the column with the ground truth.
            image_key: the column with the images, a list or a single one; it may be missing, empty or None.
            image_dir: where relative image and video paths begin; None: with the dataset (see `rooted`).
            format_prompt: a Jinja template with the variable `content`: a file name or, with {{ or {% in it, itself.
            system_prompt: put before every row that brings no system message of its own.
            max_prompt_length: in tokens, image tokens included.
            max_image_pixels: images, and videos whose frames are above it, are refused before they are decoded.
            limit_images: images allowed in one row; 0: any number.
            process_images: give prompts their pixels; False: give them images and videos as files, for whoever makes
                pixels elsewhere (see data/processed.py). Token ids are the same.
            video_key: the column with the videos, like image_key. A row has images or videos, not both.
            video_sampling: which frames of a video are shown.
        Raises: ConfigError if format_prompt cannot be used.
        """
        family, hf_config = processors.family, processors.hf_config
        self.prompt_key = prompt_key
        self.answer_key = answer_key
        self.image_key = image_key
        self.image_dir = image_dir
        self.max_prompt_length = max_prompt_length
        self.video_key = video_key
        self.image_processor = image_processor_of(processors)
        self.video_processor = video_processor_of(processors)
        self._placeholders: dict[MediaKind, int] = {}
        if family.has_vision:
            self._placeholders["image"] = family.image_token_id(hf_config)
        if family.video != "none":
            self._placeholders["video"] = family.video_token_id(hf_config)
            self._vision_tokens = (int(hf_config.vision_start_token_id), int(hf_config.vision_end_token_id))
        self._tells_time = family.video == "timestamps"
        wrap = [[getattr(processors.tokenizer, f"{name}_id")] for name in family.image_wrap or ()]
        self._image_wrap = (wrap[0], wrap[1]) if wrap else ([], [])
        self._model_type = family.model_type
        self._format = None if format_prompt is None else _load_format(format_prompt)
        self._system_prompt = system_prompt
        self._max_image_pixels = max_image_pixels
        self._limit_images = limit_images
        self._process_images = process_images
        self._video_sampling = video_sampling
        self._tokenizer = processors.tokenizer
        self._media_tokens = tuple(self._tokenizer.convert_ids_to_tokens(family.media_token_ids(hf_config)))
        # Tokenizers drop a truncation or padding they were saved with at their first use; threads may only follow.
        self._tokenize("")

    def rooted(self, folder: Path) -> PromptBuilder:
        """Return this builder with relative image paths beginning in folder, unless image_dir says where they do."""
        rooted = copy.copy(self)
        rooted.image_dir = folder if self.image_dir is None else self.image_dir
        return rooted

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise DataError, naming the columns there are, if the question's or the answer's is not among them."""
        for option, key in (("prompt_key", self.prompt_key), ("answer_key", self.answer_key)):
            if key not in columns:
                column = nearest(key, columns, cutoff=0.4)
                hint = f"; did you mean data.{option}={column}?" if column else f"; set data.{option}"
                raise DataError(f"the dataset has no column {key!r}, only {', '.join(sorted(columns))}{hint}")

    def count(self, row: Mapping[str, Any]) -> int:
        """Return the number of prompt tokens of a row, those of images and videos included, decoding no image.

        Raises: as build, where it shows without decoding.
        """
        return len(self._measured(row, self._media(row, "row"), "row").token_ids)

    def check(self, row: Mapping[str, Any], prompt_id: str) -> int:
        """Return what count does, having decoded every image and video as well.

        Raises: exactly as build with process_images.
        """
        media = self._media(row, prompt_id)
        match media.kind:
            case "image":
                sizes = [image.size for image in self._each(media, open_image, open_video)]
                layout = self._lay_out(row, media, sizes, prompt_id)
            case "video":
                # Before their frames are decoded: max_prompt_length bounds what is made of them.
                layout = self._measured(row, media, prompt_id)
                for _, frames in self._each(media, open_image, open_video):
                    deque(frames, maxlen=0)  # decodes them all
            case _:
                assert_never(media.kind)
        return len(layout.token_ids)

    def build(self, row: Mapping[str, Any], prompt_id: str) -> Prompt:
        """Return the prompt of a row; with process_images its images or videos go through their processor once, here.

        Without, they are files whose headers have been read: no pixel is decoded, but of a row that holds PIL images,
        and of a video's first frame.
        Raises: UnusableRow if the row cannot be used, as far as was looked; DataError if no such row could: a missing
        column, or images or videos for a model that takes none.
        """
        media = self._media(row, prompt_id)
        make = self._with_pixels if self._process_images else self._with_files
        layout, vision = make(row, media, prompt_id)
        return Prompt(
            prompt_id=prompt_id,
            token_ids=layout.token_ids,
            vision=vision,
            text=layout.text,
            ground_truth=row[self.answer_key],
            row={key: value for key, value in row.items() if key not in (self.image_key, self.video_key)},
            image_refs=media.names,
        )

    def _with_pixels(
        self, row: Mapping[str, Any], media: _Media, name: str
    ) -> tuple[_Layout, Vision | EncodedMedia | None]:
        if not media.sources:
            return self._lay_out(row, media, [], name), None
        match media.kind:
            case "image":
                images = list(self._each(media, open_image, open_video))
                layout = self._lay_out(row, media, [image.size for image in images], name)
                assert self.image_processor is not None
                vision = self.image_processor.process(images)
                fed = self.image_processor.tokens_of(vision)
            case "video":
                videos = list(self._each(media, open_image, open_video))
                # Before their frames are decoded: max_prompt_length bounds what is made of them.
                layout = self._lay_out(row, media, [seen for seen, _ in videos], name)
                assert self.video_processor is not None
                vision = self.video_processor.process(videos)
                fed = self.video_processor.tokens_of(vision)
            case _:
                assert_never(media.kind)
        assert fed == layout.media_tokens, f"{name}: laid out {layout.media_tokens} {media.kind} tokens, made {fed}"
        return layout, vision

    def _with_files(
        self, row: Mapping[str, Any], media: _Media, name: str
    ) -> tuple[_Layout, Vision | EncodedMedia | None]:
        files = tuple(self._each(media, encoded_image, encoded_video))
        # Measured as they will be decoded: the bytes, not what they were read from.
        layout = self._measured(row, replace(media, sources=files), name)
        if not files:
            return layout, None
        return layout, EncodedMedia(files, tuple(hashlib.sha256(file).hexdigest() for file in files), media.kind)

    def _media(self, row: Mapping[str, Any], name: str) -> _Media:
        images, videos = _listed(row.get(self.image_key)), _listed(row.get(self.video_key))
        if images and videos:
            raise UnusableRow(
                "mixed_media",
                f"{name}: {len(images)} images in {self.image_key!r} and {len(videos)} videos in {self.video_key!r}; a "
                "row may have either",
            )
        if images and self.image_processor is None:
            raise DataError(
                f"{name} has images in column {self.image_key!r}, but a {self._model_type} model sees none; "
                "train a vision-language model or a dataset without images"
            )
        if videos and self.video_processor is None:
            raise DataError(
                f"{name} has videos in column {self.video_key!r}, but a {self._model_type} model takes none; train one "
                "that does, such as Qwen2.5-VL or Qwen3-VL, or a dataset without videos"
            )
        if 0 < self._limit_images < len(images):
            raise UnusableRow(
                "image_count", f"{name}: {len(images)} images, more than limit_images={self._limit_images}"
            )
        key, sources = (self.video_key, videos) if videos else (self.image_key, images)
        names = tuple(_reference(source, f"{name}/{key}/{index}") for index, source in enumerate(sources))
        return _Media("video" if videos else "image", tuple(sources), names)

    def _each(self, media: _Media, image: Callable[..., Any], video: Callable[..., Any]) -> Iterator[Any]:
        """Yield what one function says of each image of a row, or the other of each video."""
        look = image if media.kind == "image" else partial(video, sampling=self._video_sampling)
        for source, name in zip(media.sources, media.names, strict=True):
            yield look(source, where=name, image_dir=self.image_dir, max_pixels=self._max_image_pixels)

    def _measured(self, row: Mapping[str, Any], media: _Media, name: str) -> _Layout:
        """Return the layout of a row, from what the headers of its images or videos say."""
        return self._lay_out(row, media, list(self._each(media, image_size, video_layout)), name)

    def _lay_out(self, row: Mapping[str, Any], media: _Media, sizes: Sequence[Size], name: str) -> _Layout:
        """Return the token ids of a row with images or videos of these sizes: the only place where ids are made."""
        messages = self._messages(row, name)
        self._check_media(row, messages, media, name)
        try:
            text = self._tokenizer.apply_chat_template(
                [{"role": message.role, "content": self._parts(message.content)} for message in messages],
                tokenize=False,
                add_generation_prompt=True,
            )
        except TemplateError as error:
            raise UnusableRow("prompt", f"{name}: the chat template refuses it: {error}") from error

        template_ids = self._tokenize(text)
        placeholder = self._placeholders.get(media.kind)
        num_places = template_ids.count(placeholder) if placeholder is not None else 0
        if num_places != len(sizes):
            counts = f"placeholders that the chat template writes: {num_places}, {media.kind}s: {len(sizes)}"
            hint = f'it has to write one for each content part of {{"type": "{media.kind}"}}'
            raise UnusableRow("markers", f"{name}: {counts}; {hint}")
        expanded = [self._expanded(size) for size in sizes]
        remaining = iter(expanded)
        token_ids: list[int] = []
        for token_id in template_ids:
            token_ids.extend(next(remaining) if token_id == placeholder else [token_id])
        if len(token_ids) > self.max_prompt_length:
            share = f" ({sum(map(len, expanded))} of them for {media.kind}s)" if expanded else ""
            limit = f"max_prompt_length={self.max_prompt_length}"
            raise UnusableRow("overlong", f"{name}: {len(token_ids)} tokens{share}, more than {limit}")
        media_tokens = tuple(0 if placeholder is None else ids.count(placeholder) for ids in expanded)
        return _Layout(tuple(token_ids), media_tokens, _readable(messages))

    def _expanded(self, size: Size) -> list[int]:
        """Return the tokens that take the place of one placeholder."""
        if not isinstance(size, VideoLayout):
            assert self.image_processor is not None
            before, after = self._image_wrap
            return [*before, *[self._placeholders["image"]] * self.image_processor.image_tokens(*size), *after]
        assert self.video_processor is not None
        patch = [self._placeholders["video"]] * self.video_processor.patch_tokens(size)
        if not self._tells_time:
            return patch * size.num_patches
        # Qwen3-VL: each temporal patch behind its time, and again between the tokens that begin and end a picture.
        start, end = self._vision_tokens
        ids: list[int] = []
        for first in range(0, len(size.seconds), FRAMES_PER_PATCH):
            middle = (size.seconds[first] + size.seconds[first + FRAMES_PER_PATCH - 1]) / 2
            ids += [*self._tokenize(f"<{middle:.1f} seconds>"), start, *patch, end]
        return ids

    def _parts(self, content: str) -> str | list[dict[str, str]]:
        """Return a content as chat templates want it: text as it is, or in parts, split just at the markers."""
        if self.image_processor is None or not _MARKER.search(content):
            return content  # templates of text models know nothing else
        kinds: dict[str, MediaKind] = {marker: kind for kind, marker in _MARKERS.items()}
        return [
            {"type": kinds[piece]} if piece in kinds else {"type": "text", "text": piece}
            for piece in _MARKER.split(content)
            if piece
        ]

    def _tokenize(self, text: str) -> list[int]:
        # The chat template writes every special token itself, so none is added.
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _messages(self, row: Mapping[str, Any], name: str) -> list[_Message]:
        """Return the row's chat messages, the last one, the user's, after format_prompt."""
        if self.prompt_key not in row or self.answer_key not in row:
            self.check_columns(row.keys())
        if row[self.answer_key] is None:
            raise UnusableRow("answer", f"{name}: column {self.answer_key!r} is empty")
        messages = _read_messages(row[self.prompt_key], f"{name}: column {self.prompt_key!r}")
        if self._format is not None:
            messages[-1] = _Message("user", self._formatted(messages[-1].content, name))
        if self._system_prompt is not None and messages[0].role != "system":
            messages.insert(0, _Message("system", self._system_prompt))
        return messages

    def _formatted(self, content: str, name: str) -> str:
        assert self._format is not None
        try:
            return self._format.render(content=content)
        except TemplateError as error:
            raise UnusableRow("prompt", f"{name}: format_prompt fails: {error}") from error

    def _check_media(self, row: Mapping[str, Any], messages: Sequence[_Message], media: _Media, name: str) -> None:
        """Refuse a text whose markers are not those of the row's media. A text model's `<video>` is a text like any."""
        keys: dict[MediaKind, str] = {"image": self.image_key, "video": self.video_key}
        for kind, key in keys.items():
            marker = _MARKERS[kind]
            num_media = len(media.sources) if media.kind == kind else 0
            num_markers = sum(message.content.count(marker) for message in messages)
            if num_markers == num_media or (kind == "video" and self.image_processor is None):
                continue
            counts = f"{marker} markers in the text: {num_markers}, {kind}s: {num_media}"
            if num_markers == 0:
                hint = f"; put {marker} into the text where each belongs"
            elif key not in row:
                hint = f"; there is no column {key!r}, only {', '.join(sorted(row))}: set data.{kind}_key"
            else:
                hint = ""
            raise UnusableRow("markers", f"{name}: {counts}{hint}")
        for token in self._media_tokens:
            if any(token in message.content for message in messages):
                raise UnusableRow("media_tokens", f"{name}: the text spells {token}, which only an image may become")


def _listed(media: Any) -> list[Any]:
    """Return a column's images or videos as a list; a single one stands for itself, None for none."""
    if media is None:
        return []
    return list(media) if isinstance(media, list | tuple) else [media]


def _reference(source: Any, name: str) -> str:
    """Return what an image or a video is called in reports: "train:17/images/0 (figure.png)"."""
    known_as = file_name(source)
    return f"{name} ({known_as})" if known_as else name


def _read_messages(value: Any, where: str) -> list[_Message]:
    """Return the messages that a prompt column holds, ending with the user's."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise UnusableRow("prompt", f"{where} holds {_kind(value)}, not a text or a list of chat messages")
    messages = []
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or message.get("role") not in ("system", "user", "assistant"):
            role = message.get("role") if isinstance(message, Mapping) else None
            raise UnusableRow("prompt", f"{where}: message {number} has role {role!r}, not system, user or assistant")
        content = message.get("content")
        if isinstance(content, list):
            content = _with_markers(content)
        if not isinstance(content, str):
            raise UnusableRow("prompt", f"{where}: message {number} has {_kind(content)} for content, not a text")
        messages.append(_Message(message["role"], content))
    if messages[-1].role != "user" or not messages[-1].content.strip():
        raise UnusableRow("prompt", f"{where}: the last message must be the user's, and not empty")
    return messages


def _with_markers(parts: Sequence[Any]) -> str | None:
    """Return parts as a text with markers; None if there are others than {"type": "text", "text"}, image and video."""
    pieces = []
    for part in parts:
        match part:
            case {"type": "text", "text": str(text)}:
                pieces.append(text)
            case {"type": "image"}:
                pieces.append(IMAGE_MARKER)
            case {"type": "video"}:
                pieces.append(VIDEO_MARKER)
            case _:
                return None
    return "".join(pieces)


def _readable(messages: Sequence[_Message]) -> str:
    """Return the question alone, or, when there is more, each message under its role."""
    if len(messages) == 1:
        return messages[0].content
    return "\n\n".join(f"{message.role}: {message.content}" for message in messages)


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"an empty {type(value).__name__}" if value == [] else f"a value of type {type(value).__name__}"


def _load_format(format_prompt: str) -> Template:
    """Return the compiled template, tried once. Raises: ConfigError naming the file, line or unknown variable."""
    source, where = format_prompt, "data.format_prompt"
    if not is_inline_template(format_prompt):
        path = Path(format_prompt).expanduser()
        if not path.is_file():
            folder = path.parent if path.parent.is_dir() else Path()
            name = nearest(path.name, sorted(entry.name for entry in folder.iterdir()))
            hint = f"; did you mean {folder / name}?" if name else "; give a file, or a template with {{ content }}"
            raise ConfigError(f"data.format_prompt: there is no file {format_prompt!r}{hint}")
        source, where = path.read_text(encoding="utf-8"), f"data.format_prompt={format_prompt}"
    environment = SandboxedEnvironment(undefined=StrictUndefined)
    try:
        variables = meta.find_undeclared_variables(environment.parse(source))
        if variables != {"content"}:
            found = ", ".join(sorted(variables)) or "no variable"
            raise ConfigError(
                f"{where} uses {found}; it must use the one variable {{{{ content }}}}, the row's question"
            )
        template = environment.from_string(source.strip())
        template.render(content="question")
    except (TemplateError, TypeError, ValueError) as error:
        line = f" in line {error.lineno}" if hasattr(error, "lineno") else ""
        raise ConfigError(f"{where} is not a usable Jinja template: {error}{line}") from error
    return template
