"""Hides secrets in what a run writes, shows and publishes.

A secret is best given as `env:NAME`, which is written as it is. Any other value is masked if the
name of its key says that it is a secret. Only text that has no key of its own is searched for a
short list of forms: a password inside of an address, the token in the header or the traceback of a
failed request. `mask` is for the user's own files, console and trackers, and keeps what a run needs
to be started again; `hide` is for what everybody may read, and hides more. `remember` and `scrub`
remove the secrets that this process knows from text that others write. Imports only the standard
library.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePath
from typing import Any

HIDDEN = "(hidden)"
"""What is published in place of a secret, or of what could be one."""

MASKED = "(secret, not written)"
"""What stands for a secret in config.yaml, in trackers and on the console."""

ARGUMENTS = "worker.reward.reward_function_kwargs"
"""The option with values that only the user's reward function knows."""

ENVIRONMENT_ARGUMENTS = "worker.rollout.environment_kwargs"
"""The option with values that only the user's environment knows."""

REWARD = "worker.reward.reward_function"
VAL_REWARD = "worker.reward.val_reward_function"
"""The options that may be lists of reward functions, each with arguments of its own."""

USER_ARGUMENTS = (ARGUMENTS, f"{REWARD}.kwargs", f"{VAL_REWARD}.kwargs", ENVIRONMENT_ARGUMENTS)
"""The options in which `env:NAME` has a meaning, and whose texts are not published.

The two in the middle are the arguments of each reward function in a list.
"""

FREE_MAPPINGS = (
    *USER_ARGUMENTS,
    "worker.reward.score_function_kwargs",  # its older name, in folders of older runs
    "worker.actor.model.override_config",
    "worker.critic.model.override_config",
)
"""The options that are mappings with any keys, which may say that a value is a secret."""

_SECRET_KEY = re.compile(
    r"secret|passw|passphrase|pwd|jwt|bearer|credential|cookie|webhook|(?:api|private|access)[_-]?key"
    r"|auth(?:orization|entication)?(?:[_-]?(?:token|key|header|value))?$"
    r"|token(?:[_-]?(?:value|\d+))?$|(?:api|access|auth|hf|hub|refresh|session|bot)[_-]?tokens?(?![a-z])",
    re.IGNORECASE,
)
# Of a secret, unless the value is a word: openai_key, gold_key.
_POSSIBLE_KEY = re.compile(r"[\w-]keys?(?:[_-]?\d+)?$", re.IGNORECASE)
# The same words in the names of settings: auth_type, api_key_env, pad_token, answer_key.
_SETTING_KEY = re.compile(
    r"(?:^|[_-])(?:env|var|variable|file|path|dir|folder|name|type|mode|method|scheme|column|field|length|count|weight"
    r"|limit|format|pattern|regex|penalty|reward|score|bonus|required|enabled|timeout|budget)s?$"
    r"|(?<![a-z])(?:answer|prompt|image|video|vision|data|column|json|dict|score|metric|field|reward|group|sort|cache|filter"
    r"|label|target|truth|result|output|input|response|num|max|extra|row|meta|config|item|id|text|question|solution"
    r"|option|pad|eos|bos|unk|sep|cls|mask|stop|start|begin|end|open|close|think|thinking|reasoning|special|final|first"
    r"|last|next|delimiter|split|marker|format|newline|boxed)s?[_-]?(?:tokens?|keys?)(?:[_-]?(?:id|\d+))?$",
    re.IGNORECASE,
)
# Values under such keys that are no secrets: a service that needs none, a special token, and the
# path of the file that has the secret.
_NO_SECRET = re.compile(
    r"\s*|(?:(?:bearer|basic)\s+)?(?:empty|none|null|nil|dummy|fake|placeholder|unused|n/?a|true|false|[-*.]+"
    r"|not[ _-]?(?:needed|required|used)|no[ _-]?(?:key|api[ _-]?key|token|auth|password))"
    r"|<[^<>]{1,60}>|\[[A-Z]{1,20}\]|(?:~|\.{1,2})?/[\w./-]+\.(?:json|ya?ml|toml|pem|key|crt|txt|env)",
    re.IGNORECASE,
)
# "exact_match", "answer.text".
_WORDS = re.compile(r"(?=.{1,24}$)[A-Za-z]+(?:[._-][A-Za-z]+)*")

