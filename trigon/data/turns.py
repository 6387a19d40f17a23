"""Tokenizes what stands between the turns of an episode, as the chat template writes it.

    ...<|im_start|>assistant | I look closer.<|im_end|> | <|im_start|>user...<|im_start|>assistant
    made by prompts.py       | sampled by the model     | reply(): observation and next header

The tokens that the model sampled are never decoded and tokenized again: a turn's observation is
rendered after a marker in place of the turn, and only the text after the marker is tokenized. This
is what the template writes only if it leaves earlier messages as they are. `check` compares its
renderings of growing conversations, and refuses a template that does not.

Does not know how environments run, or which engine samples.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trigon.data.chat_template import IMAGE_MARKER, VIDEO_MARKER, ChatTemplate, Message, messages_as_text
from trigon.data.images import image_size
from trigon.data.media_files import MediaSource, encoded_files
from trigon.data.rows import UnusableRow
from trigon.data.templates import TemplateFailure
from trigon.data.tokens import MaskedTokens, SpecialTokens
from trigon.data.vision import Placeholders
from trigon.environments.protocol import Observation
from trigon.errors import ConfigError, ObservationError
from trigon.types import EncodedMedia, ImageSizes

if TYPE_CHECKING:
    from trigon.models.load import Processors

_ROLE = "worker.rollout.observation_role"
_OVERRIDE = "data.override_chat_template"

_QUESTION = "trigon-question"
_ASKED = Message("user", _QUESTION)

_TURN = "trigon-turn-3c1f"
"""Stands for a sampled turn; no template or tool description has this text."""

_THOUGHT = "<think>\n"
"""With which some templates begin the assistant's turn, so that the model does not sample it."""

# Turns of the conversations that are compared: with a thought, with a call of a tool, and plain.
_CHECKED_TURNS = (
    "<think>\ntrigon-thought-{number}\n</think>\n\ntrigon-answer-{number}",
    '<tool_call>\n{{"name": "trigon-tool", "arguments": {{"number": {number}}}}}\n</tool_call>',
    "trigon-answer-{number}",
)
_NUM_TURNS = 3
_EXCERPT = 60
_REWRITES = "rewrites earlier messages"


@dataclass(frozen=True, slots=True, eq=False)
class TurnTokens:
    """The tokens that are appended to those so far, before the model samples its next turn.

    text: the text of the observation's messages, with one `<image>` for each image.
    media: the images, None without any. image_sizes: as Prompt.image_sizes.
    """

    token_ids: tuple[int, ...]
    text: str
    media: EncodedMedia | None
    image_sizes: ImageSizes = ()


