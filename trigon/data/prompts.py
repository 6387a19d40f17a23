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
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

from PIL import Image

from trigon.data.bad_rows import UnusableRow
from trigon.data.chat_template import ChatTemplate
from trigon.data.columns import column_names, column_value, has_column, require_columns, without_column
from trigon.data.decoding import reserve_frames
from trigon.data.format_prompt import load_format_prompt
from trigon.data.images import encoded_image, image_size, open_image
from trigon.data.media_files import encoded_files, linked_digests, media_name
from trigon.data.messages import MARKERS, Message, messages_as_text, read_messages
from trigon.data.placeholders import MediaSize, Placeholders
from trigon.data.row_media import (
    BLANK_READERS,
    RowMedia,
    check_count,
    check_markers,
    decoded_images,
    media_of,
    plain_source,
)
from trigon.data.special_tokens import MaskedTokens, SpecialTokens
from trigon.data.templates import TemplateFailure, TemplateLimitError, bounded_rendering
from trigon.data.text_limits import check_option_text, check_prompt_text, check_prompt_tokens, check_row_size
from trigon.data.videos import DEFAULT_SAMPLING, FrameSampling, encoded_video, open_video, video_layout
from trigon.data.vision import media_grids
from trigon.errors import DataError
from trigon.types import EncodedMedia, ImageSizes, MediaKind, Prompt, Vision

if TYPE_CHECKING:
    from trigon.models.load import Processors


