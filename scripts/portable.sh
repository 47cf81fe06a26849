#!/usr/bin/env bash
# Runs the numerical tests with each ATen instruction set of this processor, with 1 and 2 threads, and prints a table
# of passed and failed tests. Arguments: default, avx2, avx512; an unknown one, or one that the processor lacks, is
# reported and skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh dev
unset ATEN_CPU_CAPABILITY
OWN=$(python -c 'import torch; print(torch.backends.cpu.get_cpu_capability().lower())')
case $OWN in
    default) HAS=(default) ;;
    avx512) HAS=(default avx2 avx512) ;;
    *) HAS=(default "$OWN") ;;
esac
[ $# -gt 0 ] || set -- default avx2 avx512
LOG=$(mktemp)
TABLE=$(printf '%10s' capability threads passed failed skipped seconds)
RUNS=0 FAILED=0
for capability; do
    if [[ " ${HAS[*]} " != *" $capability "* ]]; then
        echo "$capability: not an instruction set of this processor (${HAS[*]}). Skipped" >&2
        continue
    fi
    for threads in 1 2; do
        RUNS=$((RUNS + 1))
        ATEN_CPU_CAPABILITY=$capability OMP_NUM_THREADS=$threads pytest -q -n $((2 / threads)) --dist worksteal \
            tests/maths tests/model tests/scoring tests/estimators tests/stat_calculators | tee "$LOG" ||
            FAILED=$((FAILED + 1))
        row=("$capability" "$threads")
        for what in ' passed' ' (failed|error)' ' skipped' '(\.[0-9]+)?s\b'; do
            row+=("$(tail -1 "$LOG" | { grep -oE "\b[0-9]+$what" || true; } | awk '{n += $1} END {print n + 0}')")
        done
        TABLE+=$'\n'$(printf '%10s' "${row[@]}")
    done
done
rm "$LOG"
echo "$TABLE"
[ "$RUNS" -gt 0 ] && [ "$FAILED" -eq 0 ]