# The tokens of the services that training scripts talk to, which are in errors of their clients. As
# long as real ones are, and no part of a path: a run may be called sk-learn-v2.
_TOKEN = (
    r"(?<![\w/])(?:(?:hf|api_org)_(?=[A-Z\d]*[a-z])(?=[a-z\d]*[A-Z])[A-Za-z\d]{30,}|hf_(?:oauth|jwt)_[\w.-]{30,}"
    r"|gh[pousr]_[A-Za-z\d]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}(?:\.[\w-]+)*|(?:AKIA|ASIA)[A-Z\d]{16}|AIza[\w-]{30,}"
    r"|xox[abeoprs]-(?=[A-Za-z-]*\d)[\w-]{20,}|(?<!-)sk-(?:[\w-]{0,200}[_-])?(?=[A-Za-z]*\d)[A-Za-z\d]{20,}[\w-]*"
    r")(?![\w/-])|(?<![\w-])eyJ[\w-]{8,}\.[\w-]+\.[\w-]+"
)
# The user and password of an address, and the secret part of the address of a webhook.
_ADDRESS = (
    r"(?<=://)[^/\s?#:@]*:[^/\s?#]+(?=@)|(?:(?<=https://)|(?<=http://))(?![a-z]{1,15}@)[^/\s?#]+(?=@)"
    r"|(?<=hooks\.slack\.com/services/)[\w/]+|(?<=/api/webhooks/)\d{15,}/[\w-]{20,}"
)
_TOKEN_OR_ADDRESS = re.compile(f"{_TOKEN}|{_ADDRESS}")
# Of the query of an address, what its name says is a secret: ?token=abc, &X-Amz-Signature=abc.
_QUERY_VALUE = re.compile(r"(?<=[?&])([\w.-]{1,120}=)[^&#\s]+")
_QUERY_KEY = re.compile(r"(?:^|[_.-])(?:key|sig|signature)$", re.IGNORECASE)
# "Authorization: Basic dXNlcjpwYXNz", and a scheme alone before what is no word, since a prompt may
# ask for "basic 3-step sums".
_HEADER = re.compile(
    r"""(\bauthorization["']?\s*[:=]\s*["']?(?:(?:bearer|basic|token|digest|apikey)\s+)?"""
    r"""|\b(?:bearer|basic)\s+(?=[^\s"']*[\d=])(?=[^\s"']*[a-z])(?=[^\s"']*(?-i:[A-Z]))(?=[^\s"']{12})"""
    r"""|\b(?-i:Bearer)\s+(?=[^\s"']*\d)(?=[^\s"']{16}))[^\s"']+""",
    re.IGNORECASE,
)
# "api_key: abc", '"password": "abc"', "token=abc" in text that is no value of an option.
_ASSIGNED_KEY = re.compile(r"""\b([\w-]{1,120})["']?\s*[:=]\s*""")
_ASSIGNED_VALUE = re.compile(r"""(?:(?:bearer|basic|token)\s+)?(?:"[^"]*"|'[^']*'|["']?[^\s"',}]+)""", re.IGNORECASE)
_QUERY = re.compile(r"(://[^\s?#]+)\?[^\s#]*")

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

    Secrets are values in FREE_MAPPINGS whose keys name one, and tokens and passwords of addresses
    in any text; neither is `env:NAME`, nor what says that there is no secret (EMPTY, none).
    name: the name of the option or the section, such as "worker.reward"; "" for a configuration.
    """
    return _mask_option(name, value, set())


def without_secrets(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a free mapping that is the same for any secrets in it, also as an `env:NAME`."""
    masked: dict[str, Any] = _mask_free("", value, set(), is_secret=False, masks_variables=True)
    return {key: each for key, each in masked.items() if each != MASKED}


def mask_text(text: str) -> str:
    """Return a text that is no value of an option, such as a line of a file, without secrets."""
    kept, end = "", 0
    for key in _ASSIGNED_KEY.finditer(text):
        if key.start() < end or not _names_secret(key[1]):
            continue  # before the value, which may be as long as the text
        value = _ASSIGNED_VALUE.match(text, key.end())
        if value is not None and not _NO_SECRET.fullmatch(value[0].strip("\"'")):
            kept, end = f"{kept}{text[end : key.end()]}{MASKED}", value.end()
    return _mask_parts(kept + text[end:], set())


def secrets_in(name: str, value: Any) -> set[str]:
    """Return the texts that `mask` leaves out of the value of an option."""
    found: set[str] = set()
    _mask_option(name, value, found)
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


def _mask_option(name: str, value: Any, found: set[str]) -> Any:
    if name in FREE_MAPPINGS:
        return _mask_free("", value, found, is_secret=False)
    match value:
        case Mapping():
            return {
                key: _mask_option(f"{name}.{key}" if name else str(key), each, found) for key, each in value.items()
            }
        case list() | tuple():
            return type(value)(_mask_option(name, each, found) for each in value)
        case str():
            return _mask_parts(value, found)
        case _:
            return value


