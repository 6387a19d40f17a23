"""The check that runs benchmarks/gpu.py, which measures the speed of forward and backward."""

from __future__ import annotations

import subprocess

from trigon.system.child_python import python_command
from trigon.system.installation import clone_folder
from trigon.tools.doctor.result import CheckSkipped, Findings, Setting, Tolerances

VARIANTS = ("padded", "packed, varlen", "+ shared prompts", "+ chunked log-probs", "no recomputation", "with sdpa")
"""Few of them: each takes several updates, and some of the others compile for minutes."""

PROFILED = "+ chunked log-probs"
"""What a run computes by default on a GPU."""

MAY_NOT_FIT = ("padded", "no recomputation")
"""These may need more memory than a GPU has, and no run needs them."""

DIFFERENCE_TOLERANCE = {"cuda": 0.05, "cpu": 1e-4}
"""Mean |log-probability difference| from the first variant, in nats: bfloat16 and float32."""

RUN = "import runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
_NAME_WIDTH = 22  # of the table's first column


def check_benchmark(setting: Setting) -> Findings:
    """Run the benchmark on few prompts, and require that its variants compute the same.

    Raises: CheckSkipped without the project's folder; RuntimeError if the benchmark fails.
    """
    root = clone_folder()
    script = None if root is None else root / "benchmarks" / "gpu.py"
    if script is None or not script.is_file():
        raise CheckSkipped("needs the project's folder: benchmarks/gpu.py is not a part of the installed package")
    size = (
        ["--groups", "8", "--repeats", "2"]
        if setting.device == "cuda"
        else ["--tiny", "--groups", "2", "--repeats", "1"]
    )
    command = python_command(RUN, str(script), *size, "--profile", PROFILED, "--variants", *VARIANTS)
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"benchmarks/gpu.py ended with status {run.returncode}: {run.stdout[-2000:]}")
    compared = Tolerances(setting)
    notes: list[str] = []
    for line in run.stdout.splitlines():
        name, cells = line[:_NAME_WIDTH].strip(), line[_NAME_WIDTH:].split()
        if name not in VARIANTS or not cells:
            continue
        try:
            seconds, difference = float(cells[0]), float(cells[-1])
        except ValueError:  # why it was not measured
            if "out of memory" in line:
                (notes if name in MAY_NOT_FIT else compared.problems).append(f"{name}: out of memory")
            continue
        compared.figures[name] = f"{seconds:.3f} s"
        compared.at_most(f"{name}: mean log-prob difference", difference, DIFFERENCE_TOLERANCE[setting.device])
    if not compared.figures:
        compared.problems.append("the benchmark measured nothing")
    return compared.findings(notes=tuple(notes), text=run.stdout)
