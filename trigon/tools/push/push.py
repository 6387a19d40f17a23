"""Exports a checkpoint of a run with a model card, and pushes it to the Hugging Face Hub."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, constants, get_token, try_to_load_from_cache

# HTTPError is that of its HTTP client, which differs from version to version.
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled  # type: ignore[attr-defined]

from trigon.checkpoint.manifest import exported_step
from trigon.errors import CheckpointError, ConfigError, DataError, PushError
from trigon.report.run import SOURCES, RunRecord
from trigon.system.json_files import write_json
from trigon.tools.plot.curves import learning_curves
from trigon.tools.plot.figure import save_plot
from trigon.tools.push.card import CURVES, RunOptions, hub_id, model_card, read_facts, read_options

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
class PushSettings:
    """What is published of a run.

    step: of the checkpoint; None: the latest, or with best the one with the best validation.
    merged: of a LoRA run, the model with the adapter merged into it instead of the adapter.
    base: see export_checkpoint. license_id: as the hub names licences; None: that of the base
    model, where a copy of its card is on this machine. dtype: see export_checkpoint.
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
    private: bool = False,
    warn: Callable[[str], None] = warnings.warn,
    on_progress: Callable[[str], None] = lambda text: None,
) -> str:
    """Write the model and its card to a folder, push them, and return the address of the commit.

    The token is that of `hf auth login` or HF_TOKEN, the hub that of HF_ENDPOINT. Who the token
    belongs to is asked before anything is exported. The repository is made if there is none;
    private applies to a new one.
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
    warn: Callable[[str], None] = warnings.warn,
    on_progress: Callable[[str], None] = lambda text: None,
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
    if settings.merged and not options.value(_LORA_RANK):
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
    facts = read_facts(options, folder, base_model=base, has_vision=has_vision, is_adapter=is_adapter)
    license_id = settings.license_id or base_license(options, settings)
    if license_id is None:
        warn("the licence of the base model is not known here, so the card has none: --license sets it")
    has_curves = _draw_curves(run, folder / CURVES, warn)
    # In place of the card of the base model, if the export has copied one.
    model_card(facts, repo_id, license_id=license_id, has_curves=has_curves).save(folder / README)
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
        write_json(path, {**content, "base_model_name_or_path": base}, ensure_ascii=False)


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
    return str(options.value("worker.actor.model.model_path") or "")


def _is_adapter(options: RunOptions, settings: PushSettings) -> bool:
    return bool(options.value(_LORA_RANK)) and not settings.merged


def _checkpoint_folder(run: RunRecord, step: int | None) -> Path:
    if step is None:
        return run.path
    folder = run.path / f"global_step_{step}"
    if not folder.is_dir():
        there = sorted(int(each.name.removeprefix("global_step_")) for each in run.path.glob("global_step_*"))
        steps = f"there are {', '.join(map(str, there))}" if there else "it has no checkpoints"
        raise CheckpointError(f"{run.path} has no checkpoint of step {step}; {steps}")
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
