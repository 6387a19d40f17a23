#!/usr/bin/env bash
# Qwen3-4B, 8 x 80 GB.
# Qwen3-4B on MATH (math12k: text only) with GRPO, on eight GPUs, with longer completions for its
# thinking.
# Run from the top of the repository; appended key=value arguments take precedence:
#     bash examples/qwen3_4b_math_grpo.sh trainer.max_steps=10
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-4B}  # a hub id or a local folder

python3 -m trigon.trainer.main \
    config=examples/config.yaml \
    data.train_files=hiyouga/math12k@train \
    data.val_files=hiyouga/math12k@test \
    data.max_response_length=4096 \
    worker.actor.model.model_path="${MODEL_PATH}" \
    trainer.experiment_name=qwen3_4b_math_grpo \
    trainer.n_gpus_per_node=8 \
    "$@"
