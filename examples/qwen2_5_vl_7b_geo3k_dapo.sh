#!/usr/bin/env bash
# Qwen2.5-VL-7B, 8 x 80 GB.
# Qwen2.5-VL-7B on Geometry3K with DAPO (arXiv:2503.14476), on eight GPUs.
# Groups that are all correct or all wrong give no gradient: 128 prompts at a time are sampled until
# 512 other groups are found. Groups are filtered by accuracy, since the overall reward of wrong
# completions in the right format is not 0. The upper clip bound is higher than the lower one; no KL
# term.
# Run from the top of the repository; appended key=value arguments take precedence:
#     bash examples/qwen2_5_vl_7b_geo3k_dapo.sh trainer.max_steps=10
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-VL-7B-Instruct}  # a hub id or a local folder

python3 -m trigon.trainer.main \
    config=examples/config.yaml \
    data.train_files=hiyouga/geometry3k@train \
    data.val_files=hiyouga/geometry3k@test \
    worker.actor.model.model_path="${MODEL_PATH}" \
    data.mini_rollout_batch_size=128 \
    algorithm.disable_kl=true \
    algorithm.online_filtering=true \
    algorithm.filter_key=accuracy \
    algorithm.filter_low=0.01 \
    algorithm.filter_high=0.99 \
    worker.actor.clip_ratio_low=0.2 \
    worker.actor.clip_ratio_high=0.28 \
    trainer.experiment_name=qwen2_5_vl_7b_geo_dapo \
    trainer.n_gpus_per_node=8 \
    "$@"
