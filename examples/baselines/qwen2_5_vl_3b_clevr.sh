#!/usr/bin/env bash
# Qwen2.5-VL-3B, 8 x 80 GB.
# Qwen2.5-VL-3B on counting the objects of CLEVR (70,000 images, prepared by R1-V) with GRPO, on
# eight GPUs: 16 bytes per weight, about 8 GB on each, plus activations.
# Run from the top of the repository; appended key=value arguments take precedence:
#     bash examples/baselines/qwen2_5_vl_3b_clevr.sh trainer.max_steps=10
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-VL-3B-Instruct}  # a hub id or a local folder

python3 -m trigon.trainer.main \
    config=examples/config.yaml \
    data.train_files=BUAADreamer/clevr_count_70k@train \
    data.val_files=BUAADreamer/clevr_count_70k@test \
    data.format_prompt=./examples/format_prompt/counting.jinja \
    worker.actor.model.model_path="${MODEL_PATH}" \
    worker.reward.reward_function=./examples/reward_function/counting.py:compute_score \
    trainer.experiment_name=qwen2_5_vl_3b_clevr \
    trainer.n_gpus_per_node=8 \
    "$@"
