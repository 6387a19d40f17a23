#!/usr/bin/env bash
# Qwen2.5-VL-3B, 8 x 80 GB.
# Qwen2.5-VL-3B on the geometry problems of GeoQA (8,000, prepared by R1-V) with GRPO, on eight
# GPUs: 16 bytes per weight, about 8 GB on each, plus activations.
# Run from the top of the repository; appended key=value arguments take precedence:
#     bash examples/baselines/qwen2_5_vl_3b_geoqa8k.sh trainer.max_steps=10
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-VL-3B-Instruct}  # a hub id or a local folder

python3 -m trigon.trainer.main \
    config=examples/config.yaml \
    data.train_files=leonardPKU/GEOQA_8K_R1V@train \
    data.val_files=leonardPKU/GEOQA_8K_R1V@test \
    data.format_prompt=./examples/format_prompt/geoqa.jinja \
    worker.actor.model.model_path="${MODEL_PATH}" \
    worker.reward.reward_function=./examples/reward_function/geoqa.py:compute_score \
    trainer.experiment_name=qwen2_5_vl_3b_geoqa8k \
    trainer.n_gpus_per_node=8 \
    "$@"
