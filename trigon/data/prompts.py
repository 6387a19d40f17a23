"""Builds prompts from dataset rows, and counts their tokens with the same code.

    row --format_prompt--> messages --chat template--> text --tokenizer--> ids --placeholders
    expanded--> token_ids

The token ids of a prompt depend only on its text, the sizes of its images, and the sizes and times
of its videos. A row can therefore be counted without decoding an image or more than a video's first
frame, and the count equals the number of tokens that both engines receive. No prompt is ever
truncated.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from trigon.config.paths import expand_path, is_inline_template, read_template
from trigon.config.schema import DataConfig
from trigon.data.chat_template import MARKERS, ChatTemplate, Message, media_in_messages, messages_as_text, read_messages
from trigon.data.images import decoded_images, encoded_image, image_size, reserve_frames
from trigon.data.media_files import MediaSource, encoded_files, linked_digests, media_name, plain_source
from trigon.data.rows import (
    UnusableRow,
    check_row_size,
    column_names,
    column_value,
    has_column,
    require_columns,
    without_column,
)
from trigon.data.templates import TemplateFailure, TemplateLimitError, render, variables_of
from trigon.data.tokens import MaskedTokens, SpecialTokens
from trigon.data.videos import FrameSampling, Pixels, VideoLayout, encoded_video, open_video, video_layout
from trigon.data.vision import MediaSize, Placeholders
from trigon.errors import ConfigError, DataError
from trigon.types import EncodedMedia, ImageSizes, MediaKind, Prompt, Vision

if TYPE_CHECKING:
    from trigon.models.load import Processors

CHARACTERS_PER_TOKEN = 64
"""Times max_prompt_length, the characters that a prompt may have, besides FURTHER_CHARACTERS.

Tokenizing takes about 230 bytes of memory for each character, so characters are counted first. No
text of a language has this many characters per token.
"""

FURTHER_CHARACTERS = 65_536

GREY = 235
"""The colour of blank images and frames, as in the blank images that `trigon tiny` makes."""

_MAX_LIMITS_REACHED = 8
"""Rows for which a template may reach a limit (templates.py)."""


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A tokenized prompt. media_tokens: the number of placeholder tokens of each image or video.

    text: the text of the messages, before the chat template. image_sizes: as Prompt.image_sizes.
    """

    token_ids: tuple[int, ...]
    media_tokens: tuple[int, ...]
    text: str
    image_sizes: ImageSizes


@dataclass(frozen=True, slots=True)
class _RowMedia:
    """The images or the videos of a row."""

    kind: MediaKind
    sources: tuple[MediaSource, ...]


