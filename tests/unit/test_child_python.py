"""Child processes import from where their parent does."""

import subprocess
import sys

from trigon.system.processes import python_command


def test_a_child_does_not_import_from_the_working_folder(tmp_path):
    (tmp_path / "trigon").mkdir()
    for name in ("types.py", "random.py", "json.py"):
        (tmp_path / name).write_text("raise RuntimeError('imported')\n")
    code = "import types, random, json; from trigon import __version__; print(sys.argv[1:], sys.path)"
    done = subprocess.run(python_command(code, "a", "b=c\nd"), cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "['a', 'b=c\\nd'] " + f"{sys.path}\n", done.stderr
