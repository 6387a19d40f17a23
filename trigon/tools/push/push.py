"""Exports a checkpoint of a run with a model card, and pushes it to the Hugging Face Hub.

The card is README.md: what the run's folder says of it. Its text is card.md.jinja, which
huggingface_hub.ModelCard fills in; its metadata are those that the hub reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import yaml
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData, constants, get_token, try_to_load_from_cache

# HTTPError comes from its HTTP client, which differs from version to version.
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled  # type: ignore[attr-defined]

from trigon import __version__
from trigon.checkpoint.store import EXPORT_RECORD, exported_step, find_checkpoints
from trigon.config.options import format_value, options
from trigon.errors import CheckpointError, ConfigError, DataError, PushError
from trigon.report.rollouts import read_rollouts
from trigon.report.run import SOURCES, RunRecord, merge_steps
from trigon.system.files import write_json
from trigon.system.secrets import hide, short_path
from trigon.tools.plot.curves import learning_curves
from trigon.tools.plot.figure import save_plot

CURVES = "curves.png"
"""Name of the figure in the folder."""

TEMPLATE = Path(__file__).with_name("card.md.jinja")

HubKind = Literal["models", "datasets"]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_CACHED = re.compile(r"(?:^|/)(models|datasets)--([\w.-]+?)--([\w.-]+)(?:/|$)")
_FILES = (".parquet", ".json", ".jsonl", ".csv", ".arrow")
_VALIDATION = re.compile(r"val/(?:(?P<dataset>[^/]+)/)?(?:(?P<part>.+)_reward|reward_score)")

# The options of the first table: (label, option).
_MAIN: Sequence[tuple[str, str]] = (
    ("algorithm", "algorithm.adv_estimator"),
    ("prompts per step", "data.rollout_batch_size"),
    ("completions per prompt", "worker.rollout.n"),
    ("prompts per update", "worker.actor.global_batch_size"),
    ("learning rate", "worker.actor.optim.lr"),
    ("sampling temperature", "worker.rollout.temperature"),
    ("maximum length of prompts (tokens)", "data.max_prompt_length"),
    ("maximum length of completions (tokens)", "data.max_response_length"),
    ("seed", "data.seed"),
)

# Where a run is on its machine.
_NOT_SHOWN = frozenset({"trainer.save_checkpoint_path", "trainer.load_checkpoint_path"})

README = "README.md"
_LORA_RANK = "worker.actor.model.lora.rank"
_REASONS = {
    401: "the token is not valid; run `hf auth login`, or set HF_TOKEN",
    403: "the token has no permission to write there",
    404: "there is no such repository, or the token may not see it",
    413: "the files are too large",
}
"""What a status of the hub means."""

_LOCAL_BASE = (
    "the base model of the adapter is a local folder, which others do not have: push the whole model with --merged, or "
    "name the base model on the hub with --base"
)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of a run, as its folder has them.

    values: the values of all options, by name. changed: the options that differ from the defaults.
    local: what RunRecord.local_sources returns.
    """

    run: RunRecord
    values: Mapping[str, Any]
    changed: Mapping[str, Any]
    local: Mapping[str, str] | None

    def hub_id(self, text: str, kind: HubKind) -> str | None:
        """Return the hub id that a text of the configuration refers to, or None if it was local.

        None also for a run that has not recorded what was local, unless it names the hub's cache.
        """
        return hub_id(text, kind, [text] if self.local is None else self.local)

    def datasets(self, option: str) -> list[tuple[str | None, str]]:
        """Return the hub id, or None, of each dataset of an option, and what to call it."""
        local = self.local or {}
        texts = [file if file in local else file.rpartition("@")[0] or file for file in self.values[option]]
        ids = [self.hub_id(text, "datasets") for text in texts]
        return [(each, each or Path(text).name) for each, text in zip(ids, texts, strict=True)]


