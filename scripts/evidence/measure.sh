#!/usr/bin/env bash
# Measures real models, setting by setting and shard by shard, and keeps a small table of each shard.
#
#   scripts/evidence/measure.sh MODEL DATA OUT [SETTING ...] [-- OVERRIDE ...]     # one model in a folder
#   scripts/evidence/measure.sh --paper OUT [BACKBONE/BENCHMARK ...] [-- OVERRIDE ...]
#
# MODEL is a folder that transformers loads (with a single .gguf file in it, that file), or
# `smollm2`. DATA holds xquad.en.json and babi_qa1_test.txt (bAbI task 1, English 1K, test). Under
# OUT, runs/ is large and can be thrown away, shards/SETTING/RUN/ has a table of each finished shard, and
# SETTING.RUN.parquet all of them: what the pages of evidence are made from (scripts/evidence/keep.py). A
# finished shard is not run again; an interrupted one resumes from its result cache. ROWS=200 runs fewer
# rows of every setting, SHARDS=20 makes shards smaller, SHARD=3 runs only that one: on a machine of
# its own, or to save time.
# RUNS names what is scored: `sources` (ASMI and scores without further passes, in the committed tables also
# by source of the heads' input, which commit d661c7c could still compute; the first run, whose answers the others score), `baselines`, `sampled` (Adapt-ASMI and baselines that sample),
# `scope_all` (masks at every position), `paper` (p = 0.15 and S = 40), `depths` (60 to 90 %), `balanced`
# (masks that mask every head equally often), `heads` (300 masks, two depths), and the control conditions of the
# perturbation controls, `pseudo_heads`, `foreign`, `isotropic`, `mlp`, `mlp_noise`, at the effect of heads; their
# scales are matched on other rows and kept in SETTING.scales.json. `deeper` generates new answers (70 and 90 %,
# docs/evidence/depth-plan.md). Run `tables` last: all shards joined, the
# causal probe where there are `heads` (TOKENS=200 of each group), and the report's tables in
# SETTING.tables/.
#
# --paper runs the shipped configs of the paper's 16 settings, or those named, on a machine with a GPU
# and a hub: OUT/BACKBONE/BENCHMARK.benchmark.parquet, shards and runs beside it. It stops at the
# first setting that fails, such as a gated model; name the others to continue without it.
#
# Arguments after -- go to every run, as Hydra overrides: -- nli_path=FOLDER.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

hub=
if [ "${1:-}" = --paper ]; then
  hub=yes
  shift
else
  model=$1 data=$(realpath "$2")
  shift 2
