#!/usr/bin/env bash
# SmolLM2-135M-Instruct, a CPU with two cores and 8 GiB of memory.
# A pretrained language model learns to answer sums of two one-digit numbers in \boxed{}, in a quarter of an
# hour on a laptop. docs/quickstart.md has the curve, and how to do it without a hub.
# Run from the top of the repository; appended key=value arguments take precedence:
#     bash examples/smollm2_135m_arithmetic.sh trainer.max_steps=10
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-HuggingFaceTB/SmolLM2-135M-Instruct}  # a hub id or a local folder
DATA=${DATA:-runs/arithmetic}

python3 examples/data_preprocess/arithmetic.py --local_dir "${DATA}"

python3 -m trigon train \
    data.train_files="${DATA}/train.jsonl" \
    data.val_files="${DATA}/validation.jsonl" \
    data.prompt_key=problem \
    data.answer_key=answer \
    data.format_prompt=./examples/format_prompt/arithmetic.jinja \
    data.max_prompt_length=96 \
    data.max_response_length=24 \
    data.rollout_batch_size=8 \
    algorithm.adv_estimator=grpo \
    algorithm.disable_kl=true \
    worker.actor.model.model_path="${MODEL_PATH}" \
    worker.actor.model.enable_gradient_checkpointing=false \
    worker.actor.fsdp.torch_dtype=fp32 \
    worker.actor.fsdp.mp_param_dtype=fp32 \
    worker.actor.global_batch_size=8 \
    worker.actor.optim.lr=2.0e-5 \
    worker.rollout.n=16 \
    worker.rollout.dtype=fp32 \
    worker.rollout.gpu_memory_utilization=0.1 \
    worker.rollout.val_override_config='{temperature: 1.0, n: 8}' \
    worker.reward.reward_function=./examples/reward_function/arithmetic.py:compute_score \
    trainer.device=cpu \
    trainer.max_steps=30 \
    trainer.val_freq=5 \
    trainer.save_freq=30 \
    trainer.logger='[console, file]' \
    trainer.project_name=trigon \
    trainer.experiment_name=smollm2_135m_arithmetic \
    trainer.save_checkpoint_path=runs/smollm2_135m_arithmetic \
    "$@"
