"""docs/distributed.md, the Docker image and the cluster files agree with the code."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import gpu_constraints
from trigon.config.load import load_config, split_arguments
from trigon.config.options import options, sections
from trigon.config.schema import TrainerConfig

ROOT = Path(__file__).parents[2]
PAGE = "docs/distributed.md"
DOCKERFILE = "docker/Dockerfile"
SLURM = "examples/cluster/slurm.sh"
KUBERAY = "examples/cluster/kuberay.yaml"

REPLACED_COMMANDS = {
    # Logs its call and runs until it is killed, like a Ray node.
    "srun": """printf '%s\\n' "$*" >> "$LOG/srun"
        exec sleep 100""",
    # A script from stdin waits for Ray nodes, here for the calls that start them.
    "python3": """[[ $1 != - ]] && exec "$PYTHON" "$@"
        until [[ -e $LOG/srun && $(wc -l < "$LOG/srun") -ge $(($2 > 1 ? 2 : 1)) ]]; do sleep 0.01; done""",
    "trigon": """printf '%s\\n' "$@" > "$LOG/trigon"
        printenv RAY_ADDRESS RAY_AUTH_MODE RAY_AUTH_TOKEN > "$LOG/ray"
        exit "$TRIGON_STATUS" """,
}
"""Commands that replace SLURM's and the slow ones when slurm.sh runs in a test."""


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def trainer_of(command: str) -> TrainerConfig:
    """Return the trainer options of a `trigon train ...` command; the others are checked too.

    Absolute paths of a cluster do not exist here: data files are omitted, and the model is replaced
    by a hub id. Call it in the root of the repository.
    """
    words = shlex.split(command)
    assert words[:2] == ["trigon", "train"]
    path, overrides = split_arguments([word for word in words[2:] if not re.match(r"data\.\w+_files=/", word)])
    replacements = [
        "worker.actor.model.model_path=owner/model",
        "data.train_files=owner/train",
        "data.val_files=owner/val",
    ]
    return load_config(path, [*replacements[1:], *overrides, replacements[0]]).config.trainer


def test_every_key_in_these_files_is_in_the_schema() -> None:
    known = {".".join(path) for path in options()} | {".".join(path) for path, _ in sections() if path}
    for file in (PAGE, DOCKERFILE, SLURM, KUBERAY):
        named = set(re.findall(r"(?<![\w/.])((?:data|algorithm|worker|trainer)(?:\.[a-z_]+)+)(?![\w/])", read(file)))
        assert named - known == set(), file
        assert named or file == DOCKERFILE, file


# -- SLURM -----------------------------------------------------------------------------------------


