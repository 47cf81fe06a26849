#!/usr/bin/env bash
# Sets up an environment and builds docs/ as a site in build/docs/index.html. Warnings are errors,
# tutorials are run, links between pages are checked, no model is downloaded. Arguments go to
# sphinx-build.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh docs
export HF_HUB_OFFLINE=1
# --fresh-env: the page of commands does not notice changes of the code.
sphinx-build --fresh-env --fail-on-warning --keep-going --builder html docs build/docs "$@"
