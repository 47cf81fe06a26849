#!/usr/bin/env bash
# Sets up an environment and builds the pages of docs/ as a site: every warning is an error, the
# tutorials are executed, links between pages are checked, and nothing is fetched. Arguments go to
# sphinx-build. The site: build/docs/index.html.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh docs
export HF_HUB_OFFLINE=1
sphinx-build --fail-on-warning --keep-going --builder html docs build/docs "$@"