@pytest.fixture
def slurm(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs slurm.sh like SLURM, and logs its calls in tmp_path."""
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, text in REPLACED_COMMANDS.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
        (commands / name).chmod(0o755)

    def run(*arguments: str, machines: int, status: int = 0) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM"))}
        environment |= {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "LOG": str(tmp_path),
            "PYTHON": sys.executable,
            "TRIGON_STATUS": str(status),
            "HEAD_ADDRESS": "10.0.0.1",
            "MODEL_PATH": "/shared/model",
            "RUNS": "/shared/runs",
            "SLURM_JOB_NUM_NODES": str(machines),
            "SLURM_CPUS_PER_TASK": "16",
            "SLURM_GPUS_ON_NODE": "4",
            "SLURMD_NODENAME": "first",
        }
        script = ["bash", str(ROOT / SLURM), *arguments]
        return subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)

    return run


def test_the_slurm_job_starts_ray_on_each_machine_and_trains_with_all_of_them(
    slurm: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = slurm("trainer.max_steps=7", machines=3)
    assert done.returncode == 0, done.stderr
    head, others = (tmp_path / "srun").read_text().splitlines()
    each = "--ntasks-per-node=1 --cpus-per-task=16 ray start"
    assert head.startswith(f"--nodes=1 --ntasks=1 --nodelist=first {each} --head --node-ip-address=10.0.0.1")
    assert others.startswith(f"--nodes=2 --ntasks=2 --exclude=first {each} --address=10.0.0.1:6379 --num-cpus=16")
    monkeypatch.chdir(ROOT)
    trainer = trainer_of(shlex.join(["trigon", *(tmp_path / "trigon").read_text().splitlines()]))
    assert (trainer.nnodes, trainer.n_gpus_per_node, trainer.max_steps) == (3, 4, 7)
    address, mode, token = (tmp_path / "ray").read_text().splitlines()
    assert (address, mode, len(token)) == ("10.0.0.1:6379", "token", 64)
    assert slurm(machines=2, status=143).returncode == 143
    assert os.access(ROOT / SLURM, os.X_OK)


# -- Kubernetes ------------------------------------------------------------------------------------


def test_the_ray_job_requests_what_its_training_needs_for_pods_that_share_image_volume_and_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    spec = yaml.safe_load(read(KUBERAY))["spec"]
    assert re.fullmatch(r"[\w ./:=@-]+", spec["entrypoint"])  # needs no quoting
    trainer = trainer_of(spec["entrypoint"].replace("/opt/trigon/", ""))
    cluster = spec["rayClusterSpec"]
    [group] = cluster["workerGroupSpecs"]
    assert group["minReplicas"] == group["replicas"] == group["maxReplicas"] == trainer.nnodes
    assert (cluster["authOptions"], cluster["rayVersion"]) == ({"mode": "token"}, pinned("ray"))
    pods = [part["template"]["spec"] for part in (cluster["headGroupSpec"], group)]
    [head], [worker] = (pod["containers"] for pod in pods)
    assert all(head[key] == worker[key] for key in ("image", "env", "volumeMounts"))
    assert pods[0]["volumes"] == pods[1]["volumes"]
    [mount] = head["volumeMounts"]
    assert str(trainer.save_checkpoint_path).startswith(f"{mount['mountPath']}/")
    assert pods[0]["securityContext"]["runAsUser"] == int(argument("UID"))
    limits = worker["resources"]["limits"]
    assert worker["resources"]["requests"] == limits
    assert int(limits["nvidia.com/gpu"]) == trainer.n_gpus_per_node
    assert int(limits["cpu"]) >= trainer.n_gpus_per_node  # a worker also needs a CPU


# -- the image -------------------------------------------------------------------------------------


def argument(name: str) -> str:
    """Return the default of an ARG of the Dockerfile."""
    [default] = re.findall(rf"^ARG {name}=(\S+)$", read(DOCKERFILE), flags=re.MULTILINE)
    return str(default)


def pinned(package: str) -> str:
    [version] = re.findall(rf"^{package}==(\S+)$", read("constraints/gpu.txt"), flags=re.MULTILINE)
    return str(version)


def test_the_image_installs_the_pinned_versions_in_a_supported_python() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    assert argument("EXTRAS") in project["optional-dependencies"]
    assert SpecifierSet(project["requires-python"]).contains(argument("PYTHON"))
    assert argument("PYTHON") in gpu_constraints.PYTHONS
    installs = re.findall(r"pip install ([^&\n]+)", re.sub(r"\\\n *", "", read(DOCKERFILE)))
    libraries, package = (install.split() for install in installs)
    assert libraries[:3] == ["--no-cache-dir", "--constraint", "constraints/gpu.txt"]
    assert [text.strip('"') for text in libraries[3:]] == [".[${EXTRAS}]", *gpu_constraints.FURTHER]
    assert "--no-deps" in package


def test_the_builder_receives_exactly_the_files_that_the_image_copies() -> None:
    copied = {
        source for line in re.findall(r"^COPY (.*) \S+$", read(DOCKERFILE), flags=re.M) for source in line.split()
    }
    assert all((ROOT / source).exists() for source in copied)
    rules = [line for line in read(f"{DOCKERFILE}.dockerignore").splitlines() if line and not line.startswith("#")]
    sent = {rule[1:] for rule in rules if rule.startswith("!")}
    assert rules[0] == "*"
    assert sent == copied - {"trigon/__init__.py"}
