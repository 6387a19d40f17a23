"""What to show of the rollouts of a run: filters and orders, as parsed from the page's address."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trigon.errors import DataError
from trigon.system.suggestions import did_you_mean

_Integer = Annotated[int, Field(ge=-(2**53), le=2**53)]
_Number = Annotated[float, Field(ge=-(2**53), le=2**53, allow_inf_nan=False)]
_Text = Annotated[str, Field(max_length=1000)]


class RolloutFilter(BaseModel):
    """Conditions on rollouts, all of which must hold, and the order of the groups found.

    A group is found if one of its completions matches. None is no condition; bounds are inclusive.
    min_tokens, max_tokens: tokens of the completion. solved: how many completions of the group are
    solved. filtered: why no step learns from the group; no: one does, or it is a validation.
    outcome: result of the reward function; not_ok: failed or timeout. tokens: groups with per-token
    values. prompt_id: without the number of an occurrence, train:17 for train:17#2 too.
    text: part of the prompt, its id, the ground truth or the completion, in any case.
    sort: by step (newest, oldest), by mean reward of the group (worst, best), by the difference
    between its rewards (spread), by its longest completion, or by its largest train-inference
    mismatch.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    split: Literal["train", "filtered", "validation"] | None = None
    min_step: _Integer | None = None
    max_step: _Integer | None = None
    min_reward: _Number | None = None
    max_reward: _Number | None = None
    min_tokens: _Integer | None = None
    max_tokens: _Integer | None = None
    solved: Literal["none", "some", "all"] | None = None
    filtered: Literal["no", "low", "high", "unscored", "surplus"] | None = None
    outcome: Literal["ok", "not_ok", "failed", "timeout"] | None = None
    finish_reason: Literal["stop", "length"] | None = None
    tokens: Literal["recorded"] | None = None
    prompt_id: _Text | None = None
    text: _Text | None = None
    sort: Literal["newest", "oldest", "worst", "best", "spread", "longest", "mismatch"] = "newest"


def parse_filter(values: Mapping[str, str]) -> RolloutFilter:
    """Return the filter in the parameters of an address. Empty values are no condition.

    Raises: DataError for an unknown name or a value that the name cannot have.
    """
    for name in values:
        if name not in RolloutFilter.model_fields:
            raise DataError(f"there is no filter {name!r}{did_you_mean(name, RolloutFilter.model_fields)}")
    try:
        return RolloutFilter.model_validate({name: value for name, value in values.items() if value != ""})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        raise DataError(f"the filter {name} cannot be {values[name][:100]!r}: {first['msg']}") from error
