"""The contracts of reward functions: arguments, return values, and the choice of a contract.

Does not depend on files, processes and time limits.

    batch        REWARD_TYPE = "batch"       f(reward_inputs: list[dict], **kwargs) -> list[dict]
    group        REWARD_TYPE = "group"       the same, for all completions of a prompt together
    sequential   REWARD_TYPE = "sequential"  f(reward_input: dict, **kwargs) -> dict
    legacy       chosen by its signature     f(response, ground_truth, **kwargs) -> dict

Each may be an `async def`, or a class, of which each reward worker makes one object with kwargs and
calls that with the first argument only. A reward_input has the fields of RewardRequest; a returned
dict is {"overall": reward, any other name: number}. A number stands for {"overall": number}.
EasyR1's name of response is predict_str.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trigon.errors import RewardError
from trigon.system.files import dump_columns, to_plain
from trigon.system.terminal import shorten
from trigon.types import EncodedMedia, FinishReason, ImageSizes, ReadMedia

RewardContract = Literal["batch", "group", "sequential", "legacy"]

Unit = Literal["completion", "batch", "group"]
"""What a function scores in a call: one completion, several, or all completions of a prompt."""

IMAGES = "images"
"""The entry of a reward_input, or the argument of a legacy function, with the prompt's images."""

IMAGE_SIZES = "image_sizes"
"""The entry, or the argument, with [width, height] of each image as the model sees it."""

BLOCKED_SECONDS = 1.0
"""How long the driver waits for an async function after its time limit, before it kills the worker.

The call is cancelled at the limit, but others may keep the event loop busy.
"""

APPLIES = "/applies"
"""After the name of a function of several: the score 1, or 0 where it returned None.

All functions of a completion have it, if one of them returned None.
"""

MAX_PARTS = 100
"""Maximum number of scores that may be returned for a completion; each becomes a metric."""

MAX_NAME_CHARACTERS = 200
"""Maximum length of the name of a score."""

MAX_REWARD = 1e6
"""Maximum size of a reward ("overall"), which float32 resolves to 0.06.

A larger one is a mistake of the reward function, such as a division by almost zero. Advantages that
are not divided by a standard deviation (dr_grpo, rloo, opo, remax) are as large as rewards, and the
sum of the squares of all gradients has to stay below 3e38.
"""

MAX_PART = 1e15
"""Maximum size of the other scores, which may be counts, bytes or times.

gdpo and the metrics sum the squares of a batch in float32: 1e30 each, and at most 3e38 together.
"""

_SEVERAL = ("list", "sequence", "iterable", "collection", "tuple")
"""Types of the argument of a batch function."""

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """One completion to be scored.

    response: the text of the completion. response_length: its number of tokens. ground_truth: as in
    the dataset.
    prompt: the text of the prompt. finish_reason: whether the completion ended by itself, was
    truncated, or reached the limit of turns.
    row: the other columns of the dataset's row, except images.
    turns: each turn as turn_input returns it, with an environment or tools; otherwise empty.
    response is then the text of all turns, without the observations.
    media: the images or videos of the prompt, or what reads them, for functions that look at them.
    turn_media: the same for the images in the observation of each turn; one for each of turns.
    image_sizes: as Prompt.image_sizes.
    """

    response: str
    response_length: int
    ground_truth: Any
    prompt: str
    finish_reason: FinishReason
    row: Mapping[str, Any]
    turns: Sequence[Mapping[str, Any]] = ()
    media: EncodedMedia | ReadMedia | None = field(default=None, repr=False, compare=False)
    turn_media: Sequence[EncodedMedia | ReadMedia | None] = field(default=(), repr=False, compare=False)
    image_sizes: ImageSizes = ()


