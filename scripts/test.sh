#!/usr/bin/env bash
# Sets up an environment, checks format, lint and types, and runs the tests in two processes.
# Arguments go to pytest: `scripts/test.sh --slow` adds tests that take minutes, `-k NAME` selects,
# `-n 0` uses one process, `--as-users-have-it` replaces nothing of Hydra and other libraries.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh dev
ruff format --check .
ruff check .
mypy &
pytest -n 2 --dist worksteal "$@"
wait $! || { echo 'Type errors: see the output of mypy above.' >&2; exit 1; }
