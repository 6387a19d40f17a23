"""Exports the critic of a checkpoint as a token classifier of transformers, with one label.

The classifier's output at a token is the value of the state after it. A critic on the policy's
trunk is exported with the weights of the policy.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from trigon.checkpoint.export import (
    check_replaceable,
    find_checkpoint,
    publish_export,
    set_config_dtype,
    write_export_record,
    write_weights,
)
from trigon.checkpoint.weights import Weights, has_adapter, open_weights
from trigon.errors import CheckpointError
from trigon.models.dtypes import dtype_named
from trigon.models.load import ATTENTION, copy_side_files, family_of_folder, without_progress_bars
from trigon.models.value import HEAD_NAME
from trigon.system.json_files import write_json
from trigon.system.torchvision_stub import declare_operators
from trigon.training.checkpointing import WEIGHTS_FOLDER, is_head_alone, read_object
from trigon.training.state import ShardedFiles, StoredTensor

_HEAD, _CLASSIFIER = "lm_head.", "score."


def export_critic(
    path: Path,
    output: Path | None,
    *,
    dtype: str | None,
    best: bool = False,
    warn: Callable[[str], None] = warnings.warn,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write the critic of a checkpoint as a folder for AutoModelForTokenClassification.

    Args: see export_checkpoint. output: None: huggingface_critic in path, or beside path if it
        is an actor folder.
    Raises: CheckpointError if there is no critic, if it has LoRA adapters, or if transformers has
    no token classifier of its family.
    """
    on_progress(f"verifying {path}")
    checkpoint = find_checkpoint(path, best=best, warn=warn)
    folder = checkpoint.critic
    if folder is None:
        raise CheckpointError(f"{checkpoint.folder} has no critic: it is not of a run with algorithm.adv_estimator=gae")
    head_alone = is_head_alone(folder)
    trunk = checkpoint.actor if head_alone else folder
    if has_adapter(trunk):
        section = "worker.actor" if head_alone else "worker.critic"
        raise CheckpointError(
            f"the critic in {folder} has LoRA adapters, which are not merged; only a critic whose weights are trained "
            f"({section}.model.lora.rank=0) can be exported"
        )
    architecture = _classifier_of(folder / "huggingface")
    if output is None:
        is_actor_folder = path.resolve() == checkpoint.actor.resolve()
        output = (checkpoint.folder if is_actor_folder else path) / "huggingface_critic"
    check_replaceable(output)
    weights = _ClassifierWeights(open_weights(trunk), ShardedFiles(folder / WEIGHTS_FOLDER) if head_alone else None)
    temporary = output.absolute().with_name(f".exporting_{output.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        copy_side_files(folder / "huggingface", temporary)
        on_progress(f"writing {len(weights.tensors)} tensors of step {checkpoint.step}")
        written = write_weights(weights, temporary, dtype=dtype_named(dtype) if dtype else None)
        config = read_object(temporary / "config.json")
        config |= {"architectures": [architecture], "id2label": {"0": "value"}, "label2id": {"value": 0}}
        write_json(temporary / "config.json", config, ensure_ascii=False)
        set_config_dtype(temporary / "config.json", written)
        write_export_record(temporary, checkpoint, written)
        on_progress("loading the token classifier")
        _require_complete(temporary)
        publish_export(temporary, output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return output


class _ClassifierWeights:
    """The weights of a critic by the names of a token classifier. Satisfies Weights."""

    def __init__(self, stored: Weights, head: Weights | None) -> None:
        """Rename the weights. head: that of a shared trunk, which replaces the policy's head."""
        own = {name: (stored, name) for name in stored.tensors if not name.startswith(_HEAD)}
        source, prefix = (stored, _HEAD) if head is None else (head, f"{HEAD_NAME}.")
        heads = {
            _CLASSIFIER + name.removeprefix(prefix): (source, name)
            for name in source.tensors
            if name.startswith(prefix)
        }
        self._sources = own | heads

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """See Weights."""
        return {name: weights.tensors[stored] for name, (weights, stored) in self._sources.items()}

    def read(self, name: str) -> Tensor:
        """See Weights."""
        weights, stored = self._sources[name]
        return weights.read(stored)


def _classifier_of(folder: Path) -> str:
    """Return the class of transformers. Raises: CheckpointError if there is none."""
    declare_operators()
    from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

    model_type = family_of_folder(folder).model_type
    if model_type not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES:
        raise CheckpointError(
            f"transformers has no token classifier for {model_type} models, so that this critic cannot be exported; "
            f"its weights are in {folder.parent / 'weights'}, with a head of one output"
        )
    return str(MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES[model_type])


def _require_complete(folder: Path) -> None:
    """Raise CheckpointError unless transformers loads all weights of the folder."""
    from transformers import AutoModelForTokenClassification

    with without_progress_bars():
        _, report = AutoModelForTokenClassification.from_pretrained(
            folder, attn_implementation=ATTENTION, output_loading_info=True
        )
    problems = [*report["missing_keys"], *report["unexpected_keys"]]
    if problems:
        raise CheckpointError(
            f"transformers does not load the exported critic: {', '.join(sorted(map(str, problems))[:3])}"
        )
