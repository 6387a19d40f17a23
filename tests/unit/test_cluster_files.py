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
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import gpu_constraints
from trigon.config.load import load_config, split_arguments
from trigon.config.options import options, sections
from trigon.config.schema import TrainerConfig
from trigon.tools.cli.main import COMMANDS

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


def code_of(page: str) -> str:
    """Return the code blocks of a page, with continued lines joined and without comments."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", read(page), flags=re.DOTALL))
    return re.sub(r"\s#.*$", "", blocks.replace("\\\n", " "), flags=re.MULTILINE)


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


def ray_job() -> Any:
    return yaml.safe_load(read(KUBERAY))


def test_every_key_in_these_files_is_in_the_schema() -> None:
    known = {".".join(path) for path in options()} | {".".join(path) for path, _ in sections() if path}
    for file in (PAGE, DOCKERFILE, SLURM, KUBERAY):
        named = set(re.findall(r"(?<![\w/.])((?:data|algorithm|worker|trainer)(?:\.[a-z_]+)+)(?![\w/])", read(file)))
        assert named - known == set(), file
        assert named or file == DOCKERFILE, file


@pytest.mark.parametrize("file", [PAGE, SLURM, KUBERAY])
def test_every_trigon_command_exists(file: str) -> None:
    text = code_of(PAGE) if file == PAGE else re.sub(r"^#.*$", "", read(file), flags=re.MULTILINE)
    commands = re.findall(r"(?<![\w/-])trigon +([a-z]+)\b", text)
    assert commands
    assert set(commands) <= set(COMMANDS)


@pytest.mark.extended
def test_every_ray_command_exists_with_its_options() -> None:
    from ray.scripts.scripts import cli

    calls = [line for line in (code_of(PAGE) + read(SLURM)).splitlines() if re.match(r"\s*ray [a-z]", line)]
    assert calls
    for call in calls:
        _, command, *rest = call.split()
        known = {name for parameter in cli.commands[command].params for name in parameter.opts}
        assert {word.split("=")[0] for word in rest if word.startswith("--")} <= known, call


def test_every_training_command_of_the_page_is_a_valid_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    trainers = [trainer_of(command) for command in re.findall(r"trigon train .*", code_of(PAGE))]
    sizes = [(trainer.nnodes, trainer.n_gpus_per_node) for trainer in trainers]
    assert sizes == [(1, 8), (2, 8), (1, 8), (2, 1), (1, 8)]
    several = [trainer.save_checkpoint_path for trainer in trainers if trainer.nnodes > 1]
    assert all(path and Path(path).is_absolute() for path in several)  # workers start in another folder


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


def test_the_slurm_script_is_executable_and_stops_at_the_first_error() -> None:
    assert (ROOT / SLURM).stat().st_mode & 0o111
    assert re.search(r"^set -euo pipefail$", read(SLURM), flags=re.MULTILINE)
    subprocess.run(["bash", "-n", ROOT / SLURM], check=True)


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


def test_a_slurm_job_on_one_machine_starts_one_ray_node(
    slurm: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    assert slurm(machines=1).returncode == 0
    assert len((tmp_path / "srun").read_text().splitlines()) == 1


def test_a_slurm_job_ends_with_the_status_of_its_training(
    slurm: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    assert slurm(machines=2, status=143).returncode == 143


# -- Kubernetes ------------------------------------------------------------------------------------


def test_the_ray_job_requests_the_pods_and_gpus_of_its_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    spec = ray_job()["spec"]
    trainer = trainer_of(spec["entrypoint"].replace("/opt/trigon/", ""))
    [group] = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert group["minReplicas"] == group["replicas"] == group["maxReplicas"] == trainer.nnodes
    [worker] = group["template"]["spec"]["containers"]
    resources = worker["resources"]
    assert resources["requests"] == resources["limits"]
    assert int(resources["limits"]["nvidia.com/gpu"]) == trainer.n_gpus_per_node
    assert int(resources["limits"]["cpu"]) >= trainer.n_gpus_per_node  # a worker also needs a CPU


def test_the_pods_of_the_ray_job_share_image_volume_and_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ray_job()["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["rayVersion"] == pinned("ray")
    pods = [part["template"]["spec"] for part in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    [head], [worker] = (pod["containers"] for pod in pods)
    assert all(head[key] == worker[key] for key in ("image", "env", "volumeMounts"))
    assert pods[0]["volumes"] == pods[1]["volumes"]
    [mount] = head["volumeMounts"]
    monkeypatch.chdir(ROOT)
    trainer = trainer_of(ray_job()["spec"]["entrypoint"].replace("/opt/trigon/", ""))
    assert str(trainer.save_checkpoint_path).startswith(f"{mount['mountPath']}/")
    assert pods[0]["securityContext"]["runAsUser"] == int(argument("UID"))


def test_the_entrypoint_of_the_ray_job_needs_no_shell_quoting() -> None:
    assert re.fullmatch(r"[\w ./:=@-]+", ray_job()["spec"]["entrypoint"])


# -- the image -------------------------------------------------------------------------------------


def argument(name: str) -> str:
    """Return the default of an ARG of the Dockerfile."""
    [default] = re.findall(rf"^ARG {name}=(\S+)$", read(DOCKERFILE), flags=re.MULTILINE)
    return str(default)


def pinned(package: str) -> str:
    [version] = re.findall(rf"^{package}==(\S+)$", read("constraints/gpu.txt"), flags=re.MULTILINE)
    return str(version)


def test_the_image_uses_a_supported_python_and_existing_extras() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    extras = {extra for text in (read(DOCKERFILE), read(PAGE)) for extra in re.findall(r"EXTRAS=([\w,]+)", text)}
    assert {name for extra in extras for name in extra.split(",")} <= project["optional-dependencies"].keys()
    assert argument("EXTRAS") == "gpu"
    assert SpecifierSet(project["requires-python"]).contains(argument("PYTHON"))
    assert argument("PYTHON") in gpu_constraints.PYTHONS
    bases = re.findall(r"^FROM (\S+)$", read(DOCKERFILE), flags=re.MULTILINE)
    assert bases == ["python:${PYTHON}-slim-bookworm"]  # glibc 2.36, wheels need 2.31


def test_the_image_installs_the_pinned_versions_and_nothing_else_from_an_index() -> None:
    instructions = re.sub(r"\\\n *", "", read(DOCKERFILE))
    installs = re.findall(r"pip install ([^&\n]+)", instructions)
    libraries, package = (install.split() for install in installs)
    assert libraries[:3] == ["--no-cache-dir", "--constraint", "constraints/gpu.txt"]
    assert [text.strip('"') for text in libraries[3:]] == [".[${EXTRAS}]", *gpu_constraints.FURTHER]
    assert "--no-deps" in package
    copied = instructions.index("COPY constraints/gpu.txt constraints/")
    assert copied < instructions.index("pip install") < instructions.index("COPY trigon trigon")


def test_the_builder_receives_exactly_the_files_that_the_image_copies() -> None:
    copied = {
        source for line in re.findall(r"^COPY (.*) \S+$", read(DOCKERFILE), flags=re.M) for source in line.split()
    }
    assert all((ROOT / source).exists() for source in copied)
    rules = [line for line in read(f"{DOCKERFILE}.dockerignore").splitlines() if line and not line.startswith("#")]
    sent = {rule[1:] for rule in rules if rule.startswith("!")}
    assert rules[0] == "*"
    assert sent == copied - {"trigon/__init__.py"}


def test_root_can_build_the_image_with_its_own_uid() -> None:
    [command] = [line for line in read(DOCKERFILE).splitlines() if "useradd" in line]
    assert "--non-unique" in command  # else useradd refuses the UID 0


def test_the_image_does_not_run_as_root() -> None:
    instructions = [line.split()[0] for line in read(DOCKERFILE).splitlines() if re.match(r"[A-Z]+ ", line)]
    assert "USER" in instructions
    assert "RUN" not in instructions[instructions.index("USER") :]
    assert "&& chown trigon:trigon ." in read(DOCKERFILE)  # WORKDIR, where commands write by default
