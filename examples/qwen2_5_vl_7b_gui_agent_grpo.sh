#!/usr/bin/env bash
# Qwen2.5-VL-7B, 8 x 80 GB.
# Qwen2.5-VL-7B acts in the settings of a phone: it sees screenshots and taps, for up to six turns,
# with GRPO, on eight GPUs. The screens are drawn by gui/settings.py, which needs Pillow alone: write
# an environment of your own in its place (docs/agents.md). Make the tasks first:
#     python3 examples/gui/make.py --folder datasets/gui
# Run from the top of the repository; appended key=value arguments take precedence:
#     bash examples/qwen2_5_vl_7b_gui_agent_grpo.sh trainer.max_steps=10
#
# screenshots           420 x 700 pixels, both multiples of 28 and the area within data.min_pixels and
#                       data.max_pixels: the processor does not resize them, so that pixels are those
#                       that the model was trained to name. One is 375 tokens.
# response length       holds all turns: six times a screenshot, what the template writes around it,
#                       and max_turn_tokens.
# one update per step   no KL term, and truncated importance sampling, as in
#                       qwen2_5_vl_7b_geo3k_recommended.sh, where the reasons are.
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-VL-7B-Instruct}  # a hub id or a local folder
DATA=${DATA:-datasets/gui}

python3 -m trigon.trainer.main \
    config=examples/config.yaml \
    data.train_files="${DATA}/train.parquet" \
    data.val_files="${DATA}/test.parquet" \
    data.format_prompt=null \
    data.max_prompt_length=256 \
    data.max_response_length=4096 \
    data.rollout_batch_size=64 \
    algorithm.disable_kl=true \
    algorithm.mismatch_correction=truncate \
    algorithm.mismatch_level=token \
    algorithm.mismatch_high=2.0 \
    worker.actor.global_batch_size=64 \
    worker.actor.model.model_path="${MODEL_PATH}" \
    worker.actor.model.freeze_vision_tower=true \
    worker.rollout.environment=examples/gui/settings.py:Settings \
    worker.rollout.max_turns=6 \
    worker.rollout.max_turn_tokens=256 \
    worker.rollout.n=8 \
    worker.reward.reward_function=environment \
    trainer.total_epochs=2 \
    trainer.experiment_name=qwen2_5_vl_7b_gui_agent_grpo \
    trainer.n_gpus_per_node=8 \
    "$@"
