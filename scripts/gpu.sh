#!/usr/bin/env bash
# For a machine with a GPU: times masked passes and samples, runs asmi_squad with stand-ins, the demo, a model of yours
# and the numerical tests, and writes gpu.md, made to be sent. The plan and its goals: scripts/gpu.py.
#   scripts/gpu.sh                another file: --out FILE
#   scripts/gpu.sh --rehearse     the same on a processor, with tiny shapes and random stand-ins
#   scripts/gpu.sh --part model --folder FOLDER --squad FILE
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh dev
python scripts/gpu.py "$@"
