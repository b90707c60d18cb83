#!/usr/bin/env bash
# timm's own train.py under torchrun, with one of this package's recipes:
#
#   scripts/train.sh RECIPE MODEL DATA [options of train.py ...]
#
#   RECIPE  a shipped one (timm-ortho recipe --list) or a YAML file of your own
#   MODEL   what trains by it: the recipe's model, or its sibling with another connection (vit_small_linear)
#   DATA    the data set's folder
#
# All GPUs of this machine train, on the CPU one process. The recipe's batch_size is that of all processes together:
# each takes its part, and of that again a part for each of --grad-accum-steps, unless --batch-size says otherwise.
# With --experiment NAME the same command again continues from its last checkpoint.
#
#   TIMM_DIR         the checkout of timm that has train.py; else the current folder
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT (29500)    several machines: the same command on each
#   NPROC_PER_NODE   processes on each machine, if not one for each GPU
#   PYTHON           python
#
# On Slurm: scripts/train.sbatch, with the same arguments.
exec "${PYTHON:-python}" "$(dirname "$0")/by_hand.py" "$@"
