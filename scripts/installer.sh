# How the scripts install packages: with uv, which resolves and unpacks in seconds what takes pip minutes; with pip
# where uv cannot be had, or INSTALLER=pip. To be sourced.
#
#   choose_installer VENV CONSTRAINTS      sets `installer`, and for uv the sources of packages that pip is configured with
#   install_into VENV ARGUMENT...          `pip install ARGUMENT...` in VENV; exit status and output are the installer's

choose_installer() {
    local venv=$1 constraints=$2
    installer=${INSTALLER:-uv} uv=()
    case $installer in
        pip) return ;;
        uv) ;;
        *)
            echo "INSTALLER=$installer: it is uv or pip." >&2
            exit 1
            ;;
    esac
    if command -v uv >/dev/null 2>&1; then
        uv=(uv)
    elif "$venv/bin/python" -m uv --version >/dev/null 2>&1 ||
        "$venv/bin/python" -m pip install --quiet -c "$constraints" uv >/dev/null 2>&1; then
        uv=("$venv/bin/python" -m uv)
    else
        installer=pip
        return
    fi
    use_sources_of_pip "$venv"
}

# uv reads its own variables only. Where one of them is set, it stays as it is.
use_sources_of_pip() {
    local venv=$1 name value
    while IFS=$'\t' read -r name value; do
        [[ -n ${!name:-} ]] || export "$name=$value"
    done < <("$venv/bin/python" -m pip config list 2>/dev/null | "$venv/bin/python" -c '
import ast, sys
from pathlib import Path
from urllib.parse import urlparse

NAMES = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS", "cert": "SSL_CERT_FILE"}
RANKS = {"global": 0, "install": 1, ":env:": 2}
found = {}
for line in sys.stdin:
    key, _, value = line.strip().partition("=")
    section, _, option = key.rpartition(".")
    if option in NAMES and section in RANKS:
        found[option] = max(found.get(option, (-1, "")), (RANKS[section], ast.literal_eval(value)))
for option, (_, value) in found.items():
    sources = value.split()
    if option == "extra-index-url":  # a folder that is not there is an error for uv, and none for pip
        sources = [url for url in sources if not url.startswith("file:") or Path(urlparse(url).path).is_dir()]
    separator = "," if option == "find-links" else " "
    if sources:
        print(NAMES[option], separator.join(sources), sep="\t")
')
}

install_into() {
    local venv=$1
    shift
    if [[ $installer == uv ]]; then
        # As pip does: the best version of all sources, not that of the first source which has the package.
        "${uv[@]}" pip install --python "$venv/bin/python" --index-strategy unsafe-best-match "$@"
    else
        PYTHONUNBUFFERED=1 "$venv/bin/python" -m pip install --progress-bar off "$@"
    fi
}
