"""Decides what looks like a secret, and hides it in what a run writes, shows and publishes.

Two rules, of which the second is stricter: `mask` is for the user's own files, console and
trackers, and keeps what a run needs to be started again; `hide` is for what everybody may read.
Besides, `remember` and `scrub` remove secrets that this process knows from text that others write.
Imports only the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import PurePath
from typing import Any

HIDDEN = "(hidden)"
"""What is published in place of a secret, or of what could be one."""

MASKED = "(secret, not written)"
"""What stands for a secret in config.yaml, in trackers and on the console."""

ARGUMENTS = "worker.reward.reward_function_kwargs"
"""The option with values that only the user's reward function knows."""

ENVIRONMENT_ARGUMENTS = "worker.rollout.environment_kwargs"
"""The same of an environment."""

REWARD = "worker.reward.reward_function"
VAL_REWARD = "worker.reward.val_reward_function"
"""The options that may be lists of reward functions, each with arguments of its own."""

USER_ARGUMENTS = (ARGUMENTS, f"{REWARD}.kwargs", f"{VAL_REWARD}.kwargs", ENVIRONMENT_ARGUMENTS)
"""The options in which `env:NAME` has a meaning, and whose texts are not published.

Those in the middle are of each function in a list.
"""

FREE_MAPPINGS = (
    *USER_ARGUMENTS,
    "worker.reward.score_function_kwargs",  # its older name, in folders of older runs
    "worker.actor.model.override_config",
    "worker.critic.model.override_config",
)
"""The options that are mappings with any keys, which may say that a value is a secret."""