@dataclass(frozen=True, slots=True)
class RequestFiles:
    """The paths of the files that a function may look at.

    images, videos: the files of the prompt; one of them is empty. turns: the images in the
    observation of each turn.
    """

    images: Sequence[str] = ()
    videos: Sequence[str] = ()
    turns: Sequence[Sequence[str]] = ()


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How a function that a worker has loaded is called.

    is_async: whether calls may run at the same time, in an event loop. takes_images: whether reward
    inputs have images. limits_completions: whether the limit of concurrency is for the completions
    of all calls together, rather than for the calls.
    """

    unit: Unit
    is_async: bool
    takes_images: bool
    limits_completions: bool = False

    def time_limit(self, num_completions: int, timeout_seconds: float) -> float:
        """Return the seconds that a call may take: the sum for a group, which cannot be split."""
        return timeout_seconds * num_completions if self.unit == "group" else timeout_seconds


def turn_input(observation: str, text: str, reward: float | None, image_sizes: ImageSizes = ()) -> dict[str, Any]:
    """Return a turn as a reward function gets it.

    observation: what the model saw before it, with one <image> for each image. text: what it wrote.
    reward: the environment's reward, or None. image_sizes: the sizes of the observation's images,
    as Prompt.image_sizes.
    """
    return {"observation": observation, "text": text, "reward": reward, IMAGE_SIZES: image_sizes}


def encode_request(request: RewardRequest, files: RequestFiles | None = None) -> tuple[str, tuple[str, ...]]:
    """Return the request as one line of JSON, and the columns of its row that are omitted.

    files: the files for a function that reads images: they become "images" and "videos", and
    "images" of each turn.
    Columns that JSON cannot represent are omitted. Numpy scalars and arrays become numbers and
    lists, dates ISO strings, tuples lists.
    Raises: RewardError if JSON cannot represent the ground truth.
    """
    names = [each.name for each in dataclasses.fields(request) if each.name not in ("row", "media", "turn_media")]
    reward_input = {name: getattr(request, name) for name in names}
    if files is not None:
        turns = [{**turn, IMAGES: paths} for turn, paths in zip(request.turns, files.turns, strict=True)]
        reward_input |= {IMAGES: files.images, "videos": files.videos, "turns": turns}
    columns, omitted = dump_columns(request.row)
    try:
        text = json.dumps(reward_input, default=to_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise RewardError(
            f"the ground truth {short_repr(request.ground_truth)} (a {type(request.ground_truth).__name__}) cannot be "
            "passed to the reward function; store it as text, numbers, lists or dicts in the dataset"
        ) from error
    return f'{text[:-1]}, "row": {columns}}}', omitted


def detect_contract(
    function: Callable[..., object],
    reward_type: object,
    kwargs: Mapping[str, Any],
    *,
    where: str,
    single: RewardContract = "batch",
) -> RewardContract:
    """Return the contract of a function, from REWARD_TYPE or, if that is None, its signature.

    Arguments named (response, ground_truth) or (predict_str, ground_truth) mean legacy. A first
    argument named reward_input, or annotated as a dict, means sequential; one named reward_inputs,
    or annotated as a list, means batch. Another function with a single required argument that is
    not in kwargs has the contract `single`.
    Raises: RewardError if REWARD_TYPE is unknown, or the signature fits no contract.
    """
    if reward_type == "batch" or reward_type == "group" or reward_type == "sequential":
        return reward_type
    if reward_type is not None:
        raise RewardError(f'{where}: REWARD_TYPE is {reward_type!r}; it must be "batch", "group" or "sequential"')
    try:
        signature = call_signature(function)
    except (TypeError, ValueError) as error:
        raise RewardError(f"{where} has no readable signature ({error}); wrap it in a plain function") from error
    parameters = [p for p in signature.parameters.values() if p.kind in _POSITIONAL]
    names = [parameter.name for parameter in parameters]
    if names[:2] in (["response", "ground_truth"], ["predict_str", "ground_truth"]):
        return "legacy"
    if names[:1] == ["reward_input"] or _is_annotated(parameters[:1], "dict", "mapping"):
        return "sequential"
    refuse_other_trainers(signature, where)
    if names[:1] == ["reward_inputs"] or _is_annotated(parameters[:1], *_SEVERAL):
        return "batch"
    required = [p for p in parameters if p.default is inspect.Parameter.empty and p.name not in kwargs]
    if len(required) == 1:
        return single
    raise RewardError(
        f"{where} takes ({', '.join(names)}), which fits no contract: name its two arguments (response, ground_truth), "
        "or give it one, reward_input for a completion as a dict, or reward_inputs for a list of them, for which "
        'REWARD_TYPE = "batch" says the same'
    )


def refuse_other_trainers(signature: inspect.Signature, where: str) -> None:
    """Raise RewardError for a function whose arguments are those of TRL or verl.

    One of TRL's, f(completions, **kwargs), could be called here, with dicts where it expects texts.
    """
    names = set(signature.parameters)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    if "completions" in names and (takes_any or "prompts" in names):
        trainer, heading = "TRL", "reward-functions-of-trl"
    elif {"data_source", "solution_str"} <= names:
        trainer, heading = "verl", "reward-functions"
    else:
        return
    raise RewardError(
        f"{where} takes {signature}, which is {trainer}'s contract. Here a function takes (response, ground_truth), or "
        f"(reward_input), a dict with response, ground_truth and row: docs/from-verl-and-trl.md#{heading} has both. "
        'One that takes a list of such dicts sets REWARD_TYPE = "batch"'
    )


def unwrap(function: object) -> object:
    """Return the function, class or object of which functools.partial has bound some arguments."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def is_async(function: Callable[..., object]) -> bool:
    """Return whether a function, or the __call__ of an object, is an `async def`."""
    unwrapped = unwrap(function)
    call = getattr(type(unwrapped), "__call__", None)  # noqa: B004 - it is not called
    return inspect.iscoroutinefunction(unwrapped) or inspect.iscoroutinefunction(call)


