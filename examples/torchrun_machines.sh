#!/bin/sh
# Trains examples/train_gpt.py on several machines without a scheduler. Run on each of them:
#
#     examples/torchrun_machines.sh MACHINES FIRST_MACHINE PROCESSES_PER_MACHINE [options]
#
# for example, on two machines with 8 GPUs each, a pipeline of 16 stages:
#
#     examples/torchrun_machines.sh 2 host0 8 --stages 16 --checkpoint /shared/run
#
# With --checkpoint in a folder that all machines see, a run whose process was killed goes on by
# itself, up to three times (--max-restarts).
set -eu

if [ $# -lt 3 ]; then
    sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
machines=$1
first=$2
processes=$3
shift 3
cd "$(dirname "$0")"
exec torchrun \
    --nnodes "$machines" \
    --nproc-per-node "$processes" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$first:29500" \
    --rdzv-id "${RUN:-train_gpt}" \
    --max-restarts 3 \
    train_gpt.py "$@"