def read_options(run: RunRecord) -> RunOptions:
    """Return the options of a run. Raises: DataError if it has no config.yaml."""
    given = run.options()
    if not given:
        raise DataError(f"{run.path} has no config.yaml, from which the model card is made")
    defaults = {option.name: option.default for option in options().values()}
    values = {name: given.get(name, default) for name, default in defaults.items()}
    changed = {name: value for name, value in values.items() if _plain(value) != _plain(defaults[name])}
    return RunOptions(run, values, changed, run.local_sources())


def _plain(value: Any) -> Any:
    """Return a value of an option as config.yaml has it: a list for a tuple."""
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True)
class Validation:
    """A metric of the validations before training and after the pushed step.

    dataset: its name if there are several, else "". before: None if the run was not validated
    before its first step. num_prompts: prompts that were validated; None if the rollouts are not
    there.
    """

    dataset: str
    metric: str
    before: float | None
    after: float
    step: int
    num_prompts: int | None


def model_card(
    run: RunOptions,
    exported: Path,
    repo_id: str,
    *,
    base_model: str | None,
    license_id: str | None,
    has_vision: bool,
    is_adapter: bool,
    has_curves: bool,
) -> ModelCard:
    """Return README.md.

    Args:
        exported: folder to which a checkpoint of the run was exported.
        repo_id: where it will be pushed, NAMESPACE/NAME.
        base_model: hub id; None: a local folder.
        license_id: as the hub names licences, such as apache-2.0; None: the card has none.
        has_curves: whether the folder has CURVES.
    """
    record = json.loads((exported / EXPORT_RECORD).read_text(encoding="utf-8"))
    step, name, values = int(record["step"]), repo_id.rpartition("/")[2], run.values
    sources = run.datasets("data.train_files")
    datasets = list(dict.fromkeys(each for each, _ in sources if each is not None))
    dataset_names = list(dict.fromkeys(name for _, name in sources))
    base_name = base_model or "/".join(Path(_model_path(run)).parts[-2:])
    reward = _describe_reward(values["worker.reward.reward_function"])
    validations = read_validations(run.run, step)
    rank, kl = int(values[_LORA_RANK]), "none"
    if not values["algorithm.disable_kl"]:
        place = "loss" if values["algorithm.use_kl_loss"] else "reward"
        kl = f"in the {place}, coefficient {format_value(values['algorithm.kl_coef'])}"
    training = [
        ("base model", base_name),
        ("training data", ", ".join(dataset_names)),
        ("reward function", f"`{reward}`"),
        ("steps", f"{step:,}"),
        *((label, format_value(values[option])) for label, option in _MAIN),
        ("KL term", kl),
        ("trained weights", f"LoRA of rank {rank}" if rank else "all that are not frozen"),
        ("published weights", f"{'adapter' if is_adapter else 'model'} in {record['dtype']}"),
    ]
    task = "image-text-to-text" if has_vision else "text-generation"
    results = _results(validations, [name for _, name in run.datasets("data.val_files")], task)
    estimator = str(values["algorithm.adv_estimator"])
    data = ModelCardData(
        base_model=base_model,
        datasets=datasets or None,
        license=license_id,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag=task,
        tags=["trigon", "reinforcement-learning", estimator.replace("_", "-"), *(["lora"] if rank else [])],
        model_name=name if results else None,
        eval_results=results or None,
    )
    changed = {name: hide(name, value) for name, value in run.changed.items() if name not in _NOT_SHOWN}
    card: ModelCard = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=name,
        repo_id=repo_id,
        step=step,
        base_model=base_model,
        base_name=base_name,
        is_adapter=is_adapter,
        datasets=datasets,
        dataset_names=dataset_names,
        estimator=estimator,
        reward=reward,
        validations=validations,
        training=training,
        curves=CURVES if has_curves else None,
        model_class="AutoModelForImageTextToText" if has_vision else "AutoModelForCausalLM",
        processor_class="AutoProcessor" if has_vision else "AutoTokenizer",
        options=yaml.safe_dump(_nested(changed), sort_keys=False, allow_unicode=True, width=100),
        trigon_version=record.get("trigon_version", __version__),
    )
    return card


