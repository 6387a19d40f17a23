"""EasyR1's entry point.

`python3 -m trigon.trainer.main config=... key=value ...` is `trigon train`.
"""

from __future__ import annotations

import sys

from trigon.tools.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
