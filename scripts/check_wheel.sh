#!/usr/bin/env bash
# Builds the wheel, installs it into a fresh environment and runs the commands there, in an empty folder with an empty
# home: whatever a command needs must be in the wheel.
#
#   scripts/check_wheel.sh [VENV]      VENV: an environment made by scripts/setup.sh, whose packages are used (.venv)
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${1:-.venv}
dependencies=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT

echo "[1/3] the wheel"
# Built from a copy: setuptools would leave a build/ folder here, and take files from it that no longer exist.
mkdir "$FOLDER/source"
cp -r trigon pyproject.toml README.md LICENSE "$FOLDER/source"
"$VENV/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$FOLDER" "$FOLDER/source"
wheels=("$FOLDER"/trigon_rl-*.whl)
echo "      $(basename "${wheels[0]}"), $(du -h "${wheels[0]}" | cut -f1)"

echo "[2/3] a fresh environment"
"$VENV/bin/python" -m venv "$FOLDER/venv"
"$FOLDER/venv/bin/python" -m pip install --quiet --no-deps --no-index "${wheels[0]}"
# The dependencies are those of VENV; its .pth files, among them the clone's own, are not read from here.
echo "$dependencies" >"$("$FOLDER/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dependencies.pth"

echo "[3/3] the commands, in an empty folder"
mkdir "$FOLDER/home" "$FOLDER/work"
cd "$FOLDER/work"
export HOME=$FOLDER/home XDG_CACHE_HOME=$FOLDER/home HF_HOME=$FOLDER/home VLLM_CACHE_ROOT=$FOLDER/home/vllm
unset PYTHONPATH
trigon=$FOLDER/venv/bin/trigon
place=$("$FOLDER/venv/bin/python" -c 'import trigon; print(trigon.__file__)')
[[ $place == "$FOLDER"/venv/* ]] || {
    echo "trigon is imported from $place, not from the wheel" >&2
    exit 1
}
attempt() { # what the command prints is shown only if it fails
    "$trigon" "$@" >output.txt 2>&1 || {
        printf 'trigon %s:\n%s\n' "$*" "$(tail -n 40 output.txt)" >&2
        exit 1
    }
}
"$trigon" --version
for command in train quickstart tiny export doctor; do attempt "$command" --help; done
for reward in math r1v dapo geoqa counting vqa android_gui; do # the shipped ones are found by name
    attempt train --print-config data.train_files=hub/data@train trainer.val_before_train=false trainer.val_freq=-1 \
        worker.actor.model.model_path=hub/model "worker.reward.reward_function=$reward" worker.rollout.n=4
done
attempt doctor
attempt quickstart trainer.max_steps=2
attempt view runs/quickstart --export page.html
attempt push runs/quickstart me/quickstart --dry-run --no-logits
attempt init started
test -f runs/quickstart/model/config.json -a -f page.html -a -f runs/quickstart/run/push/README.md -a -f started/run.yaml
echo "      train, quickstart, tiny, export, view, push, init and doctor work from the wheel"