def _results(validations: Sequence[Validation], val_names: Sequence[str], task: str) -> list[EvalResult]:
    """Return the accuracies of validations as the hub reads them.

    val_names: hub ids; of local files their names.
    """
    return [
        EvalResult(
            task_type=task,
            dataset_type=_dataset_type(validation.dataset or val_names[0]),
            dataset_name=validation.dataset or ", ".join(val_names),
            metric_type="accuracy",
            metric_name=f"accuracy after step {validation.step}",
            metric_value=round(validation.after, 6),
        )
        for validation in validations
        if validation.metric == "accuracy" and val_names
    ]


def _dataset_type(source: str) -> str:
    """Return an identifier of a dataset; of a local file lower-case letters and hyphens."""
    return source if _HUB_ID.fullmatch(source) else re.sub(r"[^a-z0-9]+", "-", source.lower())


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by dotted names as sections."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *path, key = name.split(".")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[key] = value
    return tree


def hub_id(text: str, kind: HubKind, local: Collection[str] | None = None) -> str | None:
    """Return the hub id that a path or hub id refers to, or None for a local folder or file.

    A folder of the hub's cache has the id in its name. local: the texts of a run's configuration
    that were local where it was started, since models/mine may be the id of another model; None:
    what exists in this folder is local.
    """
    cached = _CACHED.search(text)
    if cached is not None and cached[1] == kind:
        return f"{cached[2]}/{cached[3]}"
    is_id = _HUB_ID.fullmatch(text) and not text.startswith(".") and Path(text).suffix.lower() not in _FILES
    is_local = Path(text).exists() if local is None else text in local
    return text if is_id and not is_local else None


def read_validations(run: RunRecord, step: int) -> list[Validation]:
    """Return the metrics of the last validation up to a step, with those before training."""
    steps = [line for line in merge_steps(run.metrics()) if line.step <= step]
    lines = [line for line in steps if any(map(_VALIDATION.fullmatch, line.metrics))]
    if not lines:
        return []
    last = lines[-1]
    first = lines[0].metrics if lines[0].step == 0 else {}
    numbers = count_prompts(run, last.step)
    found: list[Validation] = []
    for key, value in last.metrics.items():
        match = _VALIDATION.fullmatch(key)
        if match is None or match["part"] == "overall":  # the same as reward_score
            continue
        dataset = match["dataset"] or ""
        num_prompts = numbers.get(dataset) if dataset else sum(numbers.values()) or None
        found.append(Validation(dataset, match["part"] or "reward", first.get(key), value, last.step, num_prompts))
    order = {"accuracy": 0, "reward": 1}
    return sorted(found, key=lambda each: (each.dataset, order.get(each.metric, 2), each.metric))


def count_prompts(run: RunRecord, step: int) -> dict[str, int]:
    """Return the number of prompts of a validation by dataset, as prompt ids name it."""
    files = [file for file in run.rollout_files() if file.split == "validation" and file.step == step]
    ids = {row.prompt_id for file in files for row in read_rollouts(file.path)}
    counts: dict[str, int] = {}
    for prompt_id in ids:
        dataset = re.sub(r"[^\w.-]", "-", prompt_id.rpartition(":")[0])
        counts[dataset] = counts.get(dataset, 0) + 1
    return counts


def _describe_reward(value: Any) -> str:
    """Return the reward functions of a configuration without folders, with weights if several."""
    if not isinstance(value, list | tuple):
        return short_path(str(value))
    entries = [{"function": each} if isinstance(each, str) else each for each in value]
    return " + ".join(f"{each.get('weight', 1):g} * {short_path(str(each['function']))}" for each in entries)


@dataclass(frozen=True, slots=True)
class PushSettings:
    """What is published of a run.

    step: the step of the checkpoint; None: the latest, or with best the one with the best
    validation. merged: publish the model of a LoRA run with the adapter merged into it instead of
    the adapter.
    base: see export_checkpoint. license_id: the hub's name of the licence; None: the licence of
    the base model, where a copy of its card is on this machine. dtype: see export_checkpoint.
    logits: whether to verify the logits of the export.
    """

    step: int | None = None
    best: bool = False
    merged: bool = False
    base: str | None = None
    license_id: str | None = None
    dtype: str | None = None
    logits: bool = True


