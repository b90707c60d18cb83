#!/usr/bin/env bash
# Check this checkout on one GPU, and measure it, in at most five minutes:
#
#   scripts/checks/gpu.sh OUT [PART ...]
#   DEVICE=cpu scripts/checks/gpu.sh OUT    # a rehearsal without a GPU: every part once, with tiny tensors
#
#   OUT   folder for the results. `bench_*.csv` are for model_cards/results; `python -m scripts.pages speed` reads them.
#         Each part has a folder with its log.
#   PART  default: all parts, in this order
#
#   correct   the tests with the mark `gpu`, and scripts/checks/fuzz.py, at the same time. Meanwhile, the models of the part
#             `compiled` are compiled once, which fills torch's cache of compiled code, and the node in C++ is built
#   eager     training and inference of models in bfloat16, with their peak memory
#   node      some of these models with the autograd function in C++; the rows stay in OUT/node
#   operator  bandwidths of the kernels
#   tiles     bandwidths with tiles of 2,048 elements instead of 512; the rows stay in OUT/tiles
#   compiled  the models under torch.compile, in bfloat16
#
# With a CUDA driver whose kernels do nothing (FAKE_CUDA, see CONTRIBUTING.md), the tensors are tiny too, and the part
# `correct` cannot fail.
#
# A part that fails or takes too long does not stop the next parts. A part may use the time that earlier parts left over,
# so a single part has nearly all five minutes. Benchmarks keep the rows that were finished in time. The exit status is 1
# if a test, a case of the fuzzer or a benchmark failed.
#
# Needed: torch, triton, timm, and pytest for the tests. No network.
#
#   PYTHON  the interpreter (default: python, or python3)
set -uo pipefail

device=${DEVICE:-cuda} python=${PYTHON:-$(command -v python || command -v python3)}
if [ $# -eq 0 ]; then
    sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0"
    exit 2
fi
mkdir -p "$1" && out=$(cd "$1" && pwd) || exit 2
shift
cd "$(dirname "$0")/../.." || exit 2
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

parts=("$@")
all=(correct eager node operator tiles compiled)
[ ${#parts[@]} -gt 0 ] || parts=("${all[@]}")
declare -A limits=([correct]=60 [eager]=80 [node]=30 [operator]=45 [tiles]=15 [compiled]=65)  # seconds, together 295
for part in "${parts[@]}"; do
    [ -n "${limits[$part]:-}" ] || { echo "unknown part '$part', known are: ${all[*]}" >&2; exit 2; }
done

vit_s=vit_small_patch16_224_ortho vit_b=vit_base_patch16_224_ortho resnet=resnetv2_50_ortho
if [ "$device" = cpu ] || [ -n "${FAKE_CUDA:-}" ]; then
    total=540 fuzz=(--device "$device" --seconds 5)
    small=(-b 2 --img-size 32 --repeats 1)
    models=("$vit_s" "$resnet")
    compiled=(vit_small_ortho --model-kwargs depth=1 embed_dim=32 num_heads=2) node=("${compiled[@]}")
    shapes=(2x5x16 2x16x4x4) repeats=1
    card=$device
else
    total=295 fuzz=(--device "$device" --seconds 25 --jobs 6)
    small=()
    # without a suffix: _ortho and _orthog
    models=("${vit_s%_ortho}:128" "${resnet%_ortho}:128" "$vit_s:256" "$vit_b:128" "$vit_s:32")
    node=("$vit_s:32" "$vit_s:128" "$resnet:128")
    compiled=("$vit_s:256" "$resnet:128" "$vit_b:128" "$vit_s:128")
    shapes=(256x197x384 256x197x768 256x197x1280 128x256x56x56 128x1024x14x14 128x2048x7x7) repeats=5
    card=$("$python" -c 'import torch; print(torch.cuda.get_device_name().lower().replace(" ", "_"))') || exit 1
fi

failed=() summary=() module=(-m timm_ortho)
with_tile="from timm_ortho import cli; from timm_ortho.update import plan as planning; planning.TILE = 2048; exit(cli.main())"

note() {  # TEXT: keep a line for the end
    summary+=("$1")
    echo "== $1"
}

seconds_for() {  # PART: print the seconds for this part, all that the later parts do not need
    local rest=$((total - SECONDS)) later=0 part
    for part in "${parts[@]}"; do
        if [ $later = 1 ]; then rest=$((rest - limits[$part])); fi
        if [ "$part" = "$1" ]; then later=1; fi
    done
    echo "$rest"
}


bench() {  # PART NAME SECONDS OPTIONS...: measure, and copy the rows to OUT/bench_NAME_CARD.csv unless NAME is empty
    local part=$1 name=$2 folder="$out/$1" began=$SECONDS status=0 rows=0
    local command=("$python" "${module[@]}" bench --device "$device" --output "$folder" "${@:4}" "${small[@]}")
    mkdir -p "$folder"
    rm -f "$folder/bench.csv"
    echo "${command[*]}" > "$folder/log.txt"
    timeout --signal INT --kill-after 5 "$(($3 - 5))" "${command[@]}" >> "$folder/log.txt" 2>&1 || status=$?
    if [ -f "$folder/bench.csv" ]; then
        [ -z "$name" ] || cp "$folder/bench.csv" "$out/bench_${name}_$card.csv"
        rows=$(($(wc -l < "$folder/bench.csv") - 1))
    fi
    case $status in
        0) note "$part: $rows rows in $((SECONDS - began)) s" ;;
        124 | 130 | 137) note "$part: stopped after $((SECONDS - began)) s with $rows rows" ;;
        *)
            tail -n 5 "$folder/log.txt"
            note "$part: FAILED with status $status and $rows rows, see $folder/log.txt" ;;
    esac
    [[ $status =~ ^(0|124|130|137)$ && $rows -gt 0 ]] || failed+=("$part")
}

