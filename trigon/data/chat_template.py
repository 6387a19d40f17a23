"""Chat messages: read from rows, rendered with a model's chat template, and tokenized.

A row's prompt is a text, or a list of chat messages whose contents are texts or content parts. All
of them are read as messages with text contents, in which `<image>` and `<video>` mark the positions
of images and videos. Prompts (prompts.py) and what comes between the turns of an episode (turns.py)
are made by the same code, so that both are written as the model's chat template writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from trigon.data.rows import UnusableRow
from trigon.data.templates import TemplateFailure, check_chat_template, render_chat
from trigon.types import MediaKind

if TYPE_CHECKING:
    from trigon.models.load import Processors

IMAGE_MARKER = "<image>"
"""Marks the position of an image in a row's text, once per image."""

VIDEO_MARKER = "<video>"
"""The same for a video."""

MARKERS: dict[MediaKind, str] = {"image": IMAGE_MARKER, "video": VIDEO_MARKER}

_KINDS: dict[str, MediaKind] = {marker: kind for kind, marker in MARKERS.items()}
_ANY_MARKER = re.compile("(<image>|<video>)")

_IMAGE_TOKENS = ("boi_token", "image_token", "eoi_token")
"""The tokenizer's attributes that ModelFamily.image_text may name."""

_PROBE = "trigon-probe"
"""A text that no template writes by itself."""

# What Qwen2.5's and Qwen3's chat templates write for tools: the format of Hermes.
_TOOLS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; its content has a marker for each image or video."""

    role: str
    content: str


def read_messages(value: Any, where: str) -> list[Message]:
    """Return the messages in a prompt column, of which the last is the user's.

    where: the row and column, for errors. Raises: UnusableRow.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise UnusableRow("prompt", f"{where} holds {_describe(value)}, not a text or a list of chat messages")
    messages = []
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or message.get("role") not in ("system", "user", "assistant"):
            role = message.get("role") if isinstance(message, Mapping) else None
            raise UnusableRow("prompt", f"{where}: message {number} has role {role!r}, not system, user or assistant")
        content = message.get("content")
        if isinstance(content, list):
            content = _join_parts(content)
        if not isinstance(content, str):
            raise UnusableRow("prompt", f"{where}: message {number} has {_describe(content)} for content, not a text")
        messages.append(Message(message["role"], content))
    if messages[-1].role != "user" or not messages[-1].content.strip():
        raise UnusableRow("prompt", f"{where}: the last message must be the user's, and not empty")
    return messages


def content_parts(content: str) -> str | list[dict[str, str]]:
    """Return a content for a vision model's chat template: a text, or parts if it has markers."""
    if not _ANY_MARKER.search(content):
        return content
    return [
        {"type": _KINDS[piece]} if piece in _KINDS else {"type": "text", "text": piece}
        for piece in _ANY_MARKER.split(content)
        if piece
    ]


def messages_as_text(messages: Sequence[Message]) -> str:
    """Return the content of a single message, or several messages, each after its role."""
    if len(messages) == 1:
        return messages[0].content
    return "\n\n".join(f"{message.role}: {message.content}" for message in messages)


