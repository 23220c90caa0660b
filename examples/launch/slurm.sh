#!/bin/bash
# One torchrun agent on each node of a SLURM job:
#
#     sbatch examples/launch/slurm.sh examples/language/llama/pretrain.py --tp_size 8 --zero_stage 1 \
#         --checkpoints /shared/run-1
#
# Not run on a cluster. tests/examples/test_launch.py runs it with the variables that SLURM sets, on local processes.
#SBATCH --job-name=echelon
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Two minutes before the time is over: the pre-training example then saves, and the same command goes on from there.
#SBATCH --signal=TERM@120
set -euo pipefail

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head_node=${nodes%%$'\n'*}
processes=${SLURM_GPUS_ON_NODE:-1}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110 # seconds after SIGTERM in which a run may save; torchrun's default is 30
export OMP_NUM_THREADS=$((${SLURM_CPUS_PER_TASK:-$processes} / processes))

# The first node keeps the rendezvous. A job of its own port does not meet another job on the node.
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc_per_node "$processes" \
    --rdzv_backend c10d \
    --rdzv_id "$SLURM_JOB_ID" \
    --rdzv_endpoint "$head_node:$((20000 + SLURM_JOB_ID % 10000))" \
    "$@"
