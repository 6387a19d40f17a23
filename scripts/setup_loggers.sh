#!/usr/bin/env bash
# Creates a small virtual environment with the libraries of all loggers, on top of another one, whose
# packages it sees: where both have a package, its own comes first.
#
#   scripts/setup_loggers.sh VENV BASE      scripts/setup_loggers.sh .venv-loggers .venv
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${1:?usage: scripts/setup_loggers.sh VENV BASE} BASE=${2:?usage: scripts/setup_loggers.sh VENV BASE}

site_of() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

rm -rf "$VENV"
"$BASE/bin/python" -m venv "$VENV"
site_of "$BASE" >"$(site_of "$VENV")/base.pth"
# --no-deps: the file names all that is needed, and versions of the base must not be considered.
"$VENV/bin/python" -m pip install --quiet --no-deps --ignore-installed --requirement constraints/loggers.txt