def media_in_messages(value: Any, kind: MediaKind) -> list[Any]:
    """Return the images, or the videos, that the content parts of chat messages hold themselves.

    value: as of read_messages. Each is what the part has under "image", "image_url" or the like.
    """
    if not isinstance(value, list):
        return []
    contents = [message.get("content") for message in value if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [held for part in parts if _part_kind(part) == kind and (held := _held(part, kind)) is not None]


class ChatTemplate:
    """A model's chat template with its tokenizer. Thread-safe.

    If the template does not write the schemas of tools, as Qwen2.5-VL's, they are added to the
    system message, in the format of Hermes.
    """

    def __init__(self, processors: Processors, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Read the template of a tokenizer.

        tools: JSON schemas of tools, as transformers.utils.get_json_schema returns them.
        Raises: ConfigError if the template exceeds the limits of templates.py.
        """
        self._tokenizer = processors.tokenizer
        self._num_embeddings: int = processors.hf_config.get_text_config().vocab_size
        check_chat_template(self._tokenizer)
        # The first call resets the truncation and padding that a tokenizer was saved with, which is
        # not thread-safe.
        self.tokenize("")
        self._tools = [dict(tool) for tool in tools]
        self._content_of: Callable[[str], Any] = str
        if processors.family.has_vision:
            self._content_of = content_parts if self._shows(content_parts) or not self._shows(_parts) else _parts
        names = {name: getattr(self._tokenizer, name, "") for name in _IMAGE_TOKENS}
        written, replacement = (text.format(**names) for text in processors.family.image_text or ("", ""))
        self._image_text = (written, replacement)
        self._writes_tools = bool(tools) and self._render_tools()
        self._tools_section = ""
        if tools and not self._writes_tools:
            schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in self._tools)
            self._tools_section = _TOOLS.format(schemas=schemas)
            self._default_system = self._find_default_system()

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a rendered text."""
        # The chat template writes every special token itself, so none is added.
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def find_unknown(self, token_ids: Sequence[int]) -> str | None:
        """Return the token that the model has no embedding for, with the numbers; None if none is.

        Such are tokens that were added to the tokenizer without resizing the model. In the engines,
        they are an index out of range.
        """
        highest = max(token_ids, default=0)
        if highest < self._num_embeddings:
            return None
        token = self._tokenizer.convert_ids_to_tokens(highest)
        return f"the token {token!r} has the id {highest:,}, and the model has {self._num_embeddings:,} embeddings"

    def render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        """Return messages as the template writes them.

        generation_prompt: whether the beginning of the assistant's next message follows.
        Raises: TemplateFailure.
        """
        contents = self._contents_of(messages)
        if self._tools_section:
            self._add_tools_section(contents)
        return self._apply(
            contents, tools=self._tools if self._writes_tools else None, generation_prompt=generation_prompt
        )

    def _contents_of(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return messages as the template takes them."""
        return [{"role": message.role, "content": self._content_of(message.content)} for message in messages]

    def _apply(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None, generation_prompt: bool
    ) -> str:
        text = render_chat(self._tokenizer, messages, tools=tools, generation_prompt=generation_prompt)
        # Before tokenizing: the line ends that Gemma's processor adds become one token with others.
        written, replacement = self._image_text
        return text.replace(written, replacement) if written else text

    def _shows(self, content_of: Callable[[str], Any]) -> bool:
        """Return whether the template writes the text of contents in this form.

        LLaVA's template writes only contents that are lists of parts.
        """
        try:
            text = render_chat(self._tokenizer, [{"role": "user", "content": content_of(_PROBE)}])
        except TemplateFailure:  # every row has the same error
            return False
        return _PROBE in text

    def _render_tools(self) -> bool:
        """Return whether the template writes anything for tools."""
        probe = self._contents_of([Message("user", _PROBE)])
        try:
            with_tools = self._apply(probe, tools=self._tools, generation_prompt=True)
            return with_tools != self._apply(probe, tools=None, generation_prompt=True)
        except TemplateFailure:
            return True  # and each row has the error

    def _add_tools_section(self, messages: list[dict[str, Any]]) -> None:
        """Add the section to the system message. It is text, also where it contains a marker."""
        if not messages or messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._content_of(self._default_system)})
        system = messages[0]["content"]
        section = f"\n\n{self._tools_section}" if system else self._tools_section
        if isinstance(system, str) and self._content_of is not _parts:
            messages[0]["content"] = system + section
        else:
            parts = [{"type": "text", "text": system}] if isinstance(system, str) else system
            messages[0]["content"] = [*parts, {"type": "text", "text": section}]

    def _find_default_system(self) -> str:
        """Return the system message that the template writes where there is none; "" if none."""
        question = Message("user", "trigon-question")
        try:
            default, given = (
                self._apply(self._contents_of(messages), tools=None, generation_prompt=False)
                for messages in ([question], [Message("system", _PROBE), question])
            )
        except TemplateFailure:
            return ""
        before, _, after = given.partition(_PROBE)
        if default.startswith(before) and default.endswith(after) and len(default) >= len(before) + len(after):
            return default[len(before) : len(default) - len(after)]
        return ""


def _parts(content: str) -> list[dict[str, str]]:
    """Return a content as parts, also if it is text alone; none for an empty one."""
    parts = content_parts(content)
    if isinstance(parts, str):
        return [{"type": "text", "text": parts}] if parts else []
    return parts


def _join_parts(parts: Sequence[Any]) -> str | None:
    """Return content parts as a text with markers; None if one is not text, image or video."""
    pieces = []
    for part in parts:
        kind = _part_kind(part)
        if kind is None:
            return None
        pieces.append(part["text"] if kind == "text" else MARKERS[kind])
    return "".join(pieces)


def _part_kind(part: Any) -> MediaKind | Literal["text"] | None:
    """Return what a content part is, by its type or, without one, by its only other key."""
    match part:
        case {"type": "text" | "input_text", "text": str()}:
            return "text"
        case {"type": "image" | "image_url" | "input_image"}:
            return "image"
        case {"type": "video" | "video_url"}:
            return "video"
        case {"type": str()}:
            return None
        case {"text": str()}:
            return "text"
        case Mapping():
            kinds: tuple[MediaKind, ...] = ("image", "video")
            return next((kind for kind in kinds if _held(part, kind) is not None), None)
        case _:
            return None


def _held(part: Mapping[str, Any], kind: MediaKind) -> Any:
    """Return the image or video that a content part holds; None if no key of it has any."""
    return next((part[key] for key in (kind, f"{kind}_url", "url", "path") if part.get(key) is not None), None)


def _describe(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"an empty {type(value).__name__}" if value == [] else f"a value of type {type(value).__name__}"
