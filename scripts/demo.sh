#!/usr/bin/env bash
# Sets up an environment and runs asmi_demo: ASMI beside single-pass baselines on SmolLM2-135M, on a
# CPU, without a model hub. Arguments are Hydra overrides:
#   scripts/demo.sh closed_book=true                     the same questions without the passages
#   scripts/demo.sh squad_file=FILE.json limit=200       questions of a SQuAD-format JSON file
set -euo pipefail
pushd "$(dirname "$0")/.." >/dev/null
. scripts/environment.sh demo
popd >/dev/null # files named in arguments, and the results, belong to where you are
export HF_HUB_OFFLINE=1
RUN=workdir/demo/$(date +%Y-%m-%d_%H-%M-%S)
echo "Running asmi_demo, the log is in $RUN" >&2
polygraph_eval --config-name asmi_demo hydra.run.dir="$RUN" "$@"
polygraph_asmi results "$RUN"
