"""EasyR1's command for `trigon merge`: export a checkpoint to ACTOR/huggingface and verify it.

python3 scripts/model_merger.py --local_dir checkpoints/easy_r1/exp_name/global_step_1/actor
"""

from __future__ import annotations

import sys

from trigon.tools.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["merge", *sys.argv[1:]]))
