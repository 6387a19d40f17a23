#!/usr/bin/env bash
# Qwen2.5-VL-7B, 8 x 80 GB.
# Qwen2.5-VL-7B on JourneyBench's questions about two images with GRPO, on eight GPUs. A small
# dataset that shows the format of multi-image data: the question has as many <image> markers as the
# row has images.
# Run from the top of the repository; appended key=value arguments take precedence:
#     bash examples/qwen2_5_vl_7b_multi_image.sh trainer.max_steps=10
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-VL-7B-Instruct}  # a hub id or a local folder

python3 -m trigon.trainer.main \
    config=examples/config.yaml \
    data.train_files=hiyouga/journeybench-multi-image-vqa@train \
    data.val_files=hiyouga/journeybench-multi-image-vqa@test \
    data.format_prompt=./examples/format_prompt/vqa.jinja \
    data.rollout_batch_size=256 \
    worker.actor.model.model_path="${MODEL_PATH}" \
    worker.rollout.limit_images=2 \
    worker.reward.reward_function=./examples/reward_function/vqa.py:compute_score \
    trainer.experiment_name=qwen2_5_vl_7b_multi_image \
    trainer.n_gpus_per_node=8 \
    "$@"
