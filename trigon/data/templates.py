"""Renders Jinja templates of configurations and of models, in Jinja's sandbox.

The sandbox limits what a template can reach, and how long its ranges are, but not how long it runs
or how much it makes: a template of somebody else's is to be read like a configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from jinja2 import StrictUndefined, Template, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trigon.errors import ConfigError


class TemplateFailure(Exception):
    """A template raised an error; the message is its first line. line: of the template."""

    def __init__(self, message: str, *, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


def render(source: str, values: Mapping[str, Any]) -> str:
    """Return what a template writes; an unknown variable is an error. Raises: TemplateFailure."""
    with _failures():
        return _compile(source).render(values)


def variables_of(source: str) -> set[str]:
    """Return the variables that a template uses and does not set. Raises: TemplateFailure."""
    with _failures():
        return meta.find_undeclared_variables(_environment().parse(source))


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    generation_prompt: bool = False,
) -> str:
    """Return messages as the chat template of a Hugging Face tokenizer writes them.

    Raises: TemplateFailure.
    """
    with _failures():
        text: str = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=generation_prompt, tokenize=False
        )
        return text


def check_chat_template(tokenizer: Any) -> None:
    """Raise ConfigError if a Hugging Face tokenizer's chat template cannot be compiled.

    Other errors of the template depend on the messages, and are those of rows.
    """
    try:
        render_chat(tokenizer, [{"role": "user", "content": "question"}])
    except TemplateFailure as error:
        if error.line is not None:
            raise ConfigError(
                f"the chat template (data.override_chat_template replaces it) cannot be used: {error} in line "
                f"{error.line}"
            ) from error


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(undefined=StrictUndefined)


@lru_cache(maxsize=16)
def _compile(source: str) -> Template:
    return _environment().from_string(source)


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TemplateFailure(message, line=getattr(error, "lineno", None)) from error
