"""The supported model families, by the `model_type` of a Hugging Face config.

Each other module of this folder that has FAMILIES is found here, so that a family is added by one
file. A model of any other type is an error: a vision model treated as a text model would train
without its images. docs/model-families.md explains how to add a family.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from typing import Any

from trigon.errors import ModelError
from trigon.models.families.family import ModelFamily
from trigon.system.suggestions import nearest

__all__ = ["ModelFamily", "family_named", "family_of", "supported_model_types"]


def family_of(hf_config: Any) -> ModelFamily:
    """Return the family of a Hugging Face config. Raises: ModelError if it is not supported."""
    return family_named(str(getattr(hf_config, "model_type", "")))


def family_named(model_type: str) -> ModelFamily:
    """Return the family with this `model_type`. Raises: ModelError if it is not supported."""
    families = _families()
    if model_type not in families:
        near = nearest(model_type, families, cutoff=0.7)
        hint = f" The nearest supported type is {near!r}." if near else ""
        raise ModelError(
            f"Models of type {model_type!r} are not supported.{hint} Supported types: "
            f"{', '.join(supported_model_types())}. How to add one: docs/model-families.md."
        )
    return families[model_type]


def supported_model_types() -> tuple[str, ...]:
    """Return every supported `model_type`, sorted."""
    return tuple(sorted(_families()))


@cache
def _families() -> dict[str, ModelFamily]:
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return {family.model_type: family for module in modules for family in getattr(module, "FAMILIES", ())}