class PromptBuilder:
    """Builds the prompts of rows for one model. Thread-safe.

    processors: tokenizer and processors of the model. data: the options. image_dir: the folder that
    relative paths start from, and out of which no path may lead; None: no path is allowed.
    image_processor, video_processor: count their calls; None for a model without images, or videos.
    """

    def __init__(
        self,
        processors: Processors,
        data: DataConfig,
        *,
        limit_images: int = 0,
        process_images: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        generation_prompt: bool = True,
    ) -> None:
        """Load the template and the processors.

        Args:
            limit_images: images allowed in one row; 0: any number.
            process_images: compute the pixel values of prompts; False: prompts have their images
                and videos as encoded files (see media_processing.py). Token ids are the same.
            tools: JSON schemas of the functions that the model may call, which the chat template
                describes to it.
            generation_prompt: prompts end with the beginning of the assistant's message; False:
                with the question, where the first observation of an environment follows it
                (turns.py).
        Raises: ConfigError if format_prompt or the chat template cannot be used.
        """
        family = processors.family
        self.processors = processors
        self.data = data
        self.image_dir = None if data.image_dir is None else expand_path(data.image_dir)
        self._chat = ChatTemplate(processors, tools=tools)
        self._placeholders = Placeholders(processors, tokenize=self._chat.tokenize)
        self.image_processor = self._placeholders.image_processor
        self.video_processor = self._placeholders.video_processor
        self._generation_prompt = generation_prompt
        self._model_type = family.model_type
        self._format = None if data.format_prompt is None else load_format_prompt(data.format_prompt)
        self._max_characters = CHARACTERS_PER_TOKEN * data.max_prompt_length + FURTHER_CHARACTERS
        if len(data.system_prompt or "") > self._max_characters:
            raise ConfigError(
                f"data.system_prompt has {len(data.system_prompt or ''):,} characters, and every prompt has it; more "
                f"than {self._max_characters:,} do not fit into data.max_prompt_length={data.max_prompt_length}"
            )
        self._limit_images = limit_images
        self._process_images = process_images
        self._sampling = FrameSampling(data.video_fps, data.max_video_frames)
        tokenizer = processors.tokenizer
        # The placeholder of some families, such as Idefics 3, is the marker of an image.
        media_tokens = tokenizer.convert_ids_to_tokens(family.media_token_ids(processors.hf_config))
        self._media_tokens = tuple(token for token in media_tokens if token not in MARKERS.values())
        ignore = (*self._media_tokens, *(MARKERS.values() if family.has_vision else ()))
        self._special_tokens = SpecialTokens(tokenizer, tokenize=self._chat.tokenize, ignore=ignore)
        self._shows_blank = False
        self._limits_reached: set[str] = set()  # names of rows; shared by copies

    def with_default_image_dir(self, folder: Path) -> PromptBuilder:
        """Return this builder with relative paths starting from folder, unless image_dir is set."""
        builder = copy.copy(self)
        builder.image_dir = folder if self.image_dir is None else self.image_dir
        return builder

    def with_blank_media(self) -> PromptBuilder:
        """Return this builder with images and videos of one colour and the same size.

        A model that does as well with them does not need the images. Token ids are the same, as
        they would not be without images.
        """
        builder = copy.copy(self)
        builder._shows_blank = True
        return builder

    def measure(self, row: Mapping[str, Any], prompt_id: str) -> tuple[int, tuple[tuple[int, int, int], ...]]:
        """Return the prompt tokens of a row, and the grid of each image or video in patches.

        No image is decoded. Raises: as build, except for errors that only decoding reveals.
        """
        media = self._media(row, prompt_id)
        sizes = self._sizes(media)
        return len(self._tokens(row, media, sizes, prompt_id).token_ids), self._placeholders.grids(sizes)

    def inspect(
        self, row: Mapping[str, Any], prompt_id: str, on_image: Callable[[Image.Image], None] | None = None
    ) -> PromptTokens:
        """Return the tokens of a row's prompt, after decoding every image and video.

        on_image: called with each decoded image, also if the row then turns out to be unusable.
        Raises: exactly as build with process_images.
        """
        media = self._media(row, prompt_id)
        if media.kind == "video":
            # Before frames are decoded, since max_prompt_length limits their number.
            tokens = self._tokens(row, media, self._sizes(media), prompt_id)
            for layout, frames in self._videos(media):
                with reserve_frames(layout.width, layout.height):
                    deque(frames, maxlen=0)  # decodes all frames
            return tokens
        sizes: list[MediaSize] = []
        with closing(decoded_images(media.sources, sizes)) as images:
            for image in images:
                if on_image is not None:
                    on_image(image)
                del image  # before the next one is decoded
        return self._tokens(row, media, sizes, prompt_id)

    def build(self, row: Mapping[str, Any], prompt_id: str) -> Prompt:
        """Return the prompt of a row.

        With process_images, its images or videos are processed here, in one call. Without, they are
        encoded files of which only the headers, and a video's first frame, were decoded; PIL images
        in a row are encoded.
        Raises: UnusableRow if the row cannot be used, as far as was decoded; DataError if no such
        row can be used: a missing column, or images or videos for a model without them.
        """
        media = self._media(row, prompt_id)
        vision: Vision | EncodedMedia | None
        if not self._process_images:
            files = self._files(media)
            # Sizes are read from the bytes that will be decoded, not from the sources again.
            copies = [replace(source, content=file) for source, file in zip(media.sources, files, strict=True)]
            tokens = self._tokens(row, media, self._sizes(replace(media, sources=tuple(copies))), prompt_id)
            vision = encoded_files(files, media.kind)
        elif not media.sources:
            tokens, vision = self._tokens(row, media, [], prompt_id), None
        else:
            tokens, vision = self._process(row, media, prompt_id)
        return Prompt(
            prompt_id=prompt_id,
            token_ids=tokens.token_ids,
            vision=vision,
            text=tokens.text,
            ground_truth=column_value(row, self.data.answer_key),
            row=self._without_media(row),
            image_refs=tuple(source.where for source in media.sources),
            image_sizes=tokens.image_sizes,
        )

    def encoded_media(self, row: Mapping[str, Any], prompt_id: str, *, with_videos: bool) -> EncodedMedia | None:
        """Return the images of a row as encoded files, or its videos if these are asked for.

        Raises: as build.
        """
        media = self._media(row, prompt_id)
        if media.kind == "video" and not with_videos:
            return None
        if media.kind == "video" and self._shows_blank:
            raise DataError(
                f"{prompt_id}: blank videos are not files, which a reward function with REWARD_IMAGES gets; evaluate "
                "without --blind, or with a reward function that does not look at videos"
            )
        return encoded_files(self._files(media), media.kind)

    def file_digests(self, row: Mapping[str, Any], prompt_id: str) -> str:
        """Return a digest of each image or video that a row names by path; "" if it names none.

        Raises: as build.
        """
        media = self._media(row, prompt_id)
        return linked_digests(media.sources, media.kind)

    def _process(self, row: Mapping[str, Any], media: _RowMedia, name: str) -> tuple[PromptTokens, Vision]:
        """Return the tokens and the pixel values of a row with images or videos."""
        if media.kind == "image":
            assert self.image_processor is not None
            sizes: list[MediaSize] = []
            with closing(decoded_images(media.sources, sizes)) as images:
                vision = self.image_processor.process(images)
            tokens = self._tokens(row, media, sizes, name)
            processed = self.image_processor.tokens_of(vision)
        else:
            assert self.video_processor is not None
            videos = self._videos(media)
            # Before frames are decoded, since max_prompt_length limits their number.
            tokens = self._tokens(row, media, [layout for layout, _ in videos], name)
            vision = self.video_processor.process(videos)
            processed = self.video_processor.tokens_of(vision)
        assert processed == tokens.media_tokens, (
            f"{name}: {tokens.media_tokens} {media.kind} placeholders, but the processor made {processed}"
        )
        return tokens, vision

    def _media(self, row: Mapping[str, Any], name: str) -> _RowMedia:
        """Return the images or videos of a row. Raises: as build."""
        data = self.data
        images, image_key = _media_of(row, "image", key=data.image_key, prompt_key=data.prompt_key)
        videos, video_key = _media_of(row, "video", key=data.video_key, prompt_key=data.prompt_key)
        if images and videos:
            raise UnusableRow(
                "mixed_media",
                f"{name}: {len(images)} images in {image_key!r} and {len(videos)} videos in {video_key!r}; a row may "
                "have either",
            )
        if images and self.image_processor is None:
            raise DataError(
                f"{name} has images in column {image_key!r}, but a {self._model_type} model takes none; "
                "train a vision-language model or a dataset without images"
            )
        if videos and self.video_processor is None:
            raise DataError(
                f"{name} has videos in column {video_key!r}, but a {self._model_type} model takes none; train one "
                "that does, such as Qwen2.5-VL or Qwen3-VL, or a dataset without videos"
            )
        if 0 < self._limit_images < len(images):
            raise UnusableRow(
                "image_count", f"{name}: {len(images)} images, more than limit_images={self._limit_images}"
            )
        key, found = (video_key, videos) if videos else (image_key, images)
        kind: MediaKind = "video" if videos else "image"
        sources = (self._source(each, kind, f"{name}/{key}/{index}") for index, each in enumerate(found))
        if self._shows_blank and kind == "image":
            sources = (replace(each, content=_blank_image(image_size(each))) for each in sources)
        return _RowMedia(kind, tuple(sources))

    def _source(self, given: Any, kind: MediaKind, name: str) -> MediaSource:
        content = plain_source(given, kind, name)
        return MediaSource(content, media_name(content, name), self.data.max_image_pixels, self.image_dir)

    def _sizes(self, media: _RowMedia) -> list[MediaSize]:
        """Return the sizes in the headers of images, or the layouts of videos."""
        if media.kind == "image":
            return [image_size(source) for source in media.sources]
        return [video_layout(source, self._sampling) for source in media.sources]

    def _files(self, media: _RowMedia) -> tuple[bytes, ...]:
        if media.kind == "image":
            return tuple(map(encoded_image, media.sources))
        if self._shows_blank:  # videos are sent to workers as files, and none is encoded here
            raise DataError(
                f"{media.sources[0].where}: blank videos are made by a single worker only; set trainer.nnodes=1 "
                "trainer.n_gpus_per_node=1, or evaluate without --blind"
            )
        return tuple(encoded_video(source, self._sampling) for source in media.sources)

    def _videos(self, media: _RowMedia) -> list[tuple[VideoLayout, Iterator[Pixels]]]:
        videos = [open_video(source, self._sampling) for source in media.sources]
        return [(layout, _blank_frames(frames)) for layout, frames in videos] if self._shows_blank else videos

    def _without_media(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return without_column(without_column(row, self.data.image_key), self.data.video_key)

    def _tokens(self, row: Mapping[str, Any], media: _RowMedia, sizes: Sequence[MediaSize], name: str) -> PromptTokens:
        """Tokenize a row with images or videos of these sizes; all token ids are made here."""
        messages, masked = self._messages(row, name)
        self._check_markers(row, messages, media, name)
        try:
            text = self._chat.render(messages, generation_prompt=self._generation_prompt)
        except TemplateFailure as error:
            raise self._template_error(name, "the chat template raises an error", error) from error
        self._check_text([text], name)
        template_ids = self._chat.tokenize(text) if masked is None else masked.tokenize(text)
        num_placeholders = self._placeholders.count(template_ids, media.kind)
        if num_placeholders != len(sizes):
            counts = f"placeholders that the chat template writes: {num_placeholders}, {media.kind}s: {len(sizes)}"
            hint = f'it has to write one for each content part of {{"type": "{media.kind}"}}'
            raise UnusableRow("markers", f"{name}: {counts}; {hint}")
        token_ids, expanded = self._placeholders.expand(template_ids, media.kind, sizes)
        unknown = self._chat.find_unknown(token_ids)
        if unknown is not None:
            raise UnusableRow("vocabulary", f"{name}: {unknown}")
        if len(token_ids) > self.data.max_prompt_length:
            num_expanded = sum(map(len, expanded))
            share = f" ({num_expanded} of them for {media.kind}s)" if expanded else ""
            message = f"{name}: {len(token_ids)} tokens{share}, more than max_prompt_length="
            raise UnusableRow(
                "overlong",
                f"{message}{self.data.max_prompt_length}",
                num_tokens=len(token_ids),
                media_tokens=num_expanded,
            )
        prompt_text = messages_as_text(messages)
        return PromptTokens(
            tuple(token_ids),
            tuple(self._placeholders.count(ids, media.kind) for ids in expanded),
            prompt_text if masked is None else masked.unmask(prompt_text),
            self._placeholders.processed_sizes(sizes),
        )

    def _messages(self, row: Mapping[str, Any], name: str) -> tuple[list[Message], MaskedTokens | None]:
        """Return the row's chat messages, with format_prompt applied to the last one.

        Special tokens in the row's own text are masked; the second value is None if there are none.
        """
        data = self.data
        if not has_column(row, data.prompt_key) or not has_column(row, data.answer_key):
            require_columns(column_names(row), name, data)
        if column_value(row, data.answer_key) is None:
            raise UnusableRow("answer", f"{name}: column {data.answer_key!r} is empty")
        messages = read_messages(column_value(row, data.prompt_key), f"{name}: column {data.prompt_key!r}")
        texts = [message.content for message in messages]
        self._check_text(texts, name)
        check_row_size(self._without_media(row), name)
        masked = None if data.allow_special_tokens else self._special_tokens.find(texts)
        if masked is not None:
            messages = [Message(message.role, masked.mask(message.content)) for message in messages]
        if self._format is not None:
            try:
                messages[-1] = Message("user", render(self._format, "plain", {"content": messages[-1].content}))
            except TemplateFailure as error:
                raise self._template_error(name, "format_prompt fails", error) from error
        if data.system_prompt is not None and messages[0].role != "system":
            messages.insert(0, Message("system", data.system_prompt))
        return messages, masked

    def _check_text(self, texts: Sequence[str], name: str) -> None:
        """Raise UnusableRow if texts are far too long for a prompt's tokens, or are not UTF-8.

        The error's num_tokens is the number of bytes; no text has more tokens than bytes.
        """
        num_characters = sum(map(len, texts))
        if num_characters > self._max_characters:
            raise UnusableRow(
                "overlong",
                f"{name}: {num_characters:,} characters of text, which are not counted in tokens: more than "
                f"{self._max_characters:,}, for max_prompt_length={self.data.max_prompt_length}",
                num_tokens=sum(len(text.encode("utf-8", "surrogatepass")) for text in texts),
            )
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                half = rf"\u{ord(text[error.start]):04x}"
                raise UnusableRow(
                    "encoding",
                    f"{name}: the text has {half}, half of a surrogate pair, which no model can read; remove it",
                ) from error

    def _check_markers(self, row: Mapping[str, Any], messages: Sequence[Message], media: _RowMedia, name: str) -> None:
        """Raise UnusableRow unless each image or video has a marker, and none a special token.

        For a text model, `<video>` is ordinary text.
        """
        keys: dict[MediaKind, str] = {"image": self.data.image_key, "video": self.data.video_key}
        for kind, key in keys.items():
            marker = MARKERS[kind]
            num_media = len(media.sources) if media.kind == kind else 0
            num_markers = sum(message.content.count(marker) for message in messages)
            if num_markers == num_media or (kind == "video" and self.image_processor is None):
                continue
            counts = f"{marker} markers in the text: {num_markers}, {kind}s: {num_media}"
            if num_markers == 0:
                hint = f"; put {marker} into the text where each belongs"
            elif not has_column(row, key):
                hint = f"; there is no column {key!r}, only {', '.join(sorted(column_names(row)))}: set data.{kind}_key"
            elif num_markers == 2 * num_media:
                hint = f"; a content part of type {kind!r} is a marker too: mark it once, as a part or in the text"
            else:
                hint = ""
            raise UnusableRow("markers", f"{name}: {counts}{hint}")
        for token in self._media_tokens:
            if any(token in message.content for message in messages):
                hint = f"mark images with {MARKERS['image']} and videos with {MARKERS['video']}"
                raise UnusableRow("media_tokens", f"{name}: the text contains the special token {token}; {hint}")

    def _template_error(self, name: str, what: str, error: TemplateFailure) -> DataError:
        """Return the error of a row whose template fails; DataError once too many reach a limit.

        Each of these takes seconds, and a dataset has many rows.
        """
        if isinstance(error, TemplateLimitError):
            self._limits_reached.add(name)
            if len(self._limits_reached) >= _MAX_LIMITS_REACHED:
                return DataError(
                    f"{name}: {what}: {error}; so it is with {_MAX_LIMITS_REACHED} rows, and no more are tried: "
                    "correct the template"
                )
        return UnusableRow("prompt", f"{name}: {what}: {error}")


def load_format_prompt(format_prompt: str) -> str:
    """Return the source of a template after rendering it once.

    format_prompt: a file name, or, if it contains {{ or {%, the template itself. Its one variable
    is the question of a row.
    Raises: ConfigError naming the file, line or unknown variable.
    """
    source = read_template(format_prompt)
    assert source is not None
    where = "data.format_prompt" if is_inline_template(format_prompt) else f"data.format_prompt={format_prompt}"
    try:
        variables = variables_of(source)
        if variables != {"content"}:
            found = ", ".join(sorted(variables)) or "no variable"
            raise ConfigError(
                f"{where} uses {found}; it must use the one variable {{{{ content }}}}, the row's question"
            )
        source = source.strip()
        render(source, "plain", {"content": "question"})
    except TemplateFailure as error:
        line = "" if error.line is None else f" in line {error.line}"
        raise ConfigError(f"{where} is not a usable Jinja template: {error}{line}") from error
    return source


def _media_of(row: Mapping[str, Any], kind: MediaKind, *, key: str, prompt_key: str) -> tuple[list[Any], str]:
    """Return the images, or the videos, of a row, and the column that they are from.

    key: a column that holds a list or a single image or video. If it is empty, the content parts of
    the chat messages in prompt_key are used.
    """
    media = column_value(row, key)
    found = [] if media is None else list(media) if isinstance(media, list | tuple) else [media]
    if not found and (held := media_in_messages(column_value(row, prompt_key), kind)):
        return held, prompt_key
    return found, key


def _blank_image(size: tuple[int, int]) -> bytes:
    """Return a PNG file of one colour."""
    blank = Image.new("RGB", size, (GREY, GREY, GREY))
    return encoded_image(MediaSource(blank, "blank image", max_pixels=size[0] * size[1]))


def _blank_frames(frames: Iterator[Pixels]) -> Iterator[Pixels]:
    return (np.full_like(frame, GREY) for frame in frames)
