#!/usr/bin/env bash
# Qwen2.5-VL-3B, 1 x 80 GB.
# Qwen2.5-VL-3B on Geometry3K with GRPO, on one GPU: 16 bytes per weight, about 60 GB, plus
# activations, of which those that gradient checkpointing keeps wait in host memory.
# Run from the top of the repository; appended key=value arguments take precedence:
#     bash examples/qwen2_5_vl_3b_geo3k_grpo.sh trainer.max_steps=10
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-VL-3B-Instruct}  # a hub id or a local folder

python3 -m trigon.trainer.main \
    config=examples/config.yaml \
    data.train_files=hiyouga/geometry3k@train \
    data.val_files=hiyouga/geometry3k@test \
    worker.actor.model.model_path="${MODEL_PATH}" \
    worker.actor.model.enable_activation_offload=true \
    trainer.experiment_name=qwen2_5_vl_3b_geo_grpo \
    trainer.n_gpus_per_node=1 \
    "$@"
