#!/usr/bin/env bash
# Compares the tested versions of constraints/ with known vulnerabilities, by pip-audit.
#
#   scripts/audit.sh [FILE ...]      scripts/audit.sh constraints/cpu.txt
#
# pip-audit is installed into an environment of its own, AUDIT_VENV (default: .venv-audit); the
# packages of the constraints are not installed, nor are their dependencies looked up, since a file
# of constraints has all of them. AUDIT_SERVICE is pypi or osv (default: pypi).
#
# Exit status 0: no known vulnerability. 1: there is one. 2: nothing was checked, since pip-audit
# cannot be installed or its service cannot be reached; that is no success.
set -uo pipefail
cd "$(dirname "$0")/.."

VENV=${AUDIT_VENV:-.venv-audit}
SERVICE=${AUDIT_SERVICE:-pypi}
PIP_AUDIT=2.10.0
IGNORED=constraints/audit-ignore.txt
FILES=("$@")
((${#FILES[@]})) || FILES=(constraints/cpu.txt constraints/cpu-oldest.txt constraints/gpu.txt constraints/loggers.txt constraints/environments.txt)

not_checked() {
    printf '\nNothing was checked: %s\n' "$*" >&2
    exit 2
}

for file in "${FILES[@]}"; do
    [[ -r $file ]] || not_checked "there is no $file"
done
if [[ ! -x $VENV/bin/pip-audit ]]; then
    "${PYTHON:-python3}" -m venv "$VENV" || not_checked "an environment cannot be made in $VENV"
    "$VENV/bin/python" -m pip install --quiet "pip-audit==$PIP_AUDIT" ||
        not_checked "pip-audit $PIP_AUDIT cannot be installed; is a package index reachable?"
fi

ignore=()
while read -r id _; do
    [[ -z $id || $id == \#* ]] || ignore+=(--ignore-vuln "$id")
done <"$IGNORED"

status=0
for file in "${FILES[@]}"; do
    report=$(mktemp)
    # --disable-pip and --no-deps: the pinned versions themselves, without resolving anything.
    "$VENV/bin/pip-audit" --requirement "$file" --disable-pip --no-deps --vulnerability-service "$SERVICE" \
        --timeout 30 --progress-spinner off --format json --output "$report" "${ignore[@]}" >"$report.log" 2>&1
    "$VENV/bin/python" scripts/audit_report.py "$file" "$report" || { code=$?; ((code > status)) && status=$code; }
    ((status == 2)) && tail -n 3 "$report.log" >&2
    rm -f "$report" "$report.log"
done
((status == 2)) && not_checked "the vulnerability service ($SERVICE) gave no answer, or not for every package; see above"
exit "$status"
