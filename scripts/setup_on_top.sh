#!/usr/bin/env bash
# Creates a small virtual environment on top of another one, whose packages it sees: where both have a package, its own
# comes first. It is for packages whose versions do not fit into the other one.
#
#   scripts/setup_on_top.sh VENV BASE REQUIREMENTS    scripts/setup_on_top.sh .venv-loggers .venv constraints/loggers.txt
set -euo pipefail
cd "$(dirname "$0")/.."
usage="usage: scripts/setup_on_top.sh VENV BASE REQUIREMENTS"
VENV=${1:?$usage} BASE=${2:?$usage} REQUIREMENTS=${3:?$usage}

site_of() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

rm -rf "$VENV"
"$BASE/bin/python" -m venv "$VENV"
# With the .pth files of the base, such as that of trigon/system/torchvision_stub.py.
printf 'import site; site.addsitedir("%s")\n' "$(site_of "$BASE")" >"$(site_of "$VENV")/base.pth"
# --no-deps: the file names all that is needed, and versions of the base must not be considered.
source scripts/installer.sh
choose_installer "$VENV" constraints/cpu.txt
options=(--quiet --no-deps --requirement "$REQUIREMENTS")
[[ $installer == uv ]] || options+=(--ignore-installed) # pip would count what the base has
install_into "$VENV" "${options[@]}"
