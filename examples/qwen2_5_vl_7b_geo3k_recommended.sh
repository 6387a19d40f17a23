#!/usr/bin/env bash
# Qwen2.5-VL-7B on Geometry3K as we would train it today, on eight GPUs: where to start with a task of your own.
# Run from the top of the repository; further key=value arguments are passed on, and the last one counts:
#     bash examples/qwen2_5_vl_7b_geo3k_recommended.sh trainer.max_steps=10
#
# What differs from qwen2_5_vl_7b_geo3k_grpo.sh, and why. Most of it was measured by others, on language models:
#
# no KL term            DAPO (arXiv:2503.14476), Dr.GRPO (arXiv:2503.20783) and ScaleRL (arXiv:2510.13786) train without. It saves
#                       the reference model and one forward pass over every answer.
# one update a step     rollout_batch_size = global_batch_size: answers are never older than the weights they teach, nothing is
#                       clipped, and the old log-probabilities need no pass of their own. 10 epochs of 16 steps are 164,000
#                       answers, about what the other script samples.
# n = 8                 with more answers to a prompt fewer groups are all right or all wrong, and those teach nothing.
# batch deviation       advantages are divided by the standard deviation of the whole step's rewards: that of one group of eight is
#                       mostly noise (Lite PPO, arXiv:2508.08221; ScaleRL does so too).
# clip 0.2 and 0.28     for whoever sets a smaller global_batch_size: DAPO's bounds leave unlikely tokens room to rise.
# token mean            each token weighs the same, so long answers are neither favoured nor spared (DAPO, section 3.3).
# truncated ratios      vLLM and the trainer round differently. Each token is weighed by the ratio of the probabilities they
#                       give it, at most 2, so that the gradient is that of the policy which really sampled.
# frozen vision tower   the language model learns to reason over features that stay as they are: no backward pass through the
#                       vision tower, no optimizer states for it. We know of no published comparison. If what fails is seeing,
#                       not reasoning (small print, fine counting), append worker.actor.model.freeze_vision_tower=false.
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
