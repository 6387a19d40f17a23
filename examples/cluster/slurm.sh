#!/usr/bin/env bash
# Trigon on several machines of a SLURM cluster: starts a Ray node on each, trains from the first,
# and stops all of them at the end.
#
#     export MODEL_PATH=/shared/models/Qwen2.5-VL-7B-Instruct RUNS=/shared/runs
#     sbatch --nodes=2 --gpus-per-node=8 examples/cluster/slurm.sh trainer.max_steps=100
#
# Submit from the top of the repository, in the environment in which Trigon is installed. Both must
# be on a disk that all machines share, and so must MODEL_PATH and RUNS. Options of sbatch come
# before the script, key=value after it. Running the same command again, or a requeue, resumes from
# the last checkpoint.
#SBATCH --job-name=trigon
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --output=trigon_%j.log
#SBATCH --open-mode=append
set -euo pipefail

MODEL_PATH=${MODEL_PATH:?set the model folder, on a disk that all machines share: export MODEL_PATH=/shared/models/...}
RUNS=${RUNS:?set the folder for runs, on a disk that all machines share: export RUNS=/shared/runs}
WAIT_SECONDS=${WAIT_SECONDS:-300} # how long to wait for the other machines

# This script runs on the first machine, whose address the others need. A host name is not enough:
# many machines resolve their own name to 127.0.1.1. If the first address is not the one of the
# network between the machines: export HEAD_ADDRESS=...
read -r first _ <<<"$(hostname --all-ip-addresses)"
head=${HEAD_ADDRESS:-$first}

# Ray executes code from anyone who has the token, so each job creates a new one. SLURM passes it to
# the machines of this job only.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(python3 -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN
export RAY_USAGE_STATS_ENABLED=0

start_ray() { # in the background; arguments: options of srun -- options of ray start
    local where=()
    while [[ $1 != -- ]]; do
        where+=("$1")
        shift
    done
    srun "${where[@]}" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
        ray start "${@:2}" --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="$SLURM_GPUS_ON_NODE" --block &
}

wait_for_nodes() {
    timeout "$WAIT_SECONDS" python3 - "$1" <<'WAIT' && return
import sys, time
import ray

ray.init(logging_level="ERROR", log_to_driver=False)  # waits for the head node
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]):
    time.sleep(1)
WAIT
    echo "Ray does not have $1 nodes at $RAY_ADDRESS after $WAIT_SECONDS s: see the messages of srun above" >&2
    exit 1
}

trap 'kill $(jobs -p)' EXIT # stops Ray on all machines
start_ray --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" -- --head --node-ip-address="$head" --port=6379
export RAY_ADDRESS=$head:6379
wait_for_nodes 1
others=$((SLURM_JOB_NUM_NODES - 1))
if ((others > 0)); then
    start_ray --nodes="$others" --ntasks="$others" --exclude="$SLURMD_NODENAME" -- --address="$RAY_ADDRESS"
    wait_for_nodes "$SLURM_JOB_NUM_NODES"
fi

trigon train examples/config.yaml \
    data.train_files=hiyouga/geometry3k@train \
    data.val_files=hiyouga/geometry3k@test \
    worker.actor.model.model_path="$MODEL_PATH" \
    trainer.save_checkpoint_path="$RUNS/qwen2_5_vl_7b_geo3k" \
    trainer.nnodes="$SLURM_JOB_NUM_NODES" \
    trainer.n_gpus_per_node="$SLURM_GPUS_ON_NODE" \
    "$@"
