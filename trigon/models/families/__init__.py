"""The supported model families, by the `model_type` of a Hugging Face config.

Each other module of this folder that has FAMILIES is found here, so that a family is added by one
file. A model of any other type is an error: a vision model treated as a text model would train
without its images. docs/model-families.md explains how to add a family.
"""

from __future__ import annotations

import pkgutil
import re
from functools import cache
from importlib import import_module
from typing import Any

from trigon.errors import ModelError
from trigon.models.families.family import CountedNetwork, ModelFamily
from trigon.system.terminal import nearest

__all__ = ["CountedNetwork", "ModelFamily", "family_named", "family_of", "supported_model_types"]


def family_of(hf_config: Any) -> ModelFamily:
    """Return the family of a Hugging Face config. Raises: ModelError if it is not supported."""
    return family_named(str(getattr(hf_config, "model_type", "")))


def family_named(model_type: str, *, with_vision: bool = False) -> ModelFamily:
    """Return the family with this `model_type`.

    with_vision: whether the model is known to have a vision tower, so that no text family is
    suggested instead. Raises: ModelError if it is not supported.
    """
    families = _families()
    if model_type not in families:
        near = _nearest_type(model_type, with_vision)
        hint = f" The nearest supported type is {near!r}." if near else ""
        raise ModelError(
            f"Models of type {model_type!r} are not supported.{hint} Supported types: "
            f"{', '.join(supported_model_types())}. docs/model-families.md says why others are not, and how to add one."
        )
    return families[model_type]


def supported_model_types() -> tuple[str, ...]:
    """Return every supported `model_type`, sorted."""
    return tuple(sorted(_families()))


def _nearest_type(model_type: str, with_vision: bool) -> str | None:
    """Return the supported type with the most similar name, if possible of the same series."""
    types = [family.model_type for family in _families().values() if family.has_vision or not with_vision]
    letters = re.match("[a-z]*", model_type.lower())
    series = letters[0] if letters is not None else ""
    return nearest(model_type, [name for name in types if series and name.startswith(series)], cutoff=0) or nearest(
        model_type, types, cutoff=0.7
    )


@cache
def _families() -> dict[str, ModelFamily]:
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return {family.model_type: family for module in modules for family in getattr(module, "FAMILIES", ())}
