#!/usr/bin/env bash
# Sets up an environment and runs asmi_demo: ASMI and single-pass baselines on SmolLM2-135M, on a
# CPU, without a model hub. Arguments are Hydra overrides:
#   scripts/demo.sh data.closed_book=true                  the same questions without the passages
#   scripts/demo.sh data.source=FILE.json data.sample=200  questions of a SQuAD-format JSON file
set -euo pipefail
pushd "$(dirname "$0")/.." >/dev/null
. scripts/environment.sh demo
popd >/dev/null # paths in arguments and results are relative to the caller's folder
export HF_HUB_OFFLINE=1
RUN=workdir/demo/$(date +%Y-%m-%d_%H-%M-%S)
echo "Running asmi_demo; log: $RUN" >&2
polygraph_eval --config-name asmi_demo hydra.run.dir="$RUN" "$@"
polygraph_asmi results "$RUN"
