#!/usr/bin/env bash
# Qwen2.5-VL-7B, 8 x 80 GB.
# Qwen2.5-VL-7B on Geometry3K with GRPO, on eight GPUs, from local files. Prepare them first:
#     python3 examples/data_preprocess/geo3k.py --local_dir ~/data/geo3k
# The settings are those of verl's script of this name, with Trigon's keys.
# Run from the top of the repository; appended key=value arguments take precedence:
#     bash examples/grpo_trainer/run_qwen2_5_vl-7b.sh trainer.max_steps=10
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-VL-7B-Instruct}  # a hub id or a local folder
DATA=${DATA:-${HOME}/data/geo3k}

python3 -m trigon.trainer.main \
    config=examples/config.yaml \
    data.train_files="${DATA}/train.parquet" \
    data.val_files="${DATA}/test.parquet" \
    data.max_prompt_length=1024 \
    data.max_response_length=2048 \
    data.rollout_batch_size=512 \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_loss=true \
    algorithm.kl_penalty=low_var_kl \
    algorithm.kl_coef=0.01 \
    worker.actor.model.model_path="${MODEL_PATH}" \
    worker.actor.global_batch_size=128 \
    worker.actor.micro_batch_size_per_device_for_update=10 \
    worker.actor.micro_batch_size_per_device_for_experience=20 \
    worker.actor.optim.lr=1e-6 \
    worker.actor.offload.offload_params=false \
    worker.actor.offload.offload_optimizer=false \
    worker.rollout.n=5 \
    worker.rollout.tensor_parallel_size=2 \
    worker.rollout.gpu_memory_utilization=0.6 \
    trainer.total_epochs=15 \
    trainer.val_freq=5 \
    trainer.save_freq=20 \
    trainer.project_name=verl_grpo_example_geo3k \
    trainer.experiment_name=qwen2_5_vl_7b_function_rm \
    trainer.n_gpus_per_node=8 \
    "$@"
