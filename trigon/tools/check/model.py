"""The checks of the model's files without its weights, and of the templates around a question."""

from __future__ import annotations

from typing import Any

from trigon.config.paths import local_path
from trigon.errors import ConfigError, ModelError, TrigonError
from trigon.tools.check.result import Findings, Problem
from trigon.tools.check.subject import Subject

_ANSWER = "An answer of the assistant."


def check_model(subject: Subject) -> Findings:
    """Return whether config, tokenizer and processors can be read, and the model is supported."""
    from trigon.assemble.critic import require_same_tokens
    from trigon.models.linear_attention import has_fast_kernels
    from trigon.models.load import require_weights

    config, problems = subject.given, []
    critic = config.worker.critic.model.model_path if config.has_critic else None
    try:
        processors = subject.processors.get()
        if critic is not None:
            require_same_tokens(subject.config.get(), processors)
        size = subject.size.get()
    except (ModelError, ConfigError) as error:
        kind = "template.chat" if "chat template" in str(error) else "model.unusable"
        return Findings("", (Problem(kind, True, str(error)),))
    for path in (config.worker.actor.model.model_path, critic):
        if path and local_path(path) is not None:
            try:
                require_weights(path)
            except ModelError as error:
                problems.append(Problem("model.unusable", True, str(error)))
    if processors.family.linear_attention and subject.machine.gpus and not has_fast_kernels():
        message = (
            f"{processors.family.model_type} has layers of linear attention, and flash-linear-attention, whose kernels "
            "compute them on a GPU, is not installed: the functions of torch that replace it are many times slower"
        )
        problems.append(Problem("model.kernels", False, message, "run pip install flash-linear-attention"))
    limit = getattr(processors.hf_config.get_text_config(), "max_position_embeddings", None)
    longest = config.context_length
    if limit is not None and longest > limit:
        message = (
            f"prompt and completion have up to {longest:,} tokens together, and the model's context has {limit:,} "
            "(max_position_embeddings)"
        )
        advice = "lower data.max_prompt_length, data.max_response_length or worker.rollout.max_model_len"
        problems.append(Problem("model.context", True, message, advice))
    weights = size.all.frozen + size.all.trained
    summary = f"{size.model_type}, {weights / 1e9:.2f} billion weights, {len(processors.tokenizer):,} tokens"
    if weights < 10_000_000:
        summary = f"{size.model_type}, {weights:,} weights, {len(processors.tokenizer):,} tokens"
    return Findings(f"{summary}; no weights were read", tuple(problems))


def check_templates(subject: Subject) -> Findings:
    """Return whether the chat template and the format prompt can be used.

    With an environment or tools, conversations of several turns are tried too.
    """
    from trigon.assemble.episodes import check_chat_template

    processors = subject.processors.require()
    config = subject.given
    try:
        subject.builder.get()
        check_chat_template(config, processors, schemas=subject.tool_schemas)
    except TrigonError as error:
        kind = "template.format_prompt" if "data.format_prompt" in str(error) else "template.chat"
        return Findings("", (Problem(kind, True, str(error)),))
    header = find_missing_header(processors.tokenizer)
    problems = []
    if header is not None:
        message = (
            f"the chat template does not begin the assistant's message where add_generation_prompt is true: {header!r} "
            "stands between a question and its answer, and the model would have to write it"
        )
        advice = "end the template with {% if add_generation_prompt %}...{% endif %} (data.override_chat_template)"
        problems.append(Problem("template.generation_prompt", True, message, advice))
    chat = "its own" if config.data.override_chat_template is None else "data.override_chat_template"
    question = "none" if config.data.format_prompt is None else _in_one_line(config.data.format_prompt)
    return Findings(f"chat template: {chat}; format prompt: {question}", tuple(problems))


def find_missing_header(tokenizer: Any) -> str | None:
    """Return what a chat template writes before an answer, but not at the end of a prompt, if so.

    Templates without a header of the assistant need no generation prompt: None.
    """
    from trigon.data.templates import TemplateFailure, render_chat

    question = [{"role": "user", "content": "A question."}]
    answered = [*question, {"role": "assistant", "content": _ANSWER}]
    try:
        plain = render_chat(tokenizer, question)
        prompt = render_chat(tokenizer, question, generation_prompt=True)
        conversation = render_chat(tokenizer, answered)
    except TemplateFailure:  # it needs other messages; errors with those of a row are that row's
        return None
    if prompt != plain or _ANSWER not in conversation or not conversation.startswith(prompt.rstrip()):
        return None
    between: str = conversation[len(prompt.rstrip()) :].partition(_ANSWER)[0].strip()
    return between or None


def _in_one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}..."
