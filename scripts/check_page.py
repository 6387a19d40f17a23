"""Writes the example of docs/check.md: `python scripts/check_page.py`.

With --check it is only compared.

The example is a small run with three planted faults, on a machine with fixed sizes. What depends on
this machine is replaced: versions, folders, seconds.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from trigon.tools.check.machine import Machine
from trigon.tools.check.run import Result, check_run, console_lines, count_statuses
from trigon.tools.quickstart.drawings import PROBLEM, draw

PAGE = Path(__file__).parents[1] / "docs" / "check.md"
GIB = 2**30
MACHINE = Machine(gpus=(), num_cpus=16, host_bytes=64 * GIB, free_disk_bytes=500 * GIB)
RUN = """\
data: {train_files: data.jsonl, prompt_key: problem, max_prompt_length: 64, max_response_length: 24,
  format_prompt: "{{ content }} Answer in \\\\boxed{}.", min_pixels: null, max_pixels: null, rollout_batch_size: 8}
algorithm: {disable_kl: true}
worker:
  actor: {global_batch_size: 8, model: {model_path: model}, fsdp: {mp_param_dtype: fp32}}
  rollout: {n: 4, name: transformers, dtype: fp32}
  reward: {reward_function: math}
trainer: {device: cpu, val_before_train: false, max_steps: 20, logger: [console, file]}
"""


def make_example(folder: Path) -> None:
    """Write a run of 40 rows: one lacks its image, two are the same, and four are too long."""
    from trigon.tools.quickstart.model import make_tiny

    make_tiny(folder / "model")
    (folder / "images").mkdir()
    rng = random.Random(3)
    rows = []
    for index in range(40):
        name = f"images/{index:02}.png"
        draw(rng, index % 6 + 1).save(folder / name)
        rows.append({"problem": PROBLEM, "images": [name], "answer": str(index % 6 + 1)})
    (folder / "images" / "07.png").unlink()
    rows[12] = rows[11]
    for index in range(20, 24):
        rows[index] = rows[index] | {"problem": PROBLEM + " Look at every cell of the drawing, and count." * 4}
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "run.yaml").write_text(RUN, encoding="utf-8")


def example() -> str:
    """Return what `trigon check` prints for the example."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        make_example(folder)
        before = Path.cwd()
        os.chdir(folder)
        try:
            report = check_run(Path("run.yaml"), machine=MACHINE)
        finally:
            os.chdir(before)
    # Before the text is broken into lines, since temporary folders have names of different lengths.
    results = [in_folder(result, folder, "/runs/first") for result in report.results.values()]
    text = "\n".join([*map(console_lines, results), "", f"{count_statuses(report)}: the run would fail"])
    text = re.sub(r"(?m)^(pass      versions      ).*(?:\n {24}.*)*", r"\1...", text)
    return re.sub(r"in [\d.]+ s:", "in ... s:", text)


def in_folder(result: Result, folder: Path, shown: str) -> Result:
    """Return the result with another name for the folder."""

    def renamed(text: str) -> str:
        return text.replace(str(folder), shown)

    problems = [
        replace(p, message=renamed(p.message), advice=renamed(p.advice), examples=tuple(map(renamed, p.examples)))
        for p in result.problems
    ]
    texts = {name: renamed(getattr(result, name)) for name in ("summary", "text", "skipped")}
    return replace(result, problems=problems, **texts)


def page(text: str) -> str:
    """Return the page with its generated parts written again."""
    begin, end = "<!-- example: written by scripts/check_page.py -->", "<!-- end -->"
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n```text\n{example()}\n```\n{end}{rest.partition(end)[2]}"


def main() -> int:
    """Write the page, or with --check return 1 if it is not up to date."""
    text = PAGE.read_text(encoding="utf-8")
    written = page(text)
    if "--check" in sys.argv[1:]:
        return int(written != text)
    PAGE.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
