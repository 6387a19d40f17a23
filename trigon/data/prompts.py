"""From a dataset row to a prompt: one piece of code that counts, builds and feeds.

    row --format_prompt--> messages --chat template--> text --tokenizer--> ids --placeholders expanded--> token_ids

Knows column names, chat messages, `<image>` markers and tokenizers. A prompt's token ids follow from its text and the
sizes of its images alone, so a row is counted without decoding a pixel, and what was counted is what both engines
receive. Nothing is ever cut. Refuses to know where rows come from, in which order, and how an image is decoded.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jinja2 import StrictUndefined, Template, TemplateError, meta
from jinja2.sandbox import SandboxedEnvironment

from trigon.data.bad_rows import UnusableRow
from trigon.data.images import encoded_image, image_name, image_size, open_image
from trigon.data.vision import image_processor_of
from trigon.errors import ConfigError, DataError
from trigon.types import EncodedImages, Prompt, Vision

if TYPE_CHECKING:
    from trigon.models.load import Processors

Seen = TypeVar("Seen")

IMAGE_MARKER = "<image>"
"""Stands in a row's text where an image belongs, once for each image."""

_VIDEO_MARKER = "<video>"


@dataclass(frozen=True, slots=True)
class _Message:
    """One chat message; its content holds a marker for each image."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class _Layout:
    """A prompt but for its pixels. image_tokens: how many placeholders each image was given."""

    token_ids: tuple[int, ...]
    image_tokens: tuple[int, ...]
    text: str


class PromptBuilder:
    """Turns rows into prompts for one model. Safe to use from several threads.

    image_processor: counts its calls; None for a model without vision.
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
    ) -> None:
        """Prepare to build prompts.

        Args:
            prompt_key: the column with the question, a text or a list of chat messages ({"role", "content"}).
            answer_key: the column with the ground truth.
            image_key: the column with the images, a list or a single one; it may be missing, empty or None.
            image_dir: where relative image paths begin; None: with the dataset (see `rooted`).
            format_prompt: a Jinja template with the variable `content`: a file name or, with {{ or {% in it, itself.
            system_prompt: put before every row that brings no system message of its own.
            max_prompt_length: in tokens, image tokens included.
            max_image_pixels: images above it are refused before they are decoded.
            limit_images: images allowed in one row; 0: any number.
            process_images: give prompts their pixels; False: give them their images as files, for whoever makes pixels
                elsewhere (see data/processed.py). Token ids are the same.
        Raises: ConfigError if format_prompt cannot be used.
        """
        family, hf_config = processors.family, processors.hf_config
        self.prompt_key = prompt_key
        self.answer_key = answer_key
        self.image_key = image_key
        self.image_dir = image_dir
        self.max_prompt_length = max_prompt_length
        self.image_processor = image_processor_of(processors)
        self._image_token_id = family.image_token_id(hf_config) if family.has_vision else None
        wrap = [[getattr(processors.tokenizer, f"{name}_id")] for name in family.image_wrap or ()]
        self._image_wrap = (wrap[0], wrap[1]) if wrap else ([], [])
        self._model_type = family.model_type
        self._format = None if format_prompt is None else _load_format(format_prompt)
        self._system_prompt = system_prompt
        self._max_image_pixels = max_image_pixels
        self._limit_images = limit_images
        self._process_images = process_images
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
                nearest = difflib.get_close_matches(key, columns, n=1, cutoff=0.4)
                hint = f"; did you mean data.{option}={nearest[0]}?" if nearest else f"; set data.{option}"
                raise DataError(f"the dataset has no column {key!r}, only {', '.join(sorted(columns))}{hint}")

    def count(self, row: Mapping[str, Any]) -> int:
        """Return the number of prompt tokens of a row, image tokens included, decoding no image.

        Raises: as build, where it shows without decoding.
        """
        sizes = list(self._each(image_size, self._images(row, "row"), "row"))
        return len(self._lay_out(row, sizes, "row").token_ids)

    def check(self, row: Mapping[str, Any], prompt_id: str) -> int:
        """Return what count does, having decoded every image as well. Raises: exactly as build with process_images."""
        sources = self._images(row, prompt_id)
        layout = self._lay_out(row, list(self._each(image_size, sources, prompt_id)), prompt_id)
        for _ in self._each(open_image, sources, prompt_id):
            pass
        return len(layout.token_ids)

    def build(self, row: Mapping[str, Any], prompt_id: str) -> Prompt:
        """Return the prompt of a row; with process_images its images go through the image processor once, here.

        Without, they are files whose headers have been read: no pixel is decoded, but of a row that holds PIL images.
        Raises: UnusableRow if the row cannot be used, as far as was looked; DataError if no such row could: a missing
        column, or images for a model that has no vision.
        """
        sources = self._images(row, prompt_id)
        make = self._with_pixels if self._process_images else self._with_files
        layout, vision = make(row, sources, prompt_id)
        return Prompt(
            prompt_id=prompt_id,
            token_ids=layout.token_ids,
            vision=vision,
            text=layout.text,
            answer=row[self.answer_key],
            row={key: value for key, value in row.items() if key != self.image_key},
            image_refs=tuple(self._reference(source, index, prompt_id) for index, source in enumerate(sources)),
        )

    def _with_pixels(
        self, row: Mapping[str, Any], sources: Sequence[Any], name: str
    ) -> tuple[_Layout, Vision | EncodedImages | None]:
        images = list(self._each(open_image, sources, name))
        layout = self._lay_out(row, [image.size for image in images], name)
        if not images:
            return layout, None
        assert self.image_processor is not None
        vision = self.image_processor.process(images)
        fed = self.image_processor.tokens_of(vision)
        assert fed == layout.image_tokens, f"{name}: laid out {layout.image_tokens} image tokens, made {fed}"
        return layout, vision

    def _with_files(
        self, row: Mapping[str, Any], sources: Sequence[Any], name: str
    ) -> tuple[_Layout, Vision | EncodedImages | None]:
        files = tuple(self._each(encoded_image, sources, name))
        # Measured as they will be decoded: the bytes, not what they were read from.
        layout = self._lay_out(row, list(self._each(image_size, files, name)), name)
        if not files:
            return layout, None
        return layout, EncodedImages(files, tuple(hashlib.sha256(file).hexdigest() for file in files))

    def _images(self, row: Mapping[str, Any], name: str) -> list[Any]:
        images = row.get(self.image_key)
        if images is None:
            return []
        sources = list(images) if isinstance(images, list | tuple) else [images]
        if sources and self.image_processor is None:
            raise DataError(
                f"{name} has images in column {self.image_key!r}, but a {self._model_type} model sees none; "
                "train a vision-language model or a dataset without images"
            )
        if 0 < self._limit_images < len(sources):
            raise UnusableRow(
                "image_count", f"{name}: {len(sources)} images, more than limit_images={self._limit_images}"
            )
        return sources

    def _each(self, look: Callable[..., Seen], sources: Sequence[Any], name: str) -> Iterator[Seen]:
        """Yield what image_size, open_image or encoded_image says of each image of a row."""
        for index, source in enumerate(sources):
            yield look(
                source,
                where=self._reference(source, index, name),
                image_dir=self.image_dir,
                max_pixels=self._max_image_pixels,
            )

    def _reference(self, source: Any, index: int, name: str) -> str:
        """Return what an image is called in reports: "train:17/images/0 (figure.png)"."""
        file_name = image_name(source)
        return f"{name}/{self.image_key}/{index}" + (f" ({file_name})" if file_name else "")

    def _lay_out(self, row: Mapping[str, Any], sizes: Sequence[tuple[int, int]], name: str) -> _Layout:
        """Return the token ids of a row whose images have these (width, height)s: the only place where ids are made."""
        messages = self._messages(row, name)
        self._check_media(row, messages, len(sizes), name)
        try:
            text = self._tokenizer.apply_chat_template(
                [{"role": message.role, "content": _parts(message.content)} for message in messages],
                tokenize=False,
                add_generation_prompt=True,
            )
        except TemplateError as error:
            raise UnusableRow("prompt", f"{name}: the chat template refuses it: {error}") from error

        template_ids = self._tokenize(text)
        placeholders = template_ids.count(self._image_token_id) if self._image_token_id is not None else 0
        if placeholders != len(sizes):
            counts = f"placeholders that the chat template writes: {placeholders}, images: {len(sizes)}"
            hint = 'it has to write one for each content part of {"type": "image"}'
            raise UnusableRow("markers", f"{name}: {counts}; {hint}")
        image_tokens = tuple(self._image_tokens(width, height) for width, height in sizes)
        remaining = iter(image_tokens)
        token_ids: list[int] = []
        before, after = self._image_wrap
        for token_id in template_ids:
            shown = token_id == self._image_token_id
            token_ids.extend([*before, *[token_id] * next(remaining), *after] if shown else [token_id])
        if len(token_ids) > self.max_prompt_length:
            share = f" ({sum(image_tokens)} of them for images)" if image_tokens else ""
            limit = f"max_prompt_length={self.max_prompt_length}"
            raise UnusableRow("overlong", f"{name}: {len(token_ids)} tokens{share}, more than {limit}")
        return _Layout(tuple(token_ids), image_tokens, _readable(messages))

    def _image_tokens(self, width: int, height: int) -> int:
        assert self.image_processor is not None
        return self.image_processor.image_tokens(width, height)

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

    def _check_media(self, row: Mapping[str, Any], messages: Sequence[_Message], num_images: int, name: str) -> None:
        num_markers = sum(message.content.count(IMAGE_MARKER) for message in messages)
        if num_markers != num_images:
            counts = f"{IMAGE_MARKER} markers in the text: {num_markers}, images: {num_images}"
            if num_markers == 0:
                hint = f"; put {IMAGE_MARKER} into the text where each belongs"
            elif self.image_key not in row:
                hint = f"; there is no column {self.image_key!r}, only {', '.join(sorted(row))}: set data.image_key"
            else:
                hint = ""
            raise UnusableRow("markers", f"{name}: {counts}{hint}")
        if self.image_processor is not None and any(_VIDEO_MARKER in message.content for message in messages):
            raise UnusableRow("markers", f"{name}: the text holds {_VIDEO_MARKER}, but only images can be shown")
        for token in self._media_tokens:
            if any(token in message.content for message in messages):
                raise UnusableRow("media_tokens", f"{name}: the text spells {token}, which only an image may become")


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
    """Return {"type": "text", "text"} and {"type": "image"} parts as a text with markers; None if there are others."""
    pieces = []
    for part in parts:
        match part:
            case {"type": "text", "text": str(text)}:
                pieces.append(text)
            case {"type": "image"}:
                pieces.append(IMAGE_MARKER)
            case _:
                return None
    return "".join(pieces)


def _parts(content: str) -> str | list[dict[str, str]]:
    """Return a content as chat templates want it: text as it is, or text and image parts, split just at the markers."""
    if IMAGE_MARKER not in content:
        return content  # templates of text models know nothing else
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(IMAGE_MARKER)):
        if number > 0:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts


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
    if "{{" not in format_prompt and "{%" not in format_prompt:
        path = Path(format_prompt).expanduser()
        if not path.is_file():
            folder = path.parent if path.parent.is_dir() else Path()
            nearest = difflib.get_close_matches(path.name, sorted(entry.name for entry in folder.iterdir()), n=1)
            hint = (
                f"; did you mean {folder / nearest[0]}?"
                if nearest
                else "; give a file, or a template with {{ content }}"
            )
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
