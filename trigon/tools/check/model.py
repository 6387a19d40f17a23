"""Checks of the model's files without its weights, of templates, and of environments and tools.

The code of an environment or of tools runs in the processes of a run, with its time limits and its
confinement. An episode is begun; no step is taken, since only a model can show what follows it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trigon.assemble.critic import require_same_tokens
from trigon.assemble.data import open_builder, read_processors
from trigon.assemble.episodes import EpisodeParts, check_chat_template, check_episodes, load_episodes
from trigon.assemble.memory import size_of_model
from trigon.assemble.models import check_policy
from trigon.assemble.options import max_completion_tokens
from trigon.config.options import with_options
from trigon.config.paths import local_path
from trigon.config.schema import MAX_TOKENS, Config
from trigon.data.prompts import PromptBuilder
from trigon.data.templates import TemplateFailure, render_chat
from trigon.environments.pool import EnvironmentPool
from trigon.errors import ConfigError, ModelError, TrigonError
from trigon.models.linear_attention import has_fast_kernels
from trigon.models.load import Processors, folder_without_weights, load_processors, require_weights
from trigon.models.sizes import ModelSize
from trigon.tools.check.dataset import Reader, ScannedDataset, build, first_dataset, show_tokens
from trigon.tools.check.result import Missing, Result, Skipped
from trigon.tools.quickstart.model import make_tiny

Episodes = tuple[EpisodeParts, EnvironmentPool]

_ANSWER = "An answer of the assistant."
_ONE_TURN = "none: completions have one turn"


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A model without its weights.

    config: the configuration of the run with the local folder of the model. size: None if the
    model is not supported.
    """

    config: Config
    processors: Processors
    size: ModelSize | None

    def require_size(self) -> ModelSize:
        """Return the number of weights. Raises: Skipped if it is not known."""
        if self.size is None:
            raise Skipped("see the check 'model'")
        return self.size


def check_model(result: Result, config: Config, *, on_gpus: bool = False) -> Model | Missing:
    """Read config, tokenizer and processors. A model of a hub is downloaded without its weights.

    on_gpus: the machine has GPUs, for which some models need further packages.
    """
    model = config.worker.actor.model
    if not model.model_path:
        raise Skipped("no model is set")
    paths = {
        "worker.actor.model.model_path": model.model_path,
        "worker.actor.model.tokenizer_path": model.tokenizer_path,
        "worker.critic.model.model_path": config.critic_model_path,
    }
    local = with_options(config, {key: str(folder_without_weights(path)) for key, path in paths.items() if path})
    try:
        processors = read_processors(local)
    except ModelError as error:
        result.fail("template.chat" if "chat template" in str(error) else "model.unusable", str(error))
        return Missing("see the check 'model'")
    for path in filter(None, (model.model_path, config.critic_model_path)):
        if local_path(path) is not None:
            try:
                require_weights(path)
            except ModelError as error:
                result.fail("model.unusable", str(error))
    if processors.family.linear_attention and on_gpus and not has_fast_kernels():
        result.warn(
            "model.kernels",
            f"{processors.family.model_type} has layers of linear attention, and flash-linear-attention, whose kernels "
            "compute them on a GPU, is not installed: the functions of torch that replace it are many times slower",
            "run pip install flash-linear-attention",
        )
    try:
        require_same_tokens(local, processors)
        check_policy(local, processors.hf_config)
        size = size_of_model(local)
    except (ModelError, ConfigError) as error:
        result.fail("model.unusable", str(error))
        return Model(local, processors, None)
    limit = getattr(processors.hf_config.get_text_config(), "max_position_embeddings", None)
    longest = config.context_length
    if limit is not None and longest > limit:
        result.fail(
            "model.context",
            f"prompt and completion have up to {longest:,} tokens together, and the model's context has {limit:,} "
            "(max_position_embeddings)",
            "lower data.max_prompt_length, data.max_response_length or worker.rollout.max_model_len",
        )
    weights = size.all.frozen + size.all.trained
    number = f"{weights:,}" if weights < 10_000_000 else f"{weights / 1e9:.2f} billion"
    result.summary = f"{size.model_type}, {number} weights, {len(processors.tokenizer):,} tokens; no weights were read"
    return Model(local, processors, size)


def check_code(result: Result, model: Model, stack: ExitStack) -> Episodes | None:
    """Load the environment or the tools. stack: ends their processes."""
    episodes = load_episodes(model.config, model.processors, stack)
    if episodes is None:
        result.summary = _ONE_TURN
        return None
    parts, pool = episodes
    pool.ready()
    rollout = model.config.worker.rollout
    turns = f"at most {rollout.max_turns} turns, in messages of the role {rollout.role_of_observations}"
    tools = f"{', '.join(rollout.tools)}, called in the format {parts.code.tool_format}"
    result.summary = f"{tools if parts.code.environment is None else rollout.environment}; {turns}"
    return episodes


