#!/usr/bin/env bash
# Qwen2.5-VL-7B, 8 x 80 GB.
# Qwen2.5-VL-7B on Geometry3K with our recommended settings, on eight GPUs: the starting point for a
# task of your own.
# Run from the top of the repository; appended key=value arguments take precedence:
#     bash examples/qwen2_5_vl_7b_geo3k_recommended.sh trainer.max_steps=10
#
# Differences from qwen2_5_vl_7b_geo3k_grpo.sh, and the reasons. Most were measured by others, on
# language models:
#
# no KL term            DAPO (arXiv:2503.14476), Dr.GRPO (arXiv:2503.20783) and ScaleRL
#                       (arXiv:2510.13786) train without it. It saves the reference model and one
#                       forward pass over every completion.
# one update per step   rollout_batch_size = global_batch_size: completions are never older than the
#                       weights that learn from them, nothing is clipped, and the old
#                       log-probabilities need no pass of their own. 10 epochs of 16 steps are
#                       164,000 completions, about as many as the other script samples.
# n = 8                 with more completions per prompt, fewer groups are all correct or all wrong,
#                       and those give no gradient.
# batch deviation       advantages are divided by the standard deviation of the whole step's
#                       rewards: that of one group of eight is mostly noise (Lite PPO,
#                       arXiv:2508.08221; ScaleRL does the same).
# clip 0.2 and 0.28     only used with a smaller global_batch_size: DAPO's bounds let unlikely
#                       tokens increase more.
# token mean            each token has the same weight, so long completions are neither favoured nor
#                       spared (DAPO, section 3.3).
# truncated ratios      vLLM and the trainer round differently. Each token is weighted by the ratio
#                       of its two probabilities, at most 2, so that the gradient is that of the
#                       policy that sampled (truncated importance sampling).
# frozen vision tower   the language model learns to reason over unchanged features: no backward
#                       pass through the vision tower, and no optimizer states for it. We know of no
#                       published comparison. If the model fails to see details (small print, fine
#                       counting) rather than to reason, append
#                       worker.actor.model.freeze_vision_tower=false.
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-VL-7B-Instruct}  # a hub id or a local folder

python3 -m trigon.trainer.main \
    config=examples/config.yaml \
    data.train_files=hiyouga/geometry3k@train \
    data.val_files=hiyouga/geometry3k@test \
    data.rollout_batch_size=128 \
    algorithm.disable_kl=true \
    algorithm.adv_estimator=grpo_batch \
    algorithm.mismatch_correction=truncate \
    algorithm.mismatch_level=token \
    algorithm.mismatch_high=2.0 \
    worker.actor.global_batch_size=128 \
    worker.actor.micro_batch_size_per_device_for_update=4 \
    worker.actor.clip_ratio_low=0.2 \
    worker.actor.clip_ratio_high=0.28 \
    worker.actor.loss_avg_mode=token \
    worker.actor.model.model_path="${MODEL_PATH}" \
    worker.actor.model.freeze_vision_tower=true \
    worker.rollout.n=8 \
    trainer.total_epochs=10 \
    trainer.val_freq=8 \
    trainer.save_freq=16 \
    trainer.experiment_name=qwen2_5_vl_7b_geo_recommended \
    trainer.n_gpus_per_node=8 \
    "$@"
