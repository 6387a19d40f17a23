#!/usr/bin/env bash
# Qwen3.5-9B, 1 x 80 GB.
# Qwen3.5-9B on Geometry3K with GRPO and LoRA, on one GPU: about 49 GiB while it samples, 26 GiB in an
# update. All linear layers of the language model have adapters, those of linear attention too; the
# vision tower has none and is frozen. The learning rate of adapters is ten times that of full
# weights; the reference is the model without adapters, and needs no memory of its own. Install the
# kernels of linear attention first:
#     pip install flash-linear-attention
# Run from the top of the repository; appended key=value arguments take precedence:
#     bash examples/qwen3_5_9b_geo3k_grpo_lora.sh trainer.max_steps=10
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3.5-9B}  # a hub id or a local folder

python3 -m trigon.trainer.main \
    config=examples/config.yaml \
    data.train_files=hiyouga/geometry3k@train \
    data.val_files=hiyouga/geometry3k@test \
    worker.actor.model.model_path="${MODEL_PATH}" \
    worker.actor.model.lora.rank=64 \
    worker.actor.model.lora.alpha=64 \
    'worker.actor.model.lora.exclude_modules=.*visual.*' \
    worker.actor.optim.lr=1e-5 \
    trainer.experiment_name=qwen3_5_9b_geo_grpo_lora \
    trainer.n_gpus_per_node=1 \
    "$@"
