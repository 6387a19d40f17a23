#!/usr/bin/env bash
# Qwen2.5-VL-7B, 8 x 80 GB.
# Qwen2.5-VL-7B on questions about small details of photographs with GRPO and the tool `crop`, on
# eight GPUs: the model may look closer up to three times before it answers.
# The data is DeepEyes' selection from V* (arXiv:2505.14362). Download and convert it first:
#     hf download ChenShawn/DeepEyes-Datasets-47k data_0.1.2_visual_toolbox_v2.parquet \
#         --repo-type dataset --local-dir datasets/deepeyes
#     python3 examples/data_preprocess/visual_search.py --local_dir datasets/visual_search
# Its rows have an image, a question about it, and a word as the answer.
# Run from the top of the repository; appended key=value arguments take precedence:
#     bash examples/qwen2_5_vl_7b_visual_search_crop.sh trainer.max_steps=10
#
# data.max_pixels       the image, and each region that crop returns, are at most 1,280 tokens: a
#                       region is seen in more detail than in the whole image.
# prompt and completion a prompt has the image and some 600 tokens of text, most of which describe
#                       the tool; a completion up to three regions and four turns.
# the other options     as in qwen2_5_vl_7b_geo3k_recommended.sh, with the vision tower trained.
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-VL-7B-Instruct}  # a hub id or a local folder
DATA=${DATA:-datasets/visual_search}

python3 -m trigon.trainer.main \
    config=examples/config.yaml \
    data.train_files="${DATA}/train.parquet" \
    data.val_files="${DATA}/test.parquet" \
    data.format_prompt=./examples/format_prompt/visual_search.jinja \
    data.max_prompt_length=2560 \
    data.max_response_length=6144 \
    data.rollout_batch_size=128 \
    data.max_pixels=1003520 \
    algorithm.disable_kl=true \
    algorithm.adv_estimator=grpo_batch \
    algorithm.mismatch_correction=truncate \
    algorithm.mismatch_level=token \
    algorithm.mismatch_high=2.0 \
    worker.actor.global_batch_size=128 \
    worker.actor.micro_batch_size_per_device_for_update=2 \
    worker.actor.clip_ratio_low=0.2 \
    worker.actor.clip_ratio_high=0.28 \
    worker.actor.loss_avg_mode=token \
    worker.actor.model.model_path="${MODEL_PATH}" \
    worker.rollout.n=8 \
    worker.rollout.tools='[crop]' \
    worker.rollout.max_turns=4 \
    worker.rollout.max_turn_tokens=512 \
    worker.reward.reward_function=./examples/reward_function/visual_search.py:compute_score \
    trainer.total_epochs=1 \
    trainer.val_freq=10 \
    trainer.save_freq=20 \
    trainer.experiment_name=qwen2_5_vl_7b_visual_search_crop \
    trainer.n_gpus_per_node=8 \
    "$@"
