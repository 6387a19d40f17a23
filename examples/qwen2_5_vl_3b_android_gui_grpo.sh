#!/usr/bin/env bash
# Qwen2.5-VL-3B, 2 x 80 GB.
# Qwen2.5-VL-3B on GUI actions (where to tap, what to type) with GRPO, on two GPUs: 16 bytes per
# weight, about 30 GB on each.
# The data is GUI-R1 (arXiv:2504.10458), one file per split. Download it first:
#     hf download ritzzai/GUI-R1 train.parquet test.parquet --repo-type dataset --local-dir datasets/GUI-R1
# Its rows have an image, an instruction, a gt_bbox in fractions of the screen, a gt_action and a
# gt_input_text.
# Run from the top of the repository; appended key=value arguments take precedence:
#     bash examples/qwen2_5_vl_3b_android_gui_grpo.sh trainer.max_steps=10
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-VL-3B-Instruct}  # a hub id or a local folder
DATA=${DATA:-datasets/GUI-R1}

python3 -m trigon.trainer.main \
    config=examples/config.yaml \
    data.train_files="${DATA}/train.parquet" \
    data.val_files="${DATA}/test.parquet" \
    data.prompt_key=instruction \
    data.answer_key=gt_bbox \
    data.image_key=image \
    data.format_prompt=./examples/format_prompt/android_gui.jinja \
    data.max_response_length=1024 \
    data.rollout_batch_size=128 \
    data.max_pixels=1258291 \
    worker.actor.model.model_path="${MODEL_PATH}" \
    worker.rollout.n=8 \
    worker.reward.reward_function=./examples/reward_function/android_gui.py:compute_score \
    trainer.experiment_name=qwen2_5_vl_3b_android_gui_grpo \
    trainer.n_gpus_per_node=2 \
    "$@"