# For what is published, and for texts that are no options: any name that sounds like a secret.
_SECRET_NAME = re.compile(
    r"token(?!s|izer)|secret|passw|passphrase|pwd|bearer|api_?key|access_?key|private_?key|credential|auth(?!or)|cookie"
    r"|webhook",
    re.IGNORECASE,
)
# For a user's own files: the names of secrets themselves.
_SECRET_KEY = re.compile(
    r"secret|passw|passphrase|pwd|bearer|api[_-]?key|access[_-]?key|private[_-]?key|credential|cookie|webhook"
    r"|auth(?:orization|entication)?(?:[_-]?(?:token|key|header|value))?$|token(?:[_-]?(?:value|\d+))?$"
    r"|(?:api|access|auth|hf|hub|refresh|session|bot)[_-]?tokens?(?![a-z])",
    re.IGNORECASE,
)
# Names that contain one of these and are of settings: auth_type, api_key_env, pad_token.
_SETTING_KEY = re.compile(
    r"(?:^|[_-])(?:env|var|variable|file|path|dir|folder|name|type|mode|method|scheme|column|field|length|count|weight"
    r"|limit|format|pattern|regex|penalty|reward|score|bonus|required|enabled|timeout|budget)s?$"
    r"|(?<![a-z])(?:answer|pad|eos|bos|unk|sep|cls|mask|stop|start|begin|end|open|close|think|thinking|reasoning|image"
    r"|video|vision|special|final|first|last|next|delimiter|split|marker|format|newline|boxed)[_-]?tokens?(?:[_-]?\d+)?$",
    re.IGNORECASE,
)
# Names whose values are secrets only if they are neither words nor the names of columns.
_POSSIBLE_KEY = re.compile(r"(?:^|[_-])(?:keys?|tokens)$", re.IGNORECASE)
_PLAIN_POSSIBLE_KEY = re.compile(r"keys?|(?:.*[_-])?tokens", re.IGNORECASE)
_COLUMN_KEY = re.compile(
    r"(?<![a-z])(?:answer|prompt|image|video|data|column|json|dict|score|metric|field|reward|group|sort|cache|label"
    r"|target|truth|result|output|input|response|num|max|extra|row|meta|config|item|id|text|question|solution|option)s?"
    r"[_-]?keys?$",
    re.IGNORECASE,
)
# The texts under these are names of models and files, in which a random part is no secret.
_PLACE_KEY = re.compile(
    r"(?:^|[_-])(?:model|checkpoint|dataset|tokenizer|processor|repo|path|file|dir|folder|name|id|revision|commit|sha"
    r"|version)s?$",
    re.IGNORECASE,
)
# What is written where a service asks for a key and does not check it, or where there is none.
_NO_SECRET = re.compile(
    r"(?:(?:bearer|basic)\s+)?(?:empty|none|null|nil|dummy|fake|placeholder|unused|n/?a|true|false|[-*.]+"
    r"|not[ _-]?(?:needed|required|used)|no[ _-]?(?:key|api[ _-]?key|token|auth|password))",
    re.IGNORECASE,
)
# The path of a file that has the secret, which is none itself.
_SECRET_FILE = re.compile(r"(?:~|\.{1,2})?/[\w./-]+\.(?:json|ya?ml|toml|pem|key|crt|txt|env)")
# "answer.text", "reward_model.ground_truth_1", "a/b[0]": names of columns.
_PATH_OF_NAMES = re.compile(r"(?:[A-Za-z]{1,24}\d{0,3}|\d{1,4})(?:[\[\]._/-]+(?:[A-Za-z]{1,24}\d{0,3}|\d{1,4}))*\]?")
_DOTTED_WORDS = re.compile(r"[A-Za-z]+(?:[._-][A-Za-z]+)*")
_POSSIBLE_SECRET = re.compile(r"(?=[\w+/=~.-]*[A-Za-z])(?=[\w+/=~.-]*\d)[\w+/=~.-]{12,}")
# Names whose numbers are secrets too; token_weight and pad_token_id are numbers.
_SECRET_NUMBER = re.compile(r"secret|passw|passphrase|pwd|_key|credential", re.IGNORECASE)
# Tokens of Hugging Face, OpenAI and Anthropic, GitHub, GitLab, AWS, Google, Slack, and JSON web
# tokens; the user, the password or both in an address; the addresses of Slack's and Discord's
# webhooks, which are secrets themselves. For what is published: also what only resembles one.
_LOOSE_FORMATS = (
    r"hf_[A-Za-z0-9]{8,}|\bsk-(?=[\w-]*\d)[\w-]{8,}|\bgh[pousr]_\w{8,}|\bgithub_pat_\w{8,}|\bglpat-[\w-]{8,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bAIza[\w-]{20,}|\bxox[abprs]-[\w-]{8,}|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]+"
    r"|(?<=://)[^/\s]+(?=@)|(?<=hooks\.slack\.com/services/)[\w/]+|(?<=/api/webhooks/)\d+/[\w-]+"
)
_SECRET_TEXT = re.compile(rf"{_LOOSE_FORMATS}|\b[0-9a-f]{{40}}\b")  # 40 hexadecimal digits: Weights & Biases
# The same in a user's own files: as long as real tokens are, and no part of a path, since a run
# is started again by names such as hf_datasets, sk-learn-v2 and abfss://container@account.
_FORMATS = (
    r"(?<![\w/])(?:"
    r"(?:hf|api_org)_(?=[A-Z\d]*[a-z])(?=[a-z\d]*[A-Z])[A-Za-z\d]{30,}|hf_(?:oauth|jwt)_[\w.-]{30,}"
    r"|gh[pousr]_[A-Za-z\d]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}(?:\.[\w-]+)*|(?:AKIA|ASIA)[A-Z\d]{16}|AIza[\w-]{30,}"
    r"|xox[abeoprs]-(?=[A-Za-z-]*\d)[\w-]{20,}|(?<!-)sk-(?:[\w-]{0,200}[_-])?(?=[A-Za-z]*\d)[A-Za-z\d]{20,}[\w-]*"
    r")(?![\w/-])"
    r"|(?<![\w-])eyJ[\w-]{8,}\.[\w-]+\.[\w-]+|(?<=://)[^/\s?#:@]*:[^/\s?#]+(?=@)"
    r"|(?:(?<=https://)|(?<=http://))(?![a-z]{1,15}@)[^/\s?#]+(?=@)"
    r"|(?<=hooks\.slack\.com/services/)[\w/]+|(?<=/api/webhooks/)\d{15,}/[\w-]{20,}"
)
_MASKED_TEXT = re.compile(_FORMATS)
# A revision of a model or of code has 40 digits too, and is kept in paths and behind @.
_MASKED_FREE_TEXT = re.compile(rf"{_FORMATS}|(?<![/@])\b[0-9a-f]{{40}}\b(?!/)")
# "Authorization: Basic dXNlcjpwYXNz", and the schemes alone before what is no word.
_HEADER = re.compile(
    r"""(\bauthorization["']?\s*[:=]\s*["']?(?:(?:bearer|basic|token|digest|apikey)\s+)?|\b(?-i:Bearer)\s+"""
    r"""|\b(?:bearer|basic)\s+(?=\S*[\d=]))[^\s"']+""",
    re.IGNORECASE,
)
# The same in a user's own files, where a prompt may ask for "basic 3-step sums".
_MASKED_HEADER = re.compile(
    r"""(\bauthorization["']?\s*[:=]\s*["']?(?:(?:bearer|basic|token|digest|apikey)\s+)?"""
    r"""|\b(?:bearer|basic)\s+(?=[^\s"']*[\d=])(?=[^\s"']*[a-z])(?=[^\s"']*(?-i:[A-Z]))(?=[^\s"']{12})"""
    r"""|\b(?-i:Bearer)\s+(?=[^\s"']*\d)(?=[^\s"']{16}))[^\s"']+""",
    re.IGNORECASE,
)
_QUERY = re.compile(r"(://[^\s?#]+)\?[^\s#]*")
# The values of an address's query whose names say so: ?token=abc, &sig=abc, &X-Amz-Signature=abc.
_QUERY_VALUE = re.compile(r"(?<=[?&])([\w.-]{1,120}=)[^&#\s]+")
_QUERY_KEY = re.compile(r"(?:^|[_.-])(?:key|sig|signature)$", re.IGNORECASE)
# "api_key: abc", '"password": "abc"', "token=abc" in text that is no value of an option.
_ASSIGNMENT = re.compile(
    rf"""(\b[\w-]{{0,60}}(?:{_SECRET_NAME.pattern})[\w-]{{0,60}}["']?\s*[:=]\s*)("[^"]*"|'[^']*'|["']?[^\s"',}}]+)""",
    re.IGNORECASE,
)
# A long text of letters and digits without a word: a key of a service that is not known here.
_RANDOM = re.compile(r"(?=[\w+/=-]*\d)(?=[\w+/=-]*[a-z])(?=[\w+/=-]*[A-Z])[\w+/=-]{24,}")
# The same without separators and no part of a path or of the name of a model.
_RANDOM_WORD = re.compile(
    r"(?<![\w./-])(?=[a-zA-Z]{0,60}\d)(?=[A-Z\d]{0,60}[a-z])(?=[a-z\d]{0,60}[A-Z])[A-Za-z\d]{24,}={0,2}(?!\.?[\w/-])"
)
# Not secrets, whatever their names are: "<|image_pad|>", "[PAD]".
_SPECIAL_TOKEN = re.compile(r"<[^<>]{1,60}>|\[[A-Z]{1,20}\]")

