"""What a run reads from a hub of models and datasets."""

from __future__ import annotations

from trigon.config.paths import is_local_dataset, is_python_object, local_path, split_dataset
from trigon.config.schema import Config
from trigon.models.hub import hub_endpoint, uses_modelscope
from trigon.report.console import Console


def hub_names(config: Config) -> list[str]:
    """Return the models and datasets that are not in local folders, and may be downloaded."""
    model, data = config.worker.actor.model, config.data
    paths = (model.model_path, model.tokenizer_path, config.critic_model_path)
    models = [path for path in paths if path and local_path(path) is None]
    datasets = [
        split_dataset(spec)[0]
        for spec in (*data.train_files, *data.val_files)
        if not is_local_dataset(spec) and not is_python_object(spec)
    ]
    return list(dict.fromkeys((*models, *datasets)))


def announce_downloads(config: Config, console: Console) -> None:
    """Say which hub models and datasets are read from, before the first attempt to reach a hub.

    A client that cannot reach its hub tries again for half a minute, without a word.
    """
    names = hub_names(config)
    if names and not uses_modelscope():
        console.print(
            f"reading {', '.join(names)} from {hub_endpoint()}, or from the local cache; if that cannot be reached, "
            "set HF_ENDPOINT to a mirror, or HF_HUB_OFFLINE=1 to use the cache only"
        )