correct() {  # SECONDS
    # bash ignores SIGINT in background jobs, so these get SIGTERM
    local status files tests='' folder="$out/correct" limit=(timeout --kill-after 5 "$(($1 - 5))")
    mkdir -p "$folder"
    "${limit[@]}" "$python" -m timm_ortho bench --device "$device" --what models --models "${compiled[@]}" \
        --dtypes bfloat16 --modes compiled --repeats 1 --output "$folder/compile" "${small[@]}" \
        > "$folder/compile.txt" 2>&1 &
    local compiles=$!
    "${limit[@]}" "$python" -m scripts.checks.fuzz "${fuzz[@]}" > "$folder/fuzz.txt" 2>&1 &
    local fuzzes=$!
    "$python" -c 'from timm_ortho.update import node; node.extension()' > "$folder/node.txt" 2>&1 &
    if "$python" -c 'import pytest' 2> "$folder/tests.txt"; then
        mapfile -t files < <(grep -rl --include='*.py' 'pytest\.mark\.gpu' tests)
        # addopts in pyproject.toml needs pytest-xdist
        "${limit[@]}" "$python" -m pytest -o addopts= -p no:benchmark -p no:cacheprovider -m gpu -q -rfEs "${files[@]}" \
            > "$folder/tests.txt" 2>&1 &
        tests=$!
    fi
    if [ -n "$tests" ]; then
        wait "$tests"; status=$?
        [ $status = 0 ] || { failed+=(tests); tail -n 40 "$folder/tests.txt"; }
        note "tests: status $status, $(tail -n 1 "$folder/tests.txt")"
    else
        note "tests: not run, because pytest is not installed"
    fi
    wait "$fuzzes"; status=$?
    [ $status = 0 ] || { failed+=(fuzz); tail -n 40 "$folder/fuzz.txt"; }
    note "fuzz: status $status, $(tail -n 1 "$folder/fuzz.txt")"
    [ -z "${FAKE_CUDA:-}" ] || failed=()  # results are not computed
    # the benchmarks must not share the GPU
    kill "$compiles" 2> /dev/null
    wait "$compiles"
}

for part in "${parts[@]}"; do
    seconds=$(seconds_for "$part")
    if [ "$seconds" -lt 15 ]; then
        note "$part: not run, because only $seconds s were left"
        failed+=("$part")
        continue
    fi
    case $part in
        correct) correct "$seconds" ;;
        eager) bench eager models_eager "$seconds" --what models --models "${models[@]}" --dtypes bfloat16 \
            --modes eager --repeats 10 ;;
        node) TIMM_ORTHO_CPP=1 bench node "" "$seconds" --what models --models "${node[@]}" --dtypes bfloat16 \
            --modes eager --repeats 10 ;;
        operator) bench operator operator "$seconds" --what operator --shapes "${shapes[@]}" --dtypes bfloat16 mixed \
            --no-compile --repeats "$repeats" ;;
        tiles)
            module=(-c "$with_tile")
            bench tiles "" "$seconds" --what operator --shapes "${shapes[@]:0:2}" --dtypes bfloat16 \
                --no-compile --repeats "$repeats"
            module=(-m timm_ortho) ;;
        compiled) bench compiled models_compiled "$seconds" --what models --models "${compiled[@]}" --dtypes bfloat16 \
            --modes compiled --repeats 10 ;;
    esac
done

printf '%s\n' "${summary[@]}" > "$out/summary.txt"
echo "== $card, $SECONDS s; results in $out"
[ ${#failed[@]} = 0 ] || { echo "FAILED: ${failed[*]}"; exit 1; }