_MAX_LIMITS_REACHED = 8
"""Rows for which a template may reach a limit (templates.py)."""


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A tokenized prompt. media_tokens: the number of placeholder tokens of each image or video.

    text: of the messages, before the chat template. image_sizes: as Prompt.image_sizes.
    """

    token_ids: tuple[int, ...]
    media_tokens: tuple[int, ...]
    text: str
    image_sizes: ImageSizes


class PromptBuilder:
    """Builds the prompts of rows for one model. Thread-safe.

    image_processor, video_processor: count their calls; None for a model without images, or videos.
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
        allow_special_tokens: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        generation_prompt: bool = True,
    ) -> None:
        """Load the template and the processors.

        Args:
            prompt_key: the column of the question, a text or a list of chat messages
                ({"role", "content"}). A dotted name reaches into structs, as for the other columns
                (columns.py).
            answer_key: the column of the ground truth.
            image_key: the column of the images, a list or a single one; it may be missing, empty or
                None.
            image_dir: the folder that relative image and video paths start from; None: the folder
                of the dataset (see `with_default_image_dir`).
            format_prompt: a Jinja template, see format_prompt.py; None: the question is unchanged.
            system_prompt: precedes every row that has no system message.
            max_prompt_length: in tokens, including image tokens.
            max_image_pixels: images, and videos with frames, above it are rejected before they are
                decoded.
            limit_images: images allowed in one row; 0: any number.
            process_images: compute the pixel values of prompts; False: prompts have their images
                and videos as encoded files (see media_processing.py). Token ids are the same.
            video_key: the column of the videos, like image_key. A row has images or videos, not
                both.
            video_sampling: which frames of a video are sampled.
            allow_special_tokens: special tokens in a row's text are special; False: they are
                tokenized as text (special_tokens.py).
            tools: JSON schemas of the functions that the model may call, which the chat template
                describes to it.
            generation_prompt: prompts end with the beginning of the assistant's message; False:
                with the question, where the first observation of an environment follows it
                (turns.py).
        Raises: ConfigError if format_prompt or the chat template cannot be used.
        """
        family, hf_config = processors.family, processors.hf_config
        self.prompt_key = prompt_key
        self.answer_key = answer_key
        self.image_key = image_key
        self.image_dir = image_dir
        self.max_prompt_length = max_prompt_length
        self.video_key = video_key
        self._chat = ChatTemplate(processors, tools=tools)
        self._placeholders = Placeholders(processors, tokenize=self._chat.tokenize)
        self.image_processor = self._placeholders.image_processor
        self.video_processor = self._placeholders.video_processor
        self._generation_prompt = generation_prompt
        self._model_type = family.model_type
        self._format = None if format_prompt is None else load_format_prompt(format_prompt)
        check_option_text(system_prompt or "", "data.system_prompt", max_prompt_length=max_prompt_length)
        self._system_prompt = system_prompt
        self._max_image_pixels = max_image_pixels
        self._limit_images = limit_images
        self._process_images = process_images
        self._video_sampling = video_sampling
        tokenizer = processors.tokenizer
        self._media_tokens = tuple(tokenizer.convert_ids_to_tokens(family.media_token_ids(hf_config)))
        ignore = (*self._media_tokens, *(MARKERS.values() if family.has_vision else ()))
        self._special_tokens = SpecialTokens(tokenizer, tokenize=self._chat.tokenize, ignore=ignore)
        self._allow_special_tokens = allow_special_tokens
        self._shows_blank = False
        self._limits_reached: set[str] = set()  # names of rows; shared by copies

    @property
    def writes_tools(self) -> bool:
        """Whether the chat template describes tools itself; see ChatTemplate."""
        return self._chat.writes_tools

    def with_default_image_dir(self, folder: Path) -> PromptBuilder:
        """Return this builder with relative paths starting from folder, unless image_dir is set."""
        builder = copy.copy(self)
        builder.image_dir = folder if self.image_dir is None else self.image_dir
        return builder

    def with_blank_media(self) -> PromptBuilder:
        """Return this builder with images and videos of one colour and the same size (blank.py).

        Token ids are the same.
        """
        builder = copy.copy(self)
        builder._shows_blank = True
        return builder

    def check_columns(self, columns: Collection[str], where: str) -> None:
        """Raise DataError, with the existing columns, if prompt_key or answer_key is missing.

        columns: the names of all columns and structs' fields (columns.column_names).
        where: the name of the dataset, for the error.
        """
        require_columns(columns, where, prompt_key=self.prompt_key, answer_key=self.answer_key)

    def count(self, row: Mapping[str, Any]) -> int:
        """Return the number of prompt tokens of a row, image and video tokens included.

        No image is decoded.
        Raises: as build, except for errors that only decoding reveals.
        """
        return len(self._tokens_from_headers(row, self._media(row, "row"), "row").token_ids)

    def measure(self, row: Mapping[str, Any], prompt_id: str) -> tuple[int, tuple[tuple[int, int, int], ...]]:
        """Return the prompt tokens of a row, and the grid of each image or video in patches.

        As count, from headers alone.
        """
        media = self._media(row, prompt_id)
        sizes = list(self._read_media(media, image_size, video_layout))
        grids = media_grids(sizes, self.image_processor, self.video_processor)
        return len(self._tokens(row, media, sizes, prompt_id).token_ids), grids

    def check(self, row: Mapping[str, Any], prompt_id: str) -> int:
        """Return the number of prompt tokens, as count, after decoding every image and video.

        Raises: exactly as build with process_images.
        """
        return len(self.inspect(row, prompt_id).token_ids)

    def inspect(
        self, row: Mapping[str, Any], prompt_id: str, on_image: Callable[[Image.Image], None] | None = None
    ) -> PromptTokens:
        """Return the tokens of a row's prompt, after decoding every image and video.

        on_image: called with each decoded image, also if the row then turns out to be unusable.
        Raises: exactly as build with process_images.
        """
        media = self._media(row, prompt_id)
        match media.kind:
            case "image":
                sizes: list[MediaSize] = []
                with closing(self._decoded_images(media, sizes)) as images:
                    for image in images:
                        if on_image is not None:
                            on_image(image)
                        del image  # before the next one is decoded
                tokens = self._tokens(row, media, sizes, prompt_id)
            case "video":
                # Before frames are decoded, since max_prompt_length limits their number.
                tokens = self._tokens_from_headers(row, media, prompt_id)
                for layout, frames in self._read_media(media, open_image, open_video):
                    with reserve_frames(layout.width, layout.height):
                        deque(frames, maxlen=0)  # decodes all frames
            case _:
                assert_never(media.kind)
        return tokens

    def build(self, row: Mapping[str, Any], prompt_id: str) -> Prompt:
        """Return the prompt of a row.

        With process_images, its images or videos are processed here, in one call. Without, they are
        encoded files of which only the headers, and a video's first frame, were decoded; PIL images
        in a row are encoded.
        Raises: UnusableRow if the row cannot be used, as far as was decoded; DataError if no such
        row can be used: a missing column, or images or videos for a model without them.
        """
        media = self._media(row, prompt_id)
        make = self._with_pixels if self._process_images else self._with_files
        tokens, vision = make(row, media, prompt_id)
        return Prompt(
            prompt_id=prompt_id,
            token_ids=tokens.token_ids,
            vision=vision,
            text=tokens.text,
            ground_truth=column_value(row, self.answer_key),
            row=without_column(without_column(row, self.image_key), self.video_key),
            image_refs=media.names,
            image_sizes=tokens.image_sizes,
        )

    def encoded_media(self, row: Mapping[str, Any], prompt_id: str, *, with_videos: bool) -> EncodedMedia | None:
        """Return the images of a row as encoded files, or its videos if these are asked for.

        Raises: as build.
        """
        media = self._media(row, prompt_id)
        if media.kind == "video" and not with_videos:
            return None
        return encoded_files(self._read_media(media, encoded_image, encoded_video), media.kind)

    def file_digests(self, row: Mapping[str, Any], prompt_id: str) -> str:
        """Return a digest of each image or video that a row names by path; "" if it names none.

        Raises: as build.
        """
        media = self._media(row, prompt_id)
        return linked_digests(media.sources, media.kind, media.names, self.image_dir)

    def _with_pixels(
        self, row: Mapping[str, Any], media: RowMedia, name: str
    ) -> tuple[PromptTokens, Vision | EncodedMedia | None]:
        if not media.sources:
            return self._tokens(row, media, [], name), None
        match media.kind:
            case "image":
                assert self.image_processor is not None
                sizes: list[MediaSize] = []
                with closing(self._decoded_images(media, sizes)) as images:
                    vision = self.image_processor.process(images)
                tokens = self._tokens(row, media, sizes, name)
                processed = self.image_processor.tokens_of(vision)
            case "video":
                videos = list(self._read_media(media, open_image, open_video))
                # Before frames are decoded, since max_prompt_length limits their number.
                tokens = self._tokens(row, media, [layout for layout, _ in videos], name)
                assert self.video_processor is not None
                vision = self.video_processor.process(videos)
                processed = self.video_processor.tokens_of(vision)
            case _:
                assert_never(media.kind)
        assert processed == tokens.media_tokens, (
            f"{name}: {tokens.media_tokens} {media.kind} placeholders, but the processor made {processed}"
        )
        return tokens, vision

    def _with_files(
        self, row: Mapping[str, Any], media: RowMedia, name: str
    ) -> tuple[PromptTokens, Vision | EncodedMedia | None]:
        files = tuple(self._read_media(media, encoded_image, encoded_video))
        # Sizes are read from the encoded bytes that will be decoded, not from the sources again.
        tokens = self._tokens_from_headers(row, replace(media, sources=files), name)
        return tokens, encoded_files(files, media.kind)

    def _media(self, row: Mapping[str, Any], name: str) -> RowMedia:
        """Return the images or videos of a row. Raises: as build."""
        images, image_key = media_of(row, "image", key=self.image_key, prompt_key=self.prompt_key)
        videos, video_key = media_of(row, "video", key=self.video_key, prompt_key=self.prompt_key)
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
        check_count(images, name, limit_images=self._limit_images)
        key, found = (video_key, videos) if videos else (image_key, images)
        kind: MediaKind = "video" if videos else "image"
        sources = tuple(plain_source(each, kind, f"{name}/{key}/{index}") for index, each in enumerate(found))
        names = tuple(media_name(source, f"{name}/{key}/{index}") for index, source in enumerate(sources))
        return RowMedia(kind, sources, names)

    def _read_media(
        self, media: RowMedia, read_image: Callable[..., Any], read_video: Callable[..., Any]
    ) -> Iterator[Any]:
        """Yield the result of one of the functions for each image, or for each video."""
        read = read_image if media.kind == "image" else read_video
        read = BLANK_READERS.get(read, read) if self._shows_blank else read
        read = read if media.kind == "image" else partial(read, sampling=self._video_sampling)
        for source, name in zip(media.sources, media.names, strict=True):
            yield read(source, where=name, image_dir=self.image_dir, max_pixels=self._max_image_pixels)

    def _decoded_images(self, media: RowMedia, sizes: list[MediaSize]) -> Generator[Image.Image]:
        """Return the images of a row, each to be dropped before the next; sizes gets all sizes."""
        return decoded_images(
            media, sizes, image_dir=self.image_dir, max_pixels=self._max_image_pixels, blank=self._shows_blank
        )

    def _tokens_from_headers(self, row: Mapping[str, Any], media: RowMedia, name: str) -> PromptTokens:
        """Tokenize a row with the sizes in the headers of its images or videos."""
        return self._tokens(row, media, list(self._read_media(media, image_size, video_layout)), name)

    def _tokens(self, row: Mapping[str, Any], media: RowMedia, sizes: Sequence[MediaSize], name: str) -> PromptTokens:
        """Tokenize a row with images or videos of these sizes; all token ids are made here."""
        messages, masked = self._messages(row, name)
        check_markers(
            row,
            messages,
            media,
            name,
            keys={"image": self.image_key, "video": self.video_key},
            takes_media=self.image_processor is not None,
            media_tokens=self._media_tokens,
        )
        try:
            text = self._chat.render(messages, generation_prompt=self._generation_prompt)
        except TemplateFailure as error:
            raise self._template_error(name, "the chat template raises an error", error) from error

        check_prompt_text([text], name, max_prompt_length=self.max_prompt_length)
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
        check_prompt_tokens(len(token_ids), expanded, media.kind, name, max_prompt_length=self.max_prompt_length)
        media_tokens = tuple(self._placeholders.count(ids, media.kind) for ids in expanded)
        prompt_text = messages_as_text(messages)
        return PromptTokens(
            tuple(token_ids),
            media_tokens,
            prompt_text if masked is None else masked.unmask(prompt_text),
            self._placeholders.processed_sizes(sizes),
        )

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

    def _messages(self, row: Mapping[str, Any], name: str) -> tuple[list[Message], MaskedTokens | None]:
        """Return the row's chat messages, with format_prompt applied to the last one.

        Special tokens in the row's own text are masked; the second value is None if there are none.
        """
        if not has_column(row, self.prompt_key) or not has_column(row, self.answer_key):
            self.check_columns(column_names(row), name)
        if column_value(row, self.answer_key) is None:
            raise UnusableRow("answer", f"{name}: column {self.answer_key!r} is empty")
        messages = read_messages(column_value(row, self.prompt_key), f"{name}: column {self.prompt_key!r}")
        texts = [message.content for message in messages]
        check_prompt_text(texts, name, max_prompt_length=self.max_prompt_length)
        check_row_size(without_column(without_column(row, self.image_key), self.video_key), name)
        masked = None if self._allow_special_tokens else self._special_tokens.find(texts)
        if masked is not None:
            messages = [Message(message.role, masked.mask(message.content)) for message in messages]
        if self._format is not None:
            try:
                with bounded_rendering():
                    content = self._format.render(content=messages[-1].content)
            except TemplateFailure as error:
                raise self._template_error(name, "format_prompt fails", error) from error
            messages[-1] = Message("user", content)
        if self._system_prompt is not None and messages[0].role != "system":
            messages.insert(0, Message("system", self._system_prompt))
        return messages, masked