# What is published of texts in ARGUMENTS: words such as boxed or exact_match, and under keys that
# end in model the name of one.
_WORD = re.compile(r"(?=.{1,24}$)[A-Za-z]+(?:[_-][A-Za-z]+)*")
_MODEL_KEY = re.compile(r"(?:^|_)model(?:_name|_id)?$", re.IGNORECASE)
_MODEL_NAME = re.compile(r"(?=.{1,96}$)[A-Za-z][\w.:-]*(?:/[\w.-]+)?")

_VARIABLE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")

_SHORTEST = 6
"""Shorter secrets are not removed from text, in which they would be parts of words."""

_known: set[str] = set()


def variable_of(value: object) -> str | None:
    """Return the environment variable that a value names as `env:NAME`, or None."""
    match = _VARIABLE.fullmatch(value) if isinstance(value, str) else None
    return None if match is None else match[1]


# -- for the user's own files, console and trackers -----------------------------------------------


def mask(name: str, value: Any) -> Any:
    """Return the value of an option or a section with MASKED in place of secrets.

    Secrets are values in FREE_MAPPINGS whose keys name one, and parts of any text that look like
    one; `env:NAME` is none, and neither is what says that there is none (EMPTY, none). Other values
    are returned unchanged.
    name: of the option or the section, such as "worker.reward"; "" for a configuration.
    """
    return _masked(name, value, set())