fi
out=$(realpath -m "$1")
shift
asked=() more=() before=()
while [ $# -gt 0 ]; do
  [ "$1" = -- ] && shift && more=("$@") && break
  asked+=("$1") && shift
done

# One shard of one run of a setting: run SHARD SETTING RUN OVERRIDE ...
run() {
  local shard=$1 name=$2 kind=$3 folder
  shift 3
  folder=$out/runs/$name/$kind/$shard
  local kept=$out/shards/$name/$kind/$shard.parquet
  [ -e "$kept" ] && return
  polygraph_eval "$@" \
    data.num_shards="${SHARDS:-10}" data.shard="$shard" \
    asmi.result_cache="$out/result_cache" hydra.run.dir="$folder" "${more[@]}"
  python "$here/keep.py" "$folder" "$kept" "${before[@]}"
}

# The shards of a run of a setting together: join SETTING RUN
join() {
  python "$here/keep.py" "$out/shards/$1/$2" "$out/$1.$2.parquet"
}

if [ -n "$hub" ]; then
  settings=()
  for backbone in qwen3_4b_base qwen3_8b_base llama2_7b mistral_7b; do
    for benchmark in coqa squad babiqa triviaqa; do
      settings+=("$backbone/$benchmark")
    done
  done
  for name in "${asked[@]}"; do
    [[ " ${settings[*]} " == *" $name "* ]] || {
      echo "no setting $name: ${settings[*]}" >&2
      exit 1
    }
  done
  all=$out
  for name in "${asked[@]:-${settings[@]}}"; do
    out=$all/${name%/*} benchmark=${name#*/}
    for shard in ${SHARD:-$(seq 0 $((${SHARDS:-10} - 1)))}; do
      run "$shard" "$benchmark" benchmark --config-name asmi_benchmark \
        "model=asmi_${name%/*}" "benchmark=asmi_$benchmark" ${ROWS:+data.limit="$ROWS"}
    done
    join "$benchmark" benchmark
  done
  exit
fi

export HF_HUB_OFFLINE=1
case $model in
  smollm2) options=(model=asmi_smollm2) named=(--model smollm2) ;;
  *)
    options=(model=asmi_local "model.path=$(realpath "$model")") named=(--model "$(realpath "$model")")
    for file in "$model"/*.gguf; do
      [ -e "$file" ] && options+=("model.gguf_file=$(basename "$file")") named+=(--gguf-file "$(basename "$file")")
    done
    ;;
esac
[ -d "$out/babi" ] || python "$here/../build_babi.py" "$data/babi_qa1_test.txt" "$out/babi"
unseen="data.except_limit=150" # rows of docs/evidence/source-plan.md
squad="data.source=$data/xquad.en.json $unseen"
few_shot="data.prompt_style=demo" # 4-shot
# With the model's chat template, answers are sentences: a higher limit of tokens.
chat="instruct=true max_new_tokens=40"

# Overrides of a setting: data set and prompt.
setting() {
  case $1 in
    xquad) echo "benchmark=asmi_squad $squad data.limit=${ROWS:-500}" ;;
    xquad-few-shot) echo "benchmark=asmi_squad $squad $few_shot data.limit=${ROWS:-500}" ;;
    xquad-chat) echo "benchmark=asmi_squad $squad $chat data.limit=${ROWS:-500}" ;;
    closed-book) echo "benchmark=asmi_squad_closed_book $squad data.limit=${ROWS:-250}" ;;
    closed-book-few-shot) echo "benchmark=asmi_squad_closed_book $squad $few_shot data.limit=${ROWS:-250}" ;;
    closed-book-chat) echo "benchmark=asmi_squad_closed_book $squad $chat data.limit=${ROWS:-250}" ;;
    changed | changed-few-shot | exchanged | exchanged-few-shot)
      echo "benchmark=asmi_squad data.source=$out/$1 data.limit=${ROWS:-250}"
      ;;
    babi) echo "benchmark=asmi_babiqa data.source=$out/babi data.limit=${ROWS:-300}" ;;
    babi-chat) echo "benchmark=asmi_babiqa data.source=$out/babi $chat data.limit=${ROWS:-300}" ;;
    *)
      echo "no setting $1: xquad, closed-book, xquad-few-shot, closed-book-few-shot, xquad-chat, closed-book-chat, babi," \
        "babi-chat, changed, changed-few-shot, exchanged, exchanged-few-shot" >&2 && return 1
      ;;
  esac
}

# The same questions with changed passages (scripts/build_counterfactual.py).
passages() {
  local style=paper change=answer
  [[ $1 == *-few-shot ]] && style=demo
  [[ $1 == exchanged* ]] && change=passage
  [ -d "$out/$1" ] || python "$here/../build_counterfactual.py" "$data/xquad.en.json" "$out/$1" \
    --change "$change" --prompt-style "$style" --except-limit 150
}

# Scales of a setting's control conditions, matched once, on rows of no shard.
scales() {
  local spare=$out/runs/$1/held-out rest
  [ -e "$out/$1.scales.json" ] && return
  case $1 in # the 150 rows that `unseen` leaves out; rows after the setting's limit
    xquad* | closed-book*) rest=(data.except_limit=null data.limit=150 data.num_shards=8) ;;
    *) rest=("data.except_limit=$(setting "$1" | sed 's/.*limit=//')" data.limit=20) ;;
  esac
  # shellcheck disable=SC2046
  [ -e "$spare/ue_manager_seed1" ] || polygraph_eval --config-name asmi_offline "${options[@]}" \
    $(setting "$1") "${rest[@]}" asmi.scope=response estimators=asmi_only \
    output_attentions=false asmi.result_cache="$out/result_cache" hydra.run.dir="$spare" "${more[@]}"
  polygraph_asmi experiments scale "$2" --held-out "$spare" "${named[@]}" --out "$out/$1.scales.json"
}

# Joined shards of a setting, probed and reported.
tables() {
  local joined=$out/runs/$1/joined kind runs=()
  rm -rf "$joined" # made of the finished shards, more of them each time
  for kind in sources pseudo_heads foreign isotropic mlp mlp_noise heads; do
    compgen -G "$out/runs/$1/$kind/*/ue_manager_seed1" >/dev/null || continue
    polygraph_asmi merge "$out/runs/$1/$kind"/*/ --out "$joined/$kind"
    runs+=("$joined/$kind")
  done
  if [ -e "$joined/heads" ]; then
    polygraph_asmi experiments probe "$joined/heads" "${named[@]}" --tokens "${TOKENS:-200}" --result-cache "$out/result_cache"
  fi
  polygraph_asmi report "${runs[@]}" --out "$out/$1.tables"
  for kind in causal_probe causal_differences; do # for the page on heads
    [ ! -e "$out/$1.tables/tables/$kind.csv" ] || cp "$out/$1.tables/tables/$kind.csv" "$out/$1.$kind.csv"
  done
}

for name in "${asked[@]:-xquad}"; do
  setting "$name" >/dev/null
  before=()
  [[ $name == *changed* ]] && passages "$name" # "exchanged" too
  [[ $name == changed* ]] && before=(--before "$data/xquad.en.json")
  if [[ ${RUNS:-} == tables ]]; then
    tables "$name"
    continue
  fi
  for shard in ${SHARD:-$(seq 0 $((${SHARDS:-10} - 1)))}; do
    for kind in ${RUNS:-sources}; do
      again=asmi.answers=$out/runs/$name/sources/$shard
      lean=(estimators=asmi_only output_attentions=false)
      case $kind in
        sources) options_of_run=(estimators=asmi_greedy output_attentions=false) ;;
        baselines) options_of_run=() ;; # RAUQ reads attention during generation: new answers
        sampled) options_of_run=("$again" estimators=asmi_sampled output_attentions=false) ;;
        scope_all) options_of_run=("$again" "${lean[@]}" asmi.scope=all) ;;
        paper) options_of_run=("$again" "${lean[@]}" asmi.{mask_rate=0.15,num_masks=40}) ;;
        heads) options_of_run=("$again" "${lean[@]}" asmi.{num_masks=300,details=true}
          "asmi.depths=[0.6,0.9]") ;;
        pseudo_heads | foreign | isotropic | mlp | mlp_noise)
          scales "$name" "${again#*=}"
          options_of_run=("$again" "${lean[@]}" +add=asmi_control "asmi.perturbation=$kind"
            "controls.scales=$out/$name.scales.json") ;;
        depths) options_of_run=("$again" "${lean[@]}"
          "asmi.depths=[0.6,0.7,0.8,0.9]") ;;
        deeper) options_of_run=("${lean[@]}" asmi.depth=0.7 "asmi.depths=[0.7,0.9]") ;;
        balanced) options_of_run=("$again" "${lean[@]}" asmi.mask_sampler=balanced) ;;
        *) echo "no run $kind: sources, baselines, sampled, scope_all, paper, depths, deeper, balanced," \
          "heads, pseudo_heads, foreign, isotropic, mlp, mlp_noise, tables" >&2
          exit 1 ;;
      esac
      # shellcheck disable=SC2046
      run "$shard" "$name" "$kind" --config-name asmi_offline "${options[@]}" $(setting "$name") \
        asmi.scope=response "${options_of_run[@]}"
    done
  done
  for kind in ${RUNS:-sources}; do
    join "$name" "$kind"
  done
done
