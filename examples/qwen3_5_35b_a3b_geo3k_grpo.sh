#!/usr/bin/env bash
# Qwen3.5-35B-A3B, 8 x 80 GB.
# Qwen3.5-35B-A3B on Geometry3K with GRPO, on eight GPUs, in bfloat16: 12 bytes per weight, about 53 GB
# on each, and by arithmetic 60 GiB in an update. An MoE model: each token uses 3 of 35 billion
# weights, and all of them are trained. Three of four layers are linear attention: install its
# kernels first,
#     pip install flash-linear-attention
# Run from the top of the repository; appended key=value arguments take precedence:
#     bash examples/qwen3_5_35b_a3b_geo3k_grpo.sh trainer.max_steps=10
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3.5-35B-A3B}  # a hub id or a local folder

python3 -m trigon.trainer.main \
    config=examples/config.yaml \
    data.train_files=hiyouga/geometry3k@train \
    data.val_files=hiyouga/geometry3k@test \
    worker.actor.model.model_path="${MODEL_PATH}" \
    worker.actor.fsdp.torch_dtype=bf16 \
    worker.actor.optim.strategy=adamw_bf16 \
    worker.rollout.tensor_parallel_size=8 \
    trainer.experiment_name=qwen3_5_35b_a3b_geo_grpo \
    trainer.n_gpus_per_node=8 \
    "$@"
