#!/usr/bin/env bash
# Qwen2.5-VL-7B, 8 x 80 GB.
# Qwen2.5-VL-7B on Geometry3K with GSPO (arXiv:2507.18071), on eight GPUs.
# The clipped ratio is one per completion, the geometric mean over its tokens. It varies far less
# than a token's ratio, so its bounds are small (3e-4 and 4e-4, section 5.1). gspo_token has the
# same gradient; every completion has the same weight; no KL term.
# Run from the top of the repository; appended key=value arguments take precedence:
#     bash examples/qwen2_5_vl_7b_geo3k_gspo.sh trainer.max_steps=10
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-VL-7B-Instruct}  # a hub id or a local folder

python3 -m trigon.trainer.main \
    config=examples/config.yaml \
    data.train_files=hiyouga/geometry3k@train \
    data.val_files=hiyouga/geometry3k@test \
    worker.actor.model.model_path="${MODEL_PATH}" \
    algorithm.disable_kl=true \
    worker.actor.loss_type=gspo_token \
    worker.actor.loss_avg_mode=seq \
    worker.actor.clip_ratio_low=3e-4 \
    worker.actor.clip_ratio_high=4e-4 \
    trainer.experiment_name=qwen2_5_vl_7b_geo_gspo \
    trainer.n_gpus_per_node=8 \
    "$@"