def push(
    run: RunRecord,
    repo_id: str,
    folder: Path,
    settings: PushSettings,
    *,
    private: bool,
    warn: Callable[[str], None],
    on_progress: Callable[[str], None],
) -> str:
    """Write the model and its card to a folder, push them, and return the address of the commit.

    The token comes from `hf auth login` or HF_TOKEN, the address of the hub from HF_ENDPOINT. The
    owner of the token is asked for before anything is exported. The repository is made if there is
    none; private applies to a new one.
    Raises: PushError if there is no token, no permission or no connection, or if private is set and
    the repository is public; what write_folder raises.
    """
    api = HfApi()
    full_name = _check_access(api, repo_id, private=private)
    options = read_options(run)
    if _is_adapter(options, settings) and public_base(options, settings) is None:
        raise PushError(_LOCAL_BASE)
    write_folder(run, full_name, folder, settings, warn=warn, on_progress=on_progress)
    on_progress(f"pushing to {api.endpoint}/{full_name}")
    with _hub_errors(full_name):
        created = api.create_repo(full_name, private=private or None, exist_ok=True)
        step = exported_step(folder)
        commit = api.upload_folder(
            repo_id=created.repo_id, folder_path=folder, commit_message=f"Step {step} of {run.path.resolve().name}"
        )
    return str(commit.commit_url)


def write_folder(
    run: RunRecord,
    repo_id: str,
    folder: Path,
    settings: PushSettings,
    *,
    warn: Callable[[str], None],
    on_progress: Callable[[str], None],
) -> Path:
    """Write what would be pushed: the verified export, README.md, and curves.png.

    The figure is there if matplotlib is installed and the run has metrics.
    Raises: CheckpointError if there is no such checkpoint, or if folder exists and was not written
    by this; DataError if the run has no configuration; ConfigError if merged is set for a run
    without LoRA.
    """
    # Imported here: they load torch, which a refused token does not need.
    from trigon.checkpoint.export import export_checkpoint
    from trigon.training.checkpointing import ADAPTER_CONFIG

    options = read_options(run)
    if settings.merged and not options.values[_LORA_RANK]:
        raise ConfigError(f"{run.path} was trained without LoRA: leave --merged out")
    is_adapter, base = _is_adapter(options, settings), public_base(options, settings)
    if options.local is None:
        warn(
            f"the run has no {SOURCES}, which says what was on the hub and what was local: the metadata of the card "
            "leave out its model and data; --base names the base model"
        )
    path = _checkpoint_folder(run, settings.step)
    export_checkpoint(
        path,
        folder,
        dtype=settings.dtype,
        part="adapter" if is_adapter else "model",
        base=settings.base,
        best=settings.best,
        logits=settings.logits,
        warn=warn,
        on_progress=on_progress,
    )
    step = exported_step(folder)
    side_files = run.path / f"global_step_{step}" / "actor" / "huggingface" / "config.json"
    has_vision = "vision_config" in json.loads(side_files.read_text(encoding="utf-8"))
    if is_adapter and base is not None:
        _name_base(folder / ADAPTER_CONFIG, base)
    elif is_adapter:
        warn(f"this folder cannot be pushed: {_LOCAL_BASE}")
    license_id = settings.license_id or base_license(options, settings)
    if license_id is None:
        warn("the licence of the base model is not known here, so the card has none: --license sets it")
    has_curves = _draw_curves(run, folder / CURVES, warn)
    card = model_card(
        options,
        folder,
        repo_id,
        base_model=base,
        license_id=license_id,
        has_vision=has_vision,
        is_adapter=is_adapter,
        has_curves=has_curves,
    )
    card.save(folder / README)  # in place of the card of the base model, if the export has copied one
    return folder


def public_base(options: RunOptions, settings: PushSettings) -> str | None:
    """Return the hub id of the base model, or None if it is a local folder."""
    if settings.base is not None:
        return hub_id(settings.base, "models")
    return options.hub_id(_model_path(options), "models")


