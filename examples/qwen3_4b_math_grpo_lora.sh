#!/usr/bin/env bash
# Qwen3-4B, 1 x 80 GB.
# Qwen3-4B on MATH (math12k: text only) with GRPO and LoRA, on one GPU. The learning rate of
# adapters is ten times that of full weights; the reference is the model without adapters, and needs
# no memory of its own.
# Run from the top of the repository; appended key=value arguments take precedence:
#     bash examples/qwen3_4b_math_grpo_lora.sh trainer.max_steps=10
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-4B}  # a hub id or a local folder

python3 -m trigon.trainer.main \
    config=examples/config.yaml \
    data.train_files=hiyouga/math12k@train \
    data.val_files=hiyouga/math12k@test \
    worker.actor.model.model_path="${MODEL_PATH}" \
    worker.actor.model.lora.rank=64 \
    worker.actor.model.lora.alpha=64 \
    worker.actor.optim.lr=1e-5 \
    trainer.experiment_name=qwen3_4b_math_grpo_lora \
    trainer.n_gpus_per_node=1 \
    "$@"
