"""EasyR1's name for `trigon merge`: exports a checkpoint to a Hugging Face model and verifies it.

The model is written to the folder `huggingface` of local_dir:

python3 scripts/model_merger.py --local_dir checkpoints/easy_r1/exp_name/global_step_1/actor
"""

from __future__ import annotations

import sys

from trigon.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["merge", *sys.argv[1:]]))
