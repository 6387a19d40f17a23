#!/usr/bin/env bash
# Qwen2.5-VL-7B, 8 x 80 GB.
# Qwen2.5-VL-7B on Geometry3K with SAPO (arXiv:2511.20347), on eight GPUs.
# A soft gate replaces clipping; it closes slightly faster for negative advantages. No KL term.
# Run from the top of the repository; appended key=value arguments take precedence:
#     bash examples/qwen2_5_vl_7b_geo3k_sapo.sh trainer.max_steps=10
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-VL-7B-Instruct}  # a hub id or a local folder

python3 -m trigon.trainer.main \
    config=examples/config.yaml \
    data.train_files=hiyouga/geometry3k@train \
    data.val_files=hiyouga/geometry3k@test \
    worker.actor.model.model_path="${MODEL_PATH}" \
    algorithm.disable_kl=true \
    worker.actor.loss_type=sapo \
    worker.actor.tau_positive=1.0 \
    worker.actor.tau_negative=1.05 \
    trainer.experiment_name=qwen2_5_vl_7b_geo_sapo \
    trainer.n_gpus_per_node=8 \
    "$@"