def without_secrets(value: Any) -> Any:
    """Return a value within a free mapping such that it is the same for any secrets in it.

    As `mask` does; an `env:NAME` where a secret is expected is replaced as well.
    """
    return _masked_free("", value, set(), is_secret=False, masks_variables=True)


def mask_text(text: str) -> str:
    """Return a text that is no value of an option, such as a line of a file, without secrets."""

    def masked(match: re.Match[str]) -> str:
        return match[0] if _is_harmless(match[2].strip("\"'")) else f"{match[1]}{MASKED}"

    return _mask_parts(_ASSIGNMENT.sub(masked, text), set(), free=True)


def secrets_in(name: str, value: Any) -> set[str]:
    """Return the texts that `mask` leaves out of the value of an option."""
    found: set[str] = set()
    _masked(name, value, found)
    return found


def masked_names(name: str, value: Any) -> Iterator[str]:
    """Yield the names of the values in an option's in which MASKED stands for a secret."""
    match value:
        case Mapping():
            for key, item in value.items():
                yield from masked_names(f"{name}.{key}" if name else str(key), item)
        case list() | tuple():
            for number, item in enumerate(value):
                yield from masked_names(f"{name}[{number}]", item)
        case str() if MASKED in value:
            yield name
        case _:
            pass


def _masked(name: str, value: Any, found: set[str]) -> Any:
    if name in FREE_MAPPINGS:
        return _masked_free("", value, found, is_secret=False)
    match value:
        case Mapping():
            return {key: _masked(f"{name}.{key}" if name else str(key), item, found) for key, item in value.items()}
        case list():
            return [_masked(name, item, found) for item in value]
        case tuple():
            return tuple(_masked(name, item, found) for item in value)
        case str():
            return _mask_parts(value, found, free=False)
        case _:
            return value


def _masked_free(key: str, value: Any, found: set[str], *, is_secret: bool, masks_variables: bool = False) -> Any:
    """Return a value within a free mapping.

    is_secret: whether a key above it names one. masks_variables: also `env:NAME`, if its key does.
    """
    is_secret = (is_secret or _SECRET_KEY.search(key) is not None) and _SETTING_KEY.search(key) is None
    inside = partial(_masked_free, found=found, is_secret=is_secret, masks_variables=masks_variables)
    match value:
        case Mapping():
            return {inner: inside(str(inner), item) for inner, item in value.items()}
        case list():
            return [inside(key, item) for item in value]
        case tuple():
            return tuple(inside(key, item) for item in value)
        case str() if variable_of(value) is not None:
            return MASKED if masks_variables and (is_secret or _may_name_secret(key)) else value
        case str() if _is_harmless(value):
            return value
        case str() if (is_secret and not _SECRET_FILE.fullmatch(value)) or _is_possible_secret(key, value):
            found.add(value)
            return MASKED
        case int() | float() if is_secret and not isinstance(value, bool) and _SECRET_NUMBER.search(key):
            found.add(str(value))
            return MASKED
        case str():
            return _mask_parts(value, found, free=_PLACE_KEY.search(key) is None)
        case _:
            return value


def _is_harmless(value: str) -> bool:
    """Return whether a text is no secret, whatever its name is."""
    text = value.strip()
    return not text or any(each.fullmatch(text) is not None for each in (_NO_SECRET, _SPECIAL_TOKEN))


def _is_possible_secret(key: str, value: str) -> bool:
    """Return whether a value is a secret although its key may be that of a setting: key, xy_key."""
    if not _may_name_secret(key):
        return False
    if _PLAIN_POSSIBLE_KEY.fullmatch(key):
        return _POSSIBLE_SECRET.fullmatch(value) is not None and _PATH_OF_NAMES.fullmatch(value) is None
    return not value.isdecimal() and _DOTTED_WORDS.fullmatch(value) is None


def _may_name_secret(key: str) -> bool:
    """Return whether a key is that of a secret or of a setting: key, xy_key."""
    is_possible = _POSSIBLE_KEY.search(key) is not None
    return is_possible and _COLUMN_KEY.search(key) is None and _SETTING_KEY.search(key) is None


