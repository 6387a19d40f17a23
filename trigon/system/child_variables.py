"""The environment variables that processes with user code get: those of a list, and named ones.

The list has what programs need to find their files, libraries, caches, proxies and services.
Everything else stays with the run, since no rule tells secrets from settings: PGPASSWORD,
SLACK_WEBHOOK_URL and DATABASE_URL have no name in common.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from trigon.errors import RewardError
from trigon.system.secrets import ARGUMENTS, remember, secrets_in

_log = logging.getLogger(__name__)

_GROUPS = (
    # the user, the language, and where files are
    "HOME USER LOGNAME SHELL PWD HOSTNAME TERM COLUMNS LINES TZ LANG LANGUAGE LOCALE_ARCHIVE TMPDIR TEMP TMP "
    "XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME XDG_RUNTIME_DIR",
    # programs and libraries
    "PATH LD_LIBRARY_PATH LD_PRELOAD DYLD_LIBRARY_PATH DYLD_FALLBACK_LIBRARY_PATH VIRTUAL_ENV CONDA_PREFIX "
    "CONDA_DEFAULT_ENV CUDA_HOME CUDA_PATH ROCM_PATH JAVA_HOME NODE_PATH TESSDATA_PREFIX",
    # Python
    "PYTHONPATH PYTHONHOME PYTHONNOUSERSITE PYTHONUSERBASE PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX "
    "PYTHONUNBUFFERED PYTHONWARNINGS PYTHONUTF8 PYTHONIOENCODING PYTHONMALLOC PYTHONSAFEPATH PYTHONFAULTHANDLER",
    # caches and settings of libraries
    "HF_HOME HF_HUB_CACHE HF_ASSETS_CACHE HF_DATASETS_CACHE HF_MODULES_CACHE HF_HUB_OFFLINE HF_DATASETS_OFFLINE "
    "TRANSFORMERS_OFFLINE HUGGINGFACE_HUB_CACHE TRANSFORMERS_CACHE HF_HUB_DISABLE_TELEMETRY HF_HUB_DISABLE_XET "
    "HF_HUB_DISABLE_PROGRESS_BARS HF_HUB_ENABLE_HF_TRANSFER HF_HUB_DOWNLOAD_TIMEOUT MODELSCOPE_CACHE TORCH_HOME "
    "TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR NUMBA_CACHE_DIR NLTK_DATA SPACY_DATA TIKTOKEN_CACHE_DIR "
    "MPLCONFIGDIR MPLBACKEND TOKENIZERS_PARALLELISM TQDM_DISABLE",
    # certificates and proxies
    "SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE "
    "HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy",
    # the addresses of services that a function may call, without which it would call others
    "HF_ENDPOINT OPENAI_BASE_URL OPENAI_API_BASE ANTHROPIC_BASE_URL AZURE_OPENAI_ENDPOINT OLLAMA_HOST",
)
ALLOWED = frozenset(" ".join(_GROUPS).split())
"""Variables that children get, unless the value is a URL with a user or a password."""

_ALLOWED_PREFIXES = ("LC_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "NUMEXPR_", "MALLOC_")
_FIXED = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
_URL_WITH_USER = re.compile(r"://[^/?#@\s]+@")
_PROXY_WITH_USER = re.compile(r"^[^/?#@\s]+@")  # the scheme of a proxy may be left out
_SECRET_ENDINGS = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{2,}")
_LITERAL = re.compile(r"""["']([A-Za-z_][A-Za-z0-9_]*)["']""")


def child_environment(environment: Mapping[str, str], passed_variables: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables of an environment that children get.

    It also sets a fixed hash seed, so that sets iterate in the same order in every child, limits
    numeric libraries to one thread, and hides the GPUs, whose memory the model needs.
    passed_variables: names of variables that are passed unchanged, besides the allowed ones.
    """
    kept = {name: value for name, value in environment.items() if _is_allowed(name, value)}
    return kept | _FIXED | {name: environment[name] for name in passed_variables if name in environment}


def check_passed_variables(names: Sequence[str]) -> None:
    """Raise RewardError if one of the variables of worker.reward.env is not set.

    Values that look like secrets, by the rule for arguments, are removed from text from now on.
    """
    for name in names:
        if name not in os.environ:
            raise RewardError(f"worker.reward.env names {name}, which is not set; export it, or leave it out")
        remember(secrets_in(ARGUMENTS, {name: os.environ[name]}))


def warn_of_withheld_variables(files: Iterable[str], passed_variables: Sequence[str]) -> None:
    """Warn of variables that are set, that a file of the user's names, and that it will not get.

    A function that has a default for such a variable would otherwise use that without a word.
    """
    for file in files:
        try:
            source = Path(file).read_text(encoding="utf-8", errors="replace")
        except OSError:  # the child, which loads it, says so
            continue
        literals = dict.fromkeys(match.group(1) for match in _LITERAL.finditer(source))
        kept = child_environment(os.environ, passed_variables)
        names = [name for name in literals if name.isupper() and name in os.environ and name not in kept]
        if names:
            _log.warning(
                "%s names environment variables that reward workers do not get: %s; worker.reward.env=[%s] passes them",
                file,
                ", ".join(names),
                ",".join(names),
            )


def explain_withheld(error: str, passed_variables: Sequence[str]) -> str:
    """Return the error of a child, with a hint if it names a variable that was withheld from it.

    That is one of the environment, or one of a KeyError that is not set and looks like a secret.
    """
    for match in _NAME.finditer(error):
        name = match.group()
        if name in passed_variables or name in _FIXED:
            continue
        is_key = f"KeyError: '{name}'" in error
        is_withheld = name in os.environ and not _is_allowed(name, os.environ[name]) and ("_" in name or is_key)
        if is_withheld or (is_key and name not in os.environ and name.endswith(_SECRET_ENDINGS)):
            return (
                f"{error.rstrip()} (reward workers get only some environment variables, and others are withheld; "
                f"worker.reward.env=[{name}] passes {name})"
            )
    return error


def _is_allowed(name: str, value: str) -> bool:
    if name not in ALLOWED and not name.startswith(_ALLOWED_PREFIXES):
        return False
    is_proxy = name.lower().endswith("_proxy")
    return not _URL_WITH_USER.search(value) and not (is_proxy and _PROXY_WITH_USER.search(value))
