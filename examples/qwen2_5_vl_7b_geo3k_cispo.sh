#!/usr/bin/env bash
# Qwen2.5-VL-7B, 8 x 80 GB.
# Qwen2.5-VL-7B on Geometry3K with CISPO (MiniMax-M1, arXiv:2506.13585), on eight GPUs.
# The ratio is a capped weight without gradient, so every token contributes to the gradient. As in
# the paper there is no lower bound: clip_ratio_low=1 disables it, while 0 would raise every weight
# below 1 to 1. The cap of 5 is that of ScaleRL (arXiv:2510.13786).
# Run from the top of the repository; appended key=value arguments take precedence:
#     bash examples/qwen2_5_vl_7b_geo3k_cispo.sh trainer.max_steps=10
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-VL-7B-Instruct}  # a hub id or a local folder

python3 -m trigon.trainer.main \
    config=examples/config.yaml \
    data.train_files=hiyouga/geometry3k@train \
    data.val_files=hiyouga/geometry3k@test \
    worker.actor.model.model_path="${MODEL_PATH}" \
    worker.actor.loss_type=cispo \
    worker.actor.clip_ratio_low=1 \
    worker.actor.cispo_cap=5 \
    trainer.experiment_name=qwen2_5_vl_7b_geo_cispo \
    trainer.n_gpus_per_node=8 \
    "$@"
