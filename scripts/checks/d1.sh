#!/usr/bin/env bash
# Train the pairs of hypothesis D1 (docs/hypotheses.md, study cifar_vit_small) that fit into a time limit on one GPU:
#
#   scripts/checks/d1.sh OUT DATA [SEED ...]
#   DEVICE=cpu scripts/checks/d1.sh OUT DATA    # a rehearsal: one pair at scale smoke
#
#   OUT   folder for the runs, their report and the log, without checkpoints
#   DATA  folder of CIFAR-10: class folders DATA/train and DATA/test
#   SEED  default: 300 301 302 303
#
# First, three epochs of both connections are measured, with another seed. Then a pair is started only if it fits into the
# remaining time. Pairs are trained in the order of their seeds. The same command continues an interrupted pair.
#
#   LIMIT     seconds for everything (default: 840)
#   PARALLEL  simultaneous runs (default: 2). Whether 2 is faster than 1 was not measured on a GPU
#   WORKERS   processes that decode the images (default: 8)
#   COMPILE   a backend of torch.compile, such as inductor (default: none)
#   WORK      folder of the runs with their checkpoints (default: OUT with the ending .work)
#   PYTHON    the interpreter (default: python)
set -uo pipefail

if [ $# -lt 2 ]; then
    sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0"
    exit 2
fi
mkdir -p "$1" && out=$(cd "$1" && pwd) && data=$(cd "$2" && pwd) || exit 2
shift 2
seeds=("$@") device=${DEVICE:-cuda} python=${PYTHON:-python} limit=${LIMIT:-840} work=${WORK:-$out.work}
[ ${#seeds[@]} -gt 0 ] || seeds=(300 301 302 303)
cd "$(dirname "$0")/../.." || exit 2
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

scale=small epochs=300
if [ "$device" = cpu ]; then
    scale=smoke epochs=1 seeds=("${seeds[0]}")
fi

study() {  # FOLDER SEED SECONDS OPTIONS...: train one pair
    local command=("$python" -m timm_ortho study run cifar_vit_small --scale "$scale" --device "$device" --dataset ''
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
study measure 0 "$limit" -o epochs=3 -o warmup_epochs=0 || { echo "measuring failed, see $out/log.txt"; collect measure; exit 1; }
collect measure
# the last of three epochs, of the slower connection; the rest of the time is the start, the decoding and the compilation
read -r epoch pair < <("$python" - "$work/measure" "$epochs" $((SECONDS - began)) "${PARALLEL:-2}" <<'PYTHON'
import csv, sys
from pathlib import Path

folder, epochs, wall, parallel = Path(sys.argv[1]), *map(int, sys.argv[2:])
seconds = {path.parent.name: [float(row["train_seconds"]) for row in csv.DictReader(open(path))]
           for path in sorted(folder.glob("*/summary.csv"))}
for name, values in seconds.items():
    print(f"{name}: {', '.join(f'{value:.2f}' for value in values)} s per epoch", file=sys.stderr)
last, all_epochs = ([fold(values) for values in seconds.values()] for fold in (lambda values: values[-1], sum))
fold = max if parallel > 1 else sum
print(f"{max(last):.2f} {wall - fold(all_epochs) + epochs * fold(last) * 1.05:.0f}")  # 5 % for checkpoints and noise
PYTHON
)
left=$((limit - SECONDS))
echo "== an epoch takes $epoch s, a pair of $epochs epochs about $pair s; $left s are left, so $((left / (pair > 0 ? pair : 1))) pairs fit"

status=0 finished=0
for seed in "${seeds[@]}"; do
    left=$((limit - SECONDS - 10))
    if [ "$pair" -gt "$left" ]; then
        echo "== seed $seed: not started, because a pair needs about $pair s and $left s are left"
        break
    fi
    if study runs "$seed" "$left"; then
        finished=$((finished + 1))
    else
        status=1
        echo "== seed $seed: FAILED or stopped, see $out/log.txt"
    fi
done
collect runs
echo "== $finished pairs finished in $SECONDS s; results in $out, checkpoints in $work"
exit "$status"
