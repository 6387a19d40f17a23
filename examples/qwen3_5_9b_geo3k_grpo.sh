#!/usr/bin/env bash
# Qwen3.5-9B, 8 x 80 GB.
# Qwen3.5-9B on Geometry3K with GRPO, on eight GPUs: 16 bytes per weight, about 19 GB on each, and by
# arithmetic 32 GiB in an update and 49 GiB while it samples. Three of four layers are linear
# attention: install its kernels first,
#     pip install flash-linear-attention
# Run from the top of the repository; appended key=value arguments take precedence:
#     bash examples/qwen3_5_9b_geo3k_grpo.sh trainer.max_steps=10
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3.5-9B}  # a hub id or a local folder

python3 -m trigon.trainer.main \
    config=examples/config.yaml \
    data.train_files=hiyouga/geometry3k@train \
    data.val_files=hiyouga/geometry3k@test \
    worker.actor.model.model_path="${MODEL_PATH}" \
    trainer.experiment_name=qwen3_5_9b_geo_grpo \
    trainer.n_gpus_per_node=8 \
    "$@"