def is_class(function: object) -> bool:
    """Return whether a reward function is a class, or a class with some of its arguments."""
    return isinstance(unwrap(function), type)


def read_scores(returned: object) -> dict[str, float]:
    """Return the scores of one completion as floats, from what the reward function returned for it.

    Raises: RewardError, with a message of one line, unless `returned` is a number of at most
    MAX_REWARD, or a dict with such an "overall" and other numbers of at most MAX_PART.
    """
    if _is_number(returned):
        returned = {"overall": returned}
    if inspect.iscoroutine(returned):
        returned.close()
        raise RewardError("returned a coroutine; declare the function itself with `async def`")
    if not isinstance(returned, Mapping):
        raise RewardError(f"returned {short_repr(returned)}, expected a number, or a dict with 'overall'")
    if "overall" not in returned:
        raise RewardError(f"returned a dict without 'overall': {short_repr(returned)}")
    if len(returned) > MAX_PARTS:
        raise RewardError(f"returned {len(returned)} scores for one completion; the maximum is {MAX_PARTS}")
    scores = {}
    for name, value in returned.items():
        if not isinstance(name, str) or len(name) > MAX_NAME_CHARACTERS:
            raise RewardError(
                f"returned {short_repr(name)} as the name of a score; names are text of at most "
                f"{MAX_NAME_CHARACTERS} characters"
            )
        scores[name] = _read_number(name, value)
    return scores


def short_repr(value: object) -> str:
    """Return the text of a value for an error, at most 80 characters."""
    try:
        return shorten(repr(value), 80)
    except Exception:  # noqa: BLE001 - a `__repr__` of user code, or a number with thousands of digits
        return f"a value of type {type(value).__name__}"


def _is_number(value: object) -> bool:
    """Return whether value is a number, or a numpy or torch scalar."""
    return isinstance(value, int | float) or (hasattr(value, "item") and getattr(value, "ndim", None) == 0)


def _read_number(name: str, value: object) -> float:
    """Return value as a float. Numpy and torch scalars, True and False are numbers, too."""
    try:
        plain = value.item() if hasattr(value, "item") else value
    except (TypeError, ValueError, RuntimeError):  # an array or a tensor of several numbers, or of none
        plain = None
    if not isinstance(plain, int | float):
        raise RewardError(f"returned {short_repr(value)} for {name!r}, expected a number")
    try:
        number = float(plain)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"returned {short_repr(value)} for {name!r}, expected a finite number")
    largest = MAX_REWARD if name == "overall" else MAX_PART
    if abs(number) > largest:
        raise RewardError(f"returned {number:g} for {name!r}, expected a number from {-largest:g} to {largest:g}")
    return number


def call_signature(function: Callable[..., object]) -> inspect.Signature:
    """Return the signature of a call for completions; for a class, the signature of its objects.

    Raises: TypeError or ValueError if there is none.
    """
    if not is_class(function):
        return inspect.signature(function)
    call = inspect.getattr_static(unwrap(function), "__call__", None)
    if not inspect.isfunction(call):
        raise TypeError("its objects cannot be called; give it a method __call__")
    signature = inspect.signature(call)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _is_annotated(parameters: list[inspect.Parameter], *type_names: str) -> bool:
    """Return whether the first parameter is annotated with one of these types or their names."""
    if not parameters:
        return False
    annotation = parameters[0].annotation
    origin = getattr(annotation, "__origin__", annotation)
    text = annotation if isinstance(annotation, str) else getattr(origin, "__name__", "")
    return text.rpartition("typing.")[2].lower().startswith(type_names)
