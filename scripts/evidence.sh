#!/usr/bin/env bash
# Measures one real model, cell by cell and shard by shard, and keeps a small table of each shard.
#
#   scripts/evidence.sh MODEL DATA OUT [CELL ...]
#
# MODEL is a folder that transformers loads (with a single .gguf file in it, that file), or
# `smollm2`. DATA holds xquad.en.json and babi_qa1_test.txt (bAbI task 1, English 1K, test). Under
# OUT, runs/ is large and can be thrown away, shards/CELL/RUN/ has a table of each finished shard, and
# CELL.RUN.parquet all of them: what the pages of evidence are made from (scripts/evidence.py). A finished shard is not run again, a cut off one goes
# on where its journal ends. ROWS=200 asks fewer rows of every cell, SHARDS=20 makes shards smaller.
# RUNS names what is scored: `sources` (ASMI by source, and what costs no further pass; the first
# run, whose answers the others take), `baselines`, `whole` (masks at every position), `paper` (p = 0.15 and S = 40).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=$1 data=$(realpath "$2") out=$(realpath -m "$3")
shift 3
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

case $model in
  smollm2) options=(model=asmi_smollm2) ;;
  *)
    options=(model=asmi_local "model.path=$(realpath "$model")")
    for file in "$model"/*.gguf; do
      [ -e "$file" ] && options+=("model.gguf_file=$(basename "$file")")
    done
    ;;
esac
[ -d "$out/babi" ] || python "$here/build_babi.py" "$data/babi_qa1_test.txt" "$out/babi"
unseen="data.except_limit=150" # rows of docs/evidence/source-plan.md
squad="data.source=$data/xquad.en.json $unseen"
worked="data.prompt_style=demo" # four worked questions first

# Overrides of a cell: data set and prompt.
cell() {
  case $1 in
    open) echo "benchmark=asmi_squad $squad data.limit=${ROWS:-500}" ;;
    open-worked) echo "benchmark=asmi_squad $squad $worked data.limit=${ROWS:-500}" ;;
    closed) echo "benchmark=asmi_squad_closed_book $squad data.limit=${ROWS:-250}" ;;
    closed-worked) echo "benchmark=asmi_squad_closed_book $squad $worked data.limit=${ROWS:-250}" ;;
    babi) echo "benchmark=asmi_babiqa data.source=$out/babi data.limit=${ROWS:-300}" ;;
    *) echo "no cell $1: open, open-worked, closed, closed-worked, babi" >&2 && return 1 ;;
  esac
}

# One shard of one run of a cell: run SHARD CELL RUN OVERRIDE ...
run() {
  local shard=$1 name=$2 kind=$3 folder
  shift 3
  folder=$out/runs/$name/$kind/$shard
  local kept=$out/shards/$name/$kind/$shard.parquet
  [ -e "$kept" ] && return
  # shellcheck disable=SC2046
  polygraph_eval --config-name asmi_offline "${options[@]}" $(cell "$name") \
    data.num_shards="${SHARDS:-10}" data.shard="$shard" asmi.calculator.scope=response \
    asmi.journal="$out/journal" hydra.run.dir="$folder" "$@"
  python "$here/evidence.py" "$folder" "$kept"
}

for name in "${@:-open}"; do
  cell "$name" >/dev/null
  for ((shard = 0; shard < ${SHARDS:-10}; shard++)); do
    for kind in ${RUNS:-sources}; do
      again=asmi.answers=$out/runs/$name/sources/$shard
      lean=(estimators=asmi_only output_attentions=false)
      case $kind in
        sources) options_of_run=(estimators=asmi_context output_attentions=false
          "asmi.calculator.source=[all,context]" asmi.calculator.without_context=true) ;;
        baselines) options_of_run=("$again") ;;
        whole) options_of_run=("$again" "${lean[@]}" asmi.calculator.scope=all) ;;
        paper) options_of_run=("$again" "${lean[@]}" asmi.calculator.{mask_rate=0.15,num_masks=40}) ;;
        *) echo "no run $kind: sources, baselines, whole, paper" >&2 && exit 1 ;;
      esac
      [[ $name == closed* && $kind == sources ]] && # no passage, no source
        options_of_run=(estimators=asmi_free output_attentions=false)
      run "$shard" "$name" "$kind" "${options_of_run[@]}"
    done
  done
  for kind in ${RUNS:-sources}; do
    python "$here/evidence.py" "$out/shards/$name/$kind" "$out/$name.$kind.parquet"
  done
done