def check_templates(result: Result, model: Model, tools: Episodes | None) -> Reader | Missing:
    """Try the chat template and the format prompt, also on conversations if there are episodes.

    tools: whose descriptions are a part of the prompts.
    """
    config, processors = model.config, model.processors
    schemas = () if tools is None else tools[0].schemas
    builder = None
    try:
        builder = _open_builder(config, processors, schemas)
        check_chat_template(config, processors, schemas=schemas)
    except TrigonError as error:
        result.fail("template.format_prompt" if "data.format_prompt" in str(error) else "template.chat", str(error))
        return Missing("see the check 'template'") if builder is None else Reader(processors, builder)
    if (header := find_missing_header(processors.tokenizer)) is not None:
        result.fail(
            "template.generation_prompt",
            "the chat template does not begin the assistant's message where add_generation_prompt is true: "
            f"{header!r} stands between a question and its answer, and the model would have to write it",
            "end the template with {% if add_generation_prompt %}...{% endif %} (data.override_chat_template)",
        )
    chat = "its own" if config.data.override_chat_template is None else "data.override_chat_template"
    question = " ".join((config.data.format_prompt or "none").split())
    result.summary = f"chat template: {chat}; format prompt: {question[:57]}{'...' if len(question) > 57 else ''}"
    return Reader(processors, builder)


def open_stand_in(config: Config) -> Reader | Missing:
    """Return what reads the rows if the model cannot be read, because a hub is out of reach say.

    Rows, images and rewards can still be checked, with a tiny model's tokenizer; no length can.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="trigon-") as folder:
            processors = load_processors(str(make_tiny(Path(folder))))
        unlimited = with_options(config, {"data.max_prompt_length": MAX_TOKENS})
        return Reader(processors, _open_builder(unlimited, processors, ()))
    except TrigonError as error:
        return Missing(str(error))


def _open_builder(config: Config, processors: Processors, schemas: Sequence[Mapping[str, Any]]) -> PromptBuilder:
    return open_builder(config, processors, process_images=False, schemas=schemas)


def find_missing_header(tokenizer: Any) -> str | None:
    """Return what a chat template writes before an answer, but not at the end of a prompt, if so.

    Templates without a header of the assistant need no generation prompt: None.
    """
    question = [{"role": "user", "content": "A question."}]
    answered = [*question, {"role": "assistant", "content": _ANSWER}]

    try:
        plain, prompt = render_chat(tokenizer, question), render_chat(tokenizer, question, generation_prompt=True)
        conversation = render_chat(tokenizer, answered)
    except TemplateFailure:  # it needs other messages; errors with those of a row are that row's
        return None
    if prompt != plain or _ANSWER not in conversation or not conversation.startswith(prompt.rstrip()):
        return None
    return conversation[len(prompt.rstrip()) :].partition(_ANSWER)[0].strip() or None


def check_prompt(result: Result, model: Model, datasets: Sequence[ScannedDataset]) -> None:
    """Show the first training prompt exactly as the model sees it, with its special tokens."""
    dataset = first_dataset(datasets)
    facts, scanned = dataset.usable[0], dataset.scanned
    prompt = scanned.builder.inspect(scanned.source.rows[facts.index], facts.name)
    sizes = ", ".join(f"{width} x {height} pixels" for width, height in facts.image_sizes)
    images = f", {facts.media_tokens} of them for {sizes}" if facts.image_sizes else ""
    result.summary = f"{facts.name} has {facts.num_tokens} tokens{images}"
    result.text = show_tokens(model.processors, prompt.token_ids)


def check_episode(result: Result, model: Model, episodes: Episodes | None, datasets: Sequence[ScannedDataset]) -> None:
    """Begin an episode of the first row, and show what follows the prompt as the model sees it."""
    if episodes is None:
        result.summary = _ONE_TURN
        return
    dataset = first_dataset(datasets)
    facts = dataset.usable[0]
    limit = max_completion_tokens(model.config)
    prompts = [build(dataset, facts)]
    tokens = check_episodes(model.config, model.processors, *episodes, prompts, max_tokens=limit)
    if tokens is None:
        result.summary = "tools: the first turn follows the prompt"
        return
    images = f" with {len(tokens.media.encoded)} images" if tokens.media is not None else ""
    result.summary = (
        f"the first observation for {facts.name} has {len(tokens.token_ids)} tokens{images}, of a completion's at most "
        f"{limit}"
    )
    result.text = show_tokens(model.processors, tokens.token_ids)
