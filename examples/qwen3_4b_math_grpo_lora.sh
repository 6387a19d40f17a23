#!/usr/bin/env bash
# Qwen3-4B on the problems of MATH (math12k: text alone) by GRPO with LoRA, on one GPU. Adapters learn at ten times the rate of
# whole weights; the reference is the model without them, and costs no memory.
# Run from the top of the repository; further key=value arguments are passed on, and the last one counts:
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