def _mask_free(key: str, value: Any, found: set[str], *, is_secret: bool, masks_variables: bool = False) -> Any:
    """Return a value within a free mapping without secrets, which are added to found.

    is_secret: whether a key above it names one. masks_variables: also mask `env:NAME` there.
    """
    is_secret = (is_secret or _names_secret(key)) and _SETTING_KEY.search(key) is None
    match value:
        case Mapping():
            return {
                inner: _mask_free(str(inner), each, found, is_secret=is_secret, masks_variables=masks_variables)
                for inner, each in value.items()
            }
        case list() | tuple():
            return [
                _mask_free(key, each, found, is_secret=is_secret, masks_variables=masks_variables) for each in value
            ]
        case str() if variable_of(value) is not None:
            names_key = is_secret or _may_name_secret(key) or key.lower() == "key"
            return MASKED if masks_variables and names_key else value
        case bool() | None:
            return value
        case str() | int() | float() if is_secret and not _NO_SECRET.fullmatch(str(value)):
            found.add(str(value))
            return MASKED
        case str() if _may_name_secret(key) and not (is_secret or _WORDS.fullmatch(value) or value.isdecimal()):
            found.add(value)
            return MASKED
        case str():
            return _mask_parts(value, found)
        case _:
            return value


def _names_secret(key: str) -> bool:
    return _SECRET_KEY.search(key) is not None and _SETTING_KEY.search(key) is None


def _may_name_secret(key: str) -> bool:
    return (_SECRET_KEY.search(key) or _POSSIBLE_KEY.search(key)) is not None and _SETTING_KEY.search(key) is None


def _mask_parts(text: str, found: set[str], *, replacement: str = MASKED) -> str:
    """Return a text without the parts that are secrets, which are added to found."""

    def masked(match: re.Match[str]) -> str:
        kept = match[1] if match.re.groups else ""
        secret = match[0].removeprefix(kept)
        is_kept = match.re is _QUERY_VALUE and not (_names_secret(kept[:-1]) or _QUERY_KEY.search(kept[:-1]))
        if is_kept or _SETTING_KEY.search(kept[:-1]) or _NO_SECRET.fullmatch(secret) or MASKED.startswith(secret):
            return match[0]
        found.add(secret)
        return f"{kept}{replacement}"

    for pattern in (_TOKEN_OR_ADDRESS, _QUERY_VALUE, _HEADER):
        text = pattern.sub(masked, text)
    return text


# -- secrets that this process knows --------------------------------------------------------------


def remember(values: Collection[str]) -> None:
    """Let scrub remove these texts from now on, except texts of a few characters."""
    _known.update(value for value in values if len(value) >= _SHORTEST)


def scrub(text: str) -> str:
    """Return a text with MASKED in place of every secret that remember was given."""
    for value in sorted(_known, key=len, reverse=True):
        text = text.replace(value, MASKED)
    return text


# -- in public ------------------------------------------------------------------------------------


def hide(name: str, value: Any) -> Any:
    """Return the value of an option as it may be published.

    What mask leaves out is hidden; queries of addresses are left out, and absolute paths lose their
    folders. Of the arguments of the user's own code only numbers, booleans, words and the names of
    models are published, since no rule knows all secrets. name: the name of the option, or a key
    inside it.
    """
    if name in USER_ARGUMENTS:
        return _hide_argument("", value)
    if _may_name_secret(name.rpartition(".")[2]) and _is_given(value):
        return HIDDEN
    match value:
        case Mapping():
            inside = f"{name}." if name in (REWARD, VAL_REWARD) else ""
            return {_hide_text(str(key)): hide(f"{inside}{key}", each) for key, each in value.items()}
        case list() | tuple():
            return [hide(name if name in (REWARD, VAL_REWARD) else "", each) for each in value]
        case str():
            return short_path(_hide_text(value))
        case _:
            return value


def _hide_argument(key: str, value: Any) -> Any:
    """Return a value within USER_ARGUMENTS as it may be published. key: the nearest one, or ""."""
    if variable_of(value) is not None:
        return value
    if _may_name_secret(key) and _is_given(value):
        return HIDDEN
    match value:
        case bool() | int() | float() | None:
            return value
        case Mapping():
            return {_hide_text(str(name)): _hide_argument(str(name), each) for name, each in value.items()}
        case list() | tuple():
            return [_hide_argument(key, each) for each in value]
        case str() if _WORDS.fullmatch(value) and "." not in value:
            return value
        case str() if _MODEL_KEY.search(key) and _MODEL_NAME.fullmatch(value):
            return _hide_text(value)
        case _:
            return HIDDEN


def _is_given(value: Any) -> bool:
    return value is not None and not isinstance(value, bool)


def _hide_text(text: str) -> str:
    return _QUERY.sub(r"\1", _mask_parts(text, set(), replacement=HIDDEN))


def short_path(text: str) -> str:
    """Return a path without its folders if it is absolute: "/a/b.py:f" -> "b.py:f"."""
    is_path = text.startswith(("/", "~")) and "\n" not in text
    return PurePath(text).name or text if is_path else text
