#!/bin/bash
# Trains on eight nodes with eight GPUs each, and requeues a lost run (docs/pods.md).
#SBATCH --nodes=8 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=32
#SBATCH --requeue --open-mode=append --signal=TERM@120
srun --kill-on-bad-exit=0 dlm-train --distributed --config accelerator_150m --mesh.fsdp 8 \
    --data.source /scratch/corpora/web --data.tokenizer corpus \
    --train.out_dir /scratch/runs/150m
code=$?
case $code in 134|143) scontrol requeue "$SLURM_JOB_ID" ;; esac
exit $code
