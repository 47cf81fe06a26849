#!/usr/bin/env bash
# For a machine with a GPU: runs the numerical tests on it, times the masked passes at two models' shapes, runs twenty
# rows of asmi_coqa (this needs a model hub), and writes gpu.md, made to be sent.
#   scripts/gpu.sh                another file: --out FILE
#   scripts/gpu.sh --rehearse     the same on a processor, with tiny shapes and random stand-ins
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh dev
python scripts/gpu.py "$@"