class TurnTemplate:
    """Tokenizes what stands between turns, by the chat template of one model. Thread-safe."""

    def __init__(
        self, processors: Processors, *, tools: Sequence[Mapping[str, Any]] = (), max_image_pixels: int
    ) -> None:
        """Read the chat template and the placeholders of a model.

        Args:
            tools: the schemas that the prompts were built with.
            max_image_pixels: observations with a larger image are refused.
        Raises: ConfigError if the template exceeds the limits of templates.py.
        """
        self._chat = ChatTemplate(processors, tools=tools)
        self._placeholders = Placeholders(processors, tokenize=self._chat.tokenize)
        has_vision = processors.family.has_vision
        # Everything in an observation but the markers of its images is text, the tokens of images
        # and videos included.
        self._special_tokens = SpecialTokens(
            processors.tokenizer,
            tokenize=self._chat.tokenize,
            ignore=(IMAGE_MARKER,) if has_vision else (),
            also=(VIDEO_MARKER,) if has_vision else (),
        )
        self._takes_images = has_vision
        self._model_type = processors.family.model_type
        self._max_image_pixels = max_image_pixels
        self._end_texts = {
            token_id: str(processors.tokenizer.convert_ids_to_tokens(token_id))
            for token_id in processors.stop_token_ids
        }

    def opening(self, observation: Observation | None) -> TurnTokens:
        """Return what follows a prompt without generation prompt: the first observation, if any.

        Raises: ObservationError if the observation cannot be shown to the model.
        """
        messages, masked = self._messages(observation)
        try:
            before = self._chat.render([_ASKED], generation_prompt=False)
            text = self._chat.render([_ASKED, *messages], generation_prompt=True)
        except TemplateFailure as error:
            raise _unshowable(error) from error
        return self._tokens(text.removeprefix(before), observation, masked, after=None)

    def reply(self, observation: Observation, *, last_token_id: int) -> TurnTokens:
        """Return what follows a sampled turn: the rest of its end, and the observation.

        last_token_id: the last token of the turn. If it is a stop token, it takes the place of the
        token with which the template ends a turn; otherwise that is part of what is returned.
        Raises: ObservationError if the observation cannot be shown to the model.
        """
        messages, masked = self._messages(observation)
        try:
            text = self._render_reply(messages)
        except TemplateFailure as error:
            raise _unshowable(error) from error
        return self._tokens(text, observation, masked, after=self._end_texts.get(last_token_id))

    def check(self, roles: Collection[str], *, opens: bool = False) -> None:
        """Check that the template leaves earlier messages of a conversation as they are.

        Args:
            roles: the roles of the observations' messages.
            opens: whether a first observation follows the prompt.
        Raises: ConfigError, with what the template does, for one that rewrites or removes them, and
            for one that does not write messages of these roles.
        """
        for role in sorted(roles):
            problem = self._find_problem(role)
            if problem:
                other = "tool" if role == "user" else "user"
                works = not self._find_problem(other) and not (opens and self._find_opening_problem(other))
                hint = f"set {_ROLE}={other}, for which it can, or" if works else "set"
                raise ConfigError(
                    f"the chat template cannot be used for observations of role {role!r}: {problem}; {hint} "
                    f"{_OVERRIDE} to one that writes them and keeps earlier messages as they are (docs/agents.md)"
                )
            problem = self._find_opening_problem(role) if opens else ""
            if problem:
                raise ConfigError(
                    f"the chat template cannot write a first observation, of role {role!r}, after the question: "
                    f"{problem}; set {_OVERRIDE} to a template that can (docs/agents.md)"
                )

    def takes_images(self, role: str) -> bool:
        """Return whether the template writes a placeholder for an image in messages of a role."""
        if not self._takes_images:
            return False
        try:
            text = self._render_reply([Message(role, f"{IMAGE_MARKER}{_QUESTION}")])
        except TemplateFailure:
            return False
        return self._placeholders.count(self._chat.tokenize(text), "image") == 1

    def _messages(self, observation: Observation | None) -> tuple[list[Message], MaskedTokens | None]:
        """Return an observation's messages, with special tokens masked if there are any.

        Its length and its markers are within the limits of environments/protocol.py.
        """
        if observation is None:
            return [], None
        if not observation.messages:
            raise ObservationError("an observation has no messages; return a text, an image, or both")
        for message in observation.messages:
            if message.images and not self._takes_images:
                raise ObservationError(
                    f"an observation has {len(message.images)} images, but a {self._model_type} model takes none; "
                    "train a vision-language model, or return text"
                )
        masked = self._special_tokens.find([message.text for message in observation.messages])
        messages = [
            Message(each.role, each.text if masked is None else masked.mask(each.text)) for each in observation.messages
        ]
        return _join_user_messages(messages), masked

    def _tokens(
        self, text: str, observation: Observation | None, masked: MaskedTokens | None, *, after: str | None
    ) -> TurnTokens:
        """Tokenize the rendered text of an observation.

        after: the text of the stop token before it, None if there is none.
        """
        if after is not None:
            # Tokenized with the stop token before it, since some tokenizers treat the beginning of
            # a text differently.
            text = after + self._without_end(text)
        template_ids = self._chat.tokenize(text) if masked is None else masked.tokenize(text)
        if after is not None:
            template_ids = template_ids[1:]
        observed = () if observation is None else observation.messages
        files = tuple(file for message in observed for file in message.images)
        num_placeholders = self._placeholders.count(template_ids, "image")
        if num_placeholders != len(files):
            roles = ", ".join(sorted({message.role for message in observed}))
            raise ObservationError(
                f"the chat template writes {num_placeholders} placeholders for {len(files)} images in messages of role "
                f"{roles}; set {_ROLE} to the other role, or {_OVERRIDE} to a template that writes one for each"
            )
        sizes = [self._size(file) for file in files]
        token_ids, _ = self._placeholders.expand(template_ids, "image", sizes)
        unknown = self._chat.find_unknown(token_ids)
        if unknown is not None:
            raise ObservationError(f"{unknown}; call resize_token_embeddings on the model, or return other text")
        shown = messages_as_text([Message(message.role, message.text) for message in observed]) if observed else ""
        return TurnTokens(
            tuple(token_ids), shown, encoded_files(files, "image"), self._placeholders.processed_sizes(sizes)
        )

    def _size(self, file: bytes) -> tuple[int, int]:
        try:
            return image_size(MediaSource(file, "an observation's image", self._max_image_pixels))
        except UnusableRow as error:
            raise ObservationError(str(error)) from error

    def _without_end(self, text: str) -> str:
        """Return a text without the stop token at its beginning, which ends the turn before."""
        stripped = text.lstrip()
        return next((stripped.removeprefix(end) for end in self._end_texts.values() if stripped.startswith(end)), text)

    def _render_reply(self, messages: Sequence[Message]) -> str:
        """Return what the template writes after a turn. Raises: TemplateFailure."""
        rendered = self._chat.render([_ASKED, Message("assistant", _TURN), *messages], generation_prompt=True)
        return rendered.partition(_TURN)[2]

    def _find_problem(self, role: str) -> str:
        """Return why conversations with observations of a role cannot be appended to, or ""."""
        try:
            return next(filter(None, (self._find_problem_of(turn, role) for turn in _CHECKED_TURNS)), "")
        except TemplateFailure as error:
            return f"it raises an error: {error}"

    def _find_problem_of(self, turn: str, role: str) -> str:
        """Render a conversation that grows by a turn and an observation, and compare.

        Space around a turn does not count: many templates strip it, or add it.
        """
        if _TURN not in self._chat.render([_ASKED, Message("assistant", _TURN)], generation_prompt=False):
            return "it does not write the text of a turn"
        messages = [_ASKED]
        so_far = self._chat.render(messages, generation_prompt=True)
        begun = so_far.endswith(_THOUGHT)
        if begun and not turn.startswith(_THOUGHT):
            turn = f"{_THOUGHT}trigon-thought-{{number}}\n</think>\n\n{turn}"
        for number in range(_NUM_TURNS):
            answer = turn.format(number=number)
            sampled = answer.removeprefix(_THOUGHT) if begun else answer
            # Two at once, as after two calls; of role "user" they are one message.
            texts = [f"trigon-observation-{number}-{index}" for index in range(2 if number == 1 else 1)]
            observed = _join_user_messages([Message(role, text) for text in texts])
            messages += [Message("assistant", answer), *observed]
            rendered = self._chat.render(messages, generation_prompt=True)
            added = rendered.removeprefix(so_far).lstrip()
            if not rendered.startswith(so_far) or not added.startswith(sampled):
                lost_thought = _THOUGHT in turn and f"trigon-thought-{number}" not in rendered
                what = "removes the thoughts (<think>...</think>) of earlier turns" if lost_thought else _REWRITES
                return _describe(what, so_far + sampled, rendered)
            reply = added.removeprefix(sampled)
            if any(text not in reply for text in texts):
                return "it does not write their text"
            expected = self._render_reply(observed)
            if reply != expected:
                return _describe("writes an observation differently later in a conversation", expected, reply)
            so_far = rendered
        return ""

    def _find_opening_problem(self, role: str) -> str:
        """Return why an observation of a role cannot follow a prompt, or ""."""
        try:
            before = self._chat.render([_ASKED], generation_prompt=False)
            text = self._chat.render([_ASKED, Message(role, _TURN)], generation_prompt=True)
        except TemplateFailure as error:
            return f"it raises an error: {error}"
        if text.startswith(before) and _TURN in text.removeprefix(before):
            return ""
        return _describe(_REWRITES, before, text)


def _unshowable(error: TemplateFailure) -> ObservationError:
    return ObservationError(f"the chat template raises an error for an observation: {error}")


def _join_user_messages(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which consecutive messages of the user are joined by line breaks.

    Many templates refuse two messages of the user in a row.
    """
    joined: list[Message] = []
    for message in messages:
        if joined and joined[-1].role == message.role == "user":
            joined[-1] = Message("user", f"{joined[-1].content}\n{message.content}")
        else:
            joined.append(message)
    return joined


def _describe(what: str, expected: str, found: str) -> str:
    """Return what a template does to earlier messages, with the first place that differs."""
    index = next(
        (index for index, (one, other) in enumerate(zip(expected, found, strict=False)) if one != other),
        min(len(expected), len(found)),
    )
    start = max(0, index - _EXCERPT // 3)
    was, now = (repr(text[start : start + _EXCERPT]) for text in (expected, found))
    return f"it {what}: {was} became {now}"
