#!/usr/bin/env bash
# Start timm's own train.py under torchrun, with one of this package's recipes:
#
#   scripts/train.sh RECIPE MODEL DATA [options of train.py ...]
#
#   RECIPE  the name of a shipped recipe (timm-ortho recipe --list), or a YAML file with options of train.py
#   MODEL   the recipe's model, or the same model with another connection (vit_small_linear)
#   DATA    the folder of the data set
#
# Training uses all GPUs of this machine, or one process on the CPU. The recipe's batch_size is the total of all
# processes. Unless --batch-size is set, it is divided by the number of processes, and amp and grad_accum_steps are
# chosen so that a step fits into the memory of a GPU. --gpu-memory GB replaces the memory of this machine's GPU.
# If an experiment is named, by --experiment or in the recipe, repeating the command continues from its last checkpoint.
#
#   TIMM_DIR         the folder of timm that has train.py (default: the current folder)
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT (default: 29500)    several machines; run the command on each of them
#   NPROC_PER_NODE   processes per machine (default: one per GPU)
#   PYTHON           the interpreter (default: python)
#
# On Slurm, submit scripts/train.sbatch with the same arguments.
exec "${PYTHON:-python}" "$(dirname "$0")/by_hand.py" "$@"
