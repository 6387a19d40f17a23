"""The marked blocks of the pages, run as a reader would: in order, in one shell and one folder.

tests/support/pages.py explains the marks. The commands are copied from the pages, not from here.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.pages import ROOT, Block, sessions

pytestmark = pytest.mark.timeout(2700)

FOLDERS = ("examples", "scripts", "trigon")
"""Folders of the repository, from whose top the commands of the pages are run."""

LAST_LINES = {"docs/data.md ten-minutes": "\\boxed{"}
"""What the last line of a session's output contains."""

UNTIL_IT_ANSWERS = """\
for attempt in $(seq 450); do
    if curl --silent --fail --output /dev/null {url}; then break; fi
    kill -0 $server || {{ cat background.log; exit 1; }}
    sleep 2
done
curl --silent --fail --output /dev/null {url}
"""


def script_of(blocks: Sequence[Block]) -> str:
    """Return one script that does what the blocks say, and stops at the first error."""
    lines = ["set -euo pipefail"]
    for block in blocks:
        lines.append(f"echo '--- {block}'")
        match block.mark:
            case "file":
                lines.append(f"cat > {shlex.quote(block.value)} <<'END OF THE FILE'\n{block.text}END OF THE FILE")
            case "background":
                lines.append(f"({block.text.rstrip()}) > background.log 2>&1 &")
                lines.append("server=$!\ntrap 'kill $(jobs -p) 2> /dev/null || true' EXIT")
                lines.append(UNTIL_IT_ANSWERS.format(url=shlex.quote(block.value)))
            case "run":
                code = f"python - <<'END OF THE CODE'\n{block.text}END OF THE CODE"
                lines.append(code if block.language == "python" else block.text)
    return "\n".join(lines) + "\n"


@pytest.mark.long
@pytest.mark.vllm(cases=["docs/troubleshooting.md debugging", "docs/data.md ten-minutes"])
@pytest.mark.parametrize(("name", "blocks"), sessions().items(), ids=sessions().keys())
def test_the_commands_of_a_page_work(name: str, blocks: list[Block], tmp_path: Path) -> None:
    for folder in FOLDERS:
        (tmp_path / folder).symlink_to(ROOT / folder)
    commands = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": commands, "COLUMNS": "160"}
    script = script_of(blocks).replace("/tmp/", f"{tmp_path}/")
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    assert LAST_LINES.get(name, "") in done.stdout.splitlines()[-1]
