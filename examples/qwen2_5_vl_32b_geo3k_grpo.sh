#!/usr/bin/env bash
# Qwen2.5-VL-32B, 8 x 80 GB.
# Qwen2.5-VL-32B on Geometry3K with GRPO, on eight GPUs of 80 GB, in bfloat16: 12 bytes per weight,
# about 50 GB on each, plus activations. Optimizer and weights are in host memory while completions
# are sampled with tensor parallelism over all eight GPUs.
# Run from the top of the repository; appended key=value arguments take precedence:
#     bash examples/qwen2_5_vl_32b_geo3k_grpo.sh trainer.max_steps=10
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-VL-32B-Instruct}  # a hub id or a local folder

python3 -m trigon.trainer.main \
    config=examples/config.yaml \
    data.train_files=hiyouga/geometry3k@train \
    data.val_files=hiyouga/geometry3k@test \
    worker.actor.model.model_path="${MODEL_PATH}" \
    worker.actor.fsdp.torch_dtype=bf16 \
    worker.actor.optim.strategy=adamw_bf16 \
    worker.rollout.tensor_parallel_size=8 \
    trainer.experiment_name=qwen2_5_vl_32b_geo_grpo \
    trainer.n_gpus_per_node=8 \
    "$@"