def _name_base(path: Path, base: str) -> None:
    """Write the hub id of the base model to an adapter's config, which may have a local path."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["base_model_name_or_path"] != base:
        write_json(path, {**content, "base_model_name_or_path": base})


def base_license(options: RunOptions, settings: PushSettings) -> str | None:
    """Return the licence in the card of the base model: in its folder, or in the hub's cache."""
    name = public_base(options, settings)
    path = settings.base or (options.local or {}).get(_model_path(options), _model_path(options))
    # A hub id is no path, even if this folder has one of that name.
    card = None if path == name else Path(path) / README
    if name is not None and (card is None or not card.is_file()):
        cached = try_to_load_from_cache(name, README)
        card = Path(cached) if isinstance(cached, str) else None
    if card is None or not card.is_file():
        return None
    text = card.read_text(encoding="utf-8")
    found: object = getattr(ModelCard(text, ignore_metadata_errors=True).data, "license", None)
    return found if isinstance(found, str) else None


def _model_path(options: RunOptions) -> str:
    return str(options.values["worker.actor.model.model_path"] or "")


def _is_adapter(options: RunOptions, settings: PushSettings) -> bool:
    return bool(options.values[_LORA_RANK]) and not settings.merged


def _checkpoint_folder(run: RunRecord, step: int | None) -> Path:
    if step is None:
        return run.path
    folder = run.path / f"global_step_{step}"
    if not folder.is_dir():
        names = ", ".join(each.name for each in find_checkpoints(run.path))
        raise CheckpointError(f"{run.path} has no checkpoint of step {step}; it has {names or 'none'}")
    return folder


def _draw_curves(run: RunRecord, path: Path, warn: Callable[[str], None]) -> bool:
    """Draw the learning curves of a run if that is possible, and return whether it was."""
    if find_spec("matplotlib") is None:
        warn("matplotlib is not installed, so the card has no learning curves")
        return False
    try:
        curves = learning_curves([run])
    except DataError as error:
        warn(f"the card has no learning curves: {error}")
        return False
    save_plot(curves, path)
    return True


def _check_access(api: HfApi, repo_id: str, *, private: bool) -> str:
    """Return NAMESPACE/NAME of the repository, to which the token may write as far as is known.

    Raises: PushError; also if private is set, and the repository exists and is public.
    """
    if not get_token():
        raise PushError("there is no token for the Hugging Face Hub: run `hf auth login`, or set HF_TOKEN")
    with _hub_errors(repo_id):
        user = api.whoami()
    namespace, _, name = repo_id.rpartition("/")
    namespace = namespace or user["name"]
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise PushError(
            "the token of the Hugging Face Hub may only read: make one that may write at "
            f"{api.endpoint}/settings/tokens"
        )
    members = [user["name"], *(organization["name"] for organization in user.get("orgs", []))]
    if namespace not in members:
        raise PushError(f"{user['name']} cannot push to {repo_id}: the namespace must be one of {', '.join(members)}")
    full_name = f"{namespace}/{name}"
    with _hub_errors(full_name):
        is_public = private and api.repo_exists(full_name) and not api.model_info(full_name).private
    if is_public:
        raise PushError(
            f"{full_name} exists and is public, which --private does not change: make it private in its settings, or "
            "choose another name"
        )
    return full_name


@contextmanager
def _hub_errors(repo_id: str) -> Iterator[None]:
    """Turn failures of the hub's client within the context into one sentence, a PushError."""
    hub = constants.ENDPOINT
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise PushError("HF_HUB_OFFLINE is set, so nothing can be pushed: unset it") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = _REASONS.get(status, error.server_message or "")
        raise PushError(f"{hub} refused {repo_id} with status {status}: {reason}") from error
    except (HTTPError, OSError) as error:
        raise PushError(f"{hub} cannot be reached: {error}") from error
    except (RuntimeError, ValueError) as error:  # of an upload, with its reason as the cause
        raise PushError(f"{repo_id} could not be pushed to {hub}: {error.__cause__ or error}") from error
