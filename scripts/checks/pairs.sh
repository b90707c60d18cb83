#!/usr/bin/env bash
# Train the runs of a study on CIFAR-10 (docs/hypotheses.md, part three) that fit into a time limit on one GPU:
#
#   scripts/checks/pairs.sh STUDY OUT DATA [SEED ...]
#   DEVICE=cpu scripts/checks/pairs.sh STUDY OUT DATA    # a rehearsal: one seed at scale smoke
#
#   STUDY  cifar_vit_small (D1), cifar_resnet18_rates (the learning rates of D2), or cifar_resnet18 (D2, after these rates
#          were written into its file)
#   OUT    folder for the runs, their report and the log, without checkpoints
#   DATA   folder of CIFAR-10 with the name cifar10: class folders DATA/train and DATA/test
#   SEED   default: the study's seeds
#
# First, three epochs of each cell and connection are measured, with another seed. Then the runs of a seed are started only
# if all of them fit into the remaining time, seed by seed. The same command continues interrupted runs.
#
#   LIMIT     seconds for everything (default: 840)
#   PARALLEL  simultaneous runs (default: 2). Whether 2 is faster than 1 was not measured on a GPU
#   WORKERS   processes that decode the images (default: 8)
#   COMPILE   a backend of torch.compile, such as inductor (default: none)
#   WORK      folder of the runs with their checkpoints (default: OUT with the ending .work)
#   PYTHON    the interpreter (default: python, or python3)
set -uo pipefail

if [ $# -lt 3 ]; then
    sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0"
    exit 2
fi
study=$1
mkdir -p "$2" && out=$(cd "$2" && pwd) && data=$(cd "$3" && pwd) || exit 2
shift 3
seeds=("$@") device=${DEVICE:-cuda} limit=${LIMIT:-840} work=${WORK:-$out.work}
python=${PYTHON:-$(command -v python || command -v python3)}
cd "$(dirname "$0")/../.." || exit 2
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

scale=small
case $study in  # as in the study's file
    cifar_vit_small) epochs=300 planned=(300 301 302 303) ;;
    cifar_resnet18_rates) epochs=40 planned=(308 309) ;;
    cifar_resnet18) epochs=200 planned=(310 311 312 313) ;;
    *) echo "pairs.sh: there is no study '$study': choose cifar_vit_small, cifar_resnet18_rates or cifar_resnet18" >&2; exit 2 ;;
esac
[ ${#seeds[@]} -gt 0 ] || seeds=("${planned[@]}")
if [ "$device" = cpu ]; then
    scale=smoke epochs=1 seeds=("${seeds[0]}")
fi

train() {  # FOLDER SEED SECONDS OPTIONS...: train the runs of one seed
    local command=("$python" -m timm_ortho study run "$study" --scale "$scale" --device "$device" --dataset ''
        --data-dir "$data" --seeds "$2," --parallel "${PARALLEL:-2}" --output "$work/$1" -o "workers=${WORKERS:-8}"
        ${COMPILE:+-o "torchcompile=$COMPILE"} "${@:4}")
    echo "${command[*]}" >> "$out/log.txt"
    timeout --signal INT --kill-after 10 "$3" "${command[@]}" 2>&1 | tee -a "$out/log.txt" | grep -E '^\[|^timm-ortho:|^runs:'
    return "${PIPESTATUS[0]}"
}

collect() {
    [ -d "$work/$1" ] && tar -C "$work" --exclude '*.pth.tar' --exclude .lock -cf - "$1" | tar -C "$out" -xf -
}

began=$SECONDS
train measure 0 "$limit" -o epochs=3 -o warmup_epochs=0 || { echo "measuring failed, see $out/log.txt"; collect measure; exit 1; }
collect measure
# The last of three epochs counts. The rest of the time is for the start, the decoding and the compilation.
read -r epoch runs < <("$python" - "$work/measure" "$epochs" $((SECONDS - began)) "${PARALLEL:-2}" <<'PYTHON'
import csv, sys
from pathlib import Path

folder, epochs, wall, parallel = Path(sys.argv[1]), *map(int, sys.argv[2:])
seconds = {path.parent.name: [float(row["train_seconds"]) for row in csv.DictReader(open(path))]
           for path in sorted(folder.glob("*/summary.csv"))}
for name, values in seconds.items():
    print(f"{name}: {', '.join(f'{value:.2f}' for value in values)} s per epoch", file=sys.stderr)
last, measured = [values[-1] for values in seconds.values()], [sum(values) for values in seconds.values()]
wall_of = lambda seconds: max(max(seconds), sum(seconds) / parallel)
rest = max(0, wall - wall_of(measured))  # 0 if an earlier command has measured
print(f"{max(last):.2f} {rest + epochs * wall_of(last) * 1.05:.0f}")  # 5 % for checkpoints and noise
PYTHON
)
left=$((limit - SECONDS))
echo "== an epoch takes $epoch s, and the runs of a seed ($epochs epochs) about $runs s; $left s are left"

status=0 finished=0
for seed in "${seeds[@]}"; do
    left=$((limit - SECONDS - 10))
    if [ "$runs" -gt "$left" ]; then
        echo "== seed $seed: not started, because its runs need about $runs s and $left s are left"
        break
    fi
    if train runs "$seed" "$left"; then
        finished=$((finished + 1))
    else
        status=1
        echo "== seed $seed: FAILED or stopped, see $out/log.txt"
    fi
done
collect runs
echo "== seeds finished: $finished, in $SECONDS s; results in $out, checkpoints in $work"
exit "$status"
