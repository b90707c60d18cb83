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
set -euo pipefail

python=${PYTHON:-python}
die() { printf 'train.sh: %s\n' "$*" >&2; exit 2; }
note() { printf 'train.sh: %s\n' "$*" >&2; }

[[ $# -ge 3 ]] || die "usage: scripts/train.sh RECIPE MODEL DATA [options of train.py ...]"
recipe=$1 model=$2 data=$3
shift 3

# importlib.metadata, not timm.__version__: in a checkout's folder `import timm` is the checkout's
installed=$("$python" -c 'import importlib.metadata as m; print(m.version("timm"))' 2> /dev/null) \
    || die "$python has no timm: activate the environment that has it, or name its python in PYTHON"
tag=v$installed
[[ $installed != *.dev* ]] || tag=main  # installed from the repository
fetch="that of timm $installed:
git clone --depth 1 --branch $tag https://github.com/huggingface/pytorch-image-models \
&& export TIMM_DIR=\$PWD/pytorch-image-models"

# ---------------------------------------------------------------------------------------------- train.py
find_script() {  # sets $script
    local folder=${TIMM_DIR:-.}
    script=$folder/train.py
    [[ -f $script ]] \
        || die "there is no train.py in ${TIMM_DIR:-this folder, and TIMM_DIR is not set}; $fetch"
    grep -q -e --device-modules "$script" \
        || die "$script is not timm's, or older than its option --device-modules; $fetch"
}

# A checkout between two releases calls itself the next one with .dev0: 1.0.32.dev0 fits 1.0.31 and 1.0.32.
fits() {
    local a=${1%.dev*} b=${2%.dev*}
    [[ $a == "$b" ]] && return
    [[ ${a%.*} == "${b%.*}" ]] || return 1
    [[ $1 == *.dev* && ${a##*.} -eq $((${b##*.} + 1)) ]] || [[ $2 == *.dev* && ${b##*.} -eq $((${a##*.} + 1)) ]]
}

check_version() {
    local file checkout
    file=$(dirname "$script")/timm/version.py
    if [[ ! -f $file ]]; then
        note "$script has no timm/ beside it: its version is not checked, timm $installed is used"
        return
    fi
    checkout=$(sed -n "s/^__version__ = ['\"]\(.*\)['\"].*/\1/p" "$file")
    fits "$checkout" "$installed" \
        || die "$script is of timm ${checkout:-unknown}, but timm $installed is installed; $fetch"
}

# -------------------------------------------------------------------------------------------- processes
given() {  # whether one of the names of an option of train.py is among the arguments; sets $value to its last value
    local names=$1 previous="" word name found=1
    shift
    for word in "$@"; do
        for name in $names; do
            [[ $previous == "$name" ]] && value=$word found=0
            [[ $word == "$name="* ]] && value=${word#*=} found=0
            [[ $name == -? && $word == "$name"?* ]] && value=${word#"$name"} found=0
        done
        previous=$word
    done
    return $found
}

count_processes() {  # sets $nodes, $each, $gpus
    gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
    nodes=${NNODES:-1}
    each=${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 1))}
    [[ $nodes =~ ^[1-9][0-9]*$ ]] || die "NNODES is '$nodes', but must be a number"
    [[ $each =~ ^[1-9][0-9]*$ ]] || die "NPROC_PER_NODE is '$each', but must be a number"
    if ((nodes > 1)); then
        [[ -n ${NODE_RANK:-} && -n ${MASTER_ADDR:-} ]] \
            || die "NNODES is $nodes: set NODE_RANK (0 to $((nodes - 1)), one on each) and MASTER_ADDR (that of 0)"
    fi
    if ((gpus == 0 && nodes * each > 1)); then
        die "PyTorch sees no GPU here, and timm's train.py trains in several processes on GPUs only"
    fi
}

batch_size() {  # of the recipe, as timm would read it
    "$python" -c 'import sys, yaml; print(yaml.safe_load(open(sys.argv[1])).get("batch_size", 128))' "$recipe_file"
}

divide_batch() {  # adds to $command
    local whole parts value
    given "-b --batch-size" "$@" && return
    given --grad-accum-steps "$@" || value=1
    [[ $value =~ ^[1-9][0-9]*$ ]] || die "--grad-accum-steps is '$value', but must be a number"
    parts=$((nodes * each * value))
    whole=$(batch_size)
    ((whole % parts == 0)) || die "the recipe's batch of $whole does not divide into $parts equal parts \
(processes $((nodes * each)), --grad-accum-steps $value): choose others, or give --batch-size"
    ((parts == 1)) || command+=(--batch-size $((whole / parts)))
}

resume() {  # adds to $command: a run that has a checkpoint goes on from it
    local value output
    given --resume "$@" && return
    given --experiment "$@" || return 0
    local experiment=$value
    given --output "$@" || value=output/train
    output=$value/$experiment/last.pth.tar
    [[ ! -f $output ]] || command+=(--resume "$output")
}

# ------------------------------------------------------------------------------------------------- main
find_script
check_version
if [[ -f $recipe ]]; then
    recipe_file=$recipe
else
    recipe_file=$("$python" -m timm_ortho recipe --path "$recipe") || exit 2  # it has said why
fi
count_processes
if ((nodes > 1)); then
    launch=(--nnodes "$nodes" --nproc-per-node "$each" --node-rank "$NODE_RANK"
            --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
else
    launch=(--standalone --nproc-per-node "$each")
fi
command=(torchrun "${launch[@]}" "$script" -c "$recipe_file" --model "$model" --data-dir "$data")
divide_batch "$@"
resume "$@"
((gpus > 0)) || given --device "$@" || command+=(--device cpu)
command+=("$@")
note "$(printf '%q ' "${command[@]}")"
exec "${command[@]}"