def _mask_parts(text: str, found: set[str], *, free: bool) -> str:
    """Return a text without the parts that look like secrets. free: not the text of an option."""

    def masked(match: re.Match[str]) -> str:
        kept = match[1] if match.re.groups else ""
        secret = match[0].removeprefix(kept)
        if _is_harmless(secret) or (match.re is _QUERY_VALUE and not _is_secret_query(kept.removesuffix("="))):
            return match[0]
        found.add(secret)
        return f"{kept}{MASKED}"

    own = (_MASKED_TEXT, _QUERY_VALUE)
    patterns = (_MASKED_FREE_TEXT, _QUERY_VALUE, _MASKED_HEADER, _RANDOM_WORD) if free else own
    for pattern in patterns:
        text = pattern.sub(masked, text)
    return text


def _is_secret_query(name: str) -> bool:
    is_setting = _SETTING_KEY.search(name) is not None or _COLUMN_KEY.search(name) is not None
    return not is_setting and (_SECRET_KEY.search(name) is not None or _QUERY_KEY.search(name) is not None)


# -- secrets that this process knows --------------------------------------------------------------


def remember(values: Collection[str]) -> None:
    """Let scrub remove these texts from now on; those of a few characters are left out."""
    _known.update(value for value in values if len(value) >= _SHORTEST)


def scrub(text: str) -> str:
    """Return a text with MASKED in place of every secret that remember was given."""
    for value in sorted(_known, key=len, reverse=True):
        text = text.replace(value, MASKED)
    return text


# -- in public ------------------------------------------------------------------------------------


def hide(name: str, value: Any, *, free: bool = False) -> Any:
    """Return the value of an option as it may be published.

    A value whose name sounds like a secret is hidden as a whole, parts of texts that look like one
    are hidden, queries of addresses are left out, and absolute paths lose their folders.
    Of the arguments of the user's own code only numbers, booleans, words and the names of models
    are published, since no pattern knows all secrets.
    name: of the option, or a key inside it. free: whether the value belongs to a user's mapping,
    in which any long random text is hidden too.
    """
    if name in USER_ARGUMENTS:
        return _hide_argument("", value)
    if name in (REWARD, VAL_REWARD) and isinstance(value, list | tuple):
        return [
            {key: hide(f"{name}.{key}", item) for key, item in each.items()}
            if isinstance(each, Mapping)
            else hide("", each)
            for each in value
        ]
    if _is_secret(name.rpartition(".")[2], free=free) and value is not None and not isinstance(value, bool):
        return HIDDEN
    match value:
        case Mapping():
            return {_hide_text(str(key)): hide(str(key), item, free=True) for key, item in value.items()}
        case list() | tuple():
            return [hide("", item, free=free) for item in value]
        case str():
            text = _hide_text(value)
            text = _RANDOM.sub(HIDDEN, text) if free else text
            return short_path(text)
        case _:
            return value


def _hide_argument(key: str, value: Any) -> Any:
    """Return a value within ARGUMENTS as it may be published. key: the nearest one, or empty."""
    if variable_of(value) is not None:
        return value
    if _is_secret(key, free=True) and value is not None and not isinstance(value, bool):
        return HIDDEN
    match value:
        case bool() | int() | float() | None:
            return value
        case Mapping():
            return {_hide_text(str(name)): _hide_argument(str(name), item) for name, item in value.items()}
        case list() | tuple():
            return [_hide_argument(key, item) for item in value]
        case str() if _WORD.fullmatch(value):
            return value
        case str() if _MODEL_KEY.search(key) and _MODEL_NAME.fullmatch(value) and not _RANDOM.search(value):
            return _hide_text(value)
        case _:
            return HIDDEN


def _is_secret(key: str, *, free: bool) -> bool:
    return _SECRET_NAME.search(key) is not None or (free and key.lower().endswith("key"))


def _hide_text(text: str) -> str:
    """Return a text without the parts that look like secrets, and without queries of addresses."""
    text = _HEADER.sub(rf"\1{HIDDEN}", _SECRET_TEXT.sub(HIDDEN, text))
    return _QUERY.sub(r"\1", text)


def short_path(text: str) -> str:
    """Return a path without its folders if it is absolute: "/a/b.py:f" -> "b.py:f"."""
    is_path = text.startswith(("/", "~")) and "\n" not in text
    return PurePath(text).name or text if is_path else text
