# Every command behind the results pages, for reading and copying: choose the lines you need.
# MODEL_FOLDER, DATA_FOLDER, OUT, OTHER and AGAIN are folders.

# Settings, on CPU
# SmolLM2: xquad-few-shot closed-book-few-shot babi; Gemma: xquad closed-book babi; Qwen: xquad closed-book-few-shot babi, at 0.5B xquad-chat
RUNS=sources bash scripts/evidence/measure.sh MODEL_FOLDER DATA_FOLDER OUT xquad babi  # xquad: ROWS=250 SHARDS=5 at 1.5B
RUNS=sources ROWS=150 SHARDS=3 bash scripts/evidence/measure.sh MODEL_FOLDER DATA_FOLDER OUT closed-book  # ROWS=100 at 1.5B
RUNS=sources ROWS=100 SHARDS=2 bash scripts/evidence/measure.sh MODEL_FOLDER DATA_FOLDER OUT xquad-chat
# few-shot on the Qwen models: ROWS=300 SHARDS=6; at 1.5B ROWS=250 SHARDS=5, SHARD=0 to 3
RUNS=sources ROWS=300 SHARDS=6 bash scripts/evidence/measure.sh MODEL_FOLDER DATA_FOLDER OUT xquad-few-shot
# the second plan: ROWS=250 SHARDS=5 for xquad, SHARDS=3 for babi; babi at 1.5B: SHARDS=4, SHARD=0 and 1;
# SmolLM2's xquad-few-shot: SHARDS=10, SHARD=0, 1 and 5 to 9
RUNS=deeper ROWS=250 SHARDS=5 bash scripts/evidence/measure.sh MODEL_FOLDER DATA_FOLDER OUT xquad
# SmolLM2's XQuAD under other settings; and the depths once more, SETTING.depths.parquet kept as SETTING.again.parquet
RUNS="sources scope_all paper depths balanced sampled baselines" ROWS=100 SHARDS=2 \
  bash scripts/evidence/measure.sh smollm2 DATA_FOLDER OTHER xquad-few-shot
for shard in 2 3 4; do
  RUNS="sources depths" SHARD=$shard bash scripts/evidence/measure.sh smollm2 DATA_FOLDER AGAIN xquad-few-shot
done
# masks at every position: Qwen 0.5B; at 1.5B the first 40 of 50 rows, all among its 200; all baselines: Gemma, Qwen 0.5B
RUNS="sources scope_all" ROWS=100 SHARDS=4 bash scripts/evidence/measure.sh MODEL_FOLDER DATA_FOLDER OTHER xquad
for shard in 0 1 2 3; do
  RUNS=scope_all ROWS=50 SHARDS=5 SHARD=$shard bash scripts/evidence/measure.sh MODEL_FOLDER DATA_FOLDER OTHER xquad -- asmi.answers=null
done
RUNS=baselines ROWS=100 SHARDS=4 bash scripts/evidence/measure.sh MODEL_FOLDER DATA_FOLDER OTHER babi
RUNS=sampled ROWS=100 SHARDS=4 bash scripts/evidence/measure.sh MODEL_FOLDER DATA_FOLDER OTHER babi -- asmi.answers=null

# The first runs
python scripts/build_babi.py qa1_single-supporting-fact_test.txt babi
model="model=asmi_smollm2"; style="data.prompt_style=demo"   # 4-shot: zero-shot prompts make it ramble
# model="model=asmi_local model.path=FOLDER model.gguf_file=gemma-3-270m-q4_k_m.gguf"; style=""   # zero-shot, as in the paper
for setting in "asmi_squad data.source=xquad.en.json $style" \
               "asmi_squad_closed_book data.source=xquad.en.json $style" "asmi_babiqa data.source=babi"; do
  run() { polygraph_eval --config-name asmi_offline --multirun $model benchmark=$setting data.limit=300 \
            data.num_shards=3 'data.shard=range(3)' hydra.sweep.dir=runs/${setting%% *}/$1 "${@:2}"
          polygraph_asmi merge runs/${setting%% *}/$1 --out joined/${setting%% *}/$1; }
  again="asmi.answers=$PWD/joined/${setting%% *}/all estimators=asmi_only output_attentions=false"   # the same answers
  run all
  run response $again asmi.scope=response
  run paper-response $again asmi.{scope=response,mask_rate=0.15,num_masks=40}
  polygraph_eval --config-name asmi_offline $model benchmark=$setting data.limit=300 data.num_shards=3 data.shard=0 \
    estimators=asmi_no_side_models hydra.run.dir=sampled/${setting%% *}   # the first 100 rows, with ten samples each
done
polygraph_asmi report joined/*/* --out report; polygraph_asmi results sampled/*
