#!/usr/bin/env bash
# Sets up an environment, then checks format and lint, and types while the tests run in two processes.
# Arguments go to pytest: `scripts/test.sh --slow` runs also what takes minutes, `-k NAME` a part,
# `-n 0` all in one process. Tests of scripts/evidence are run by `pytest tests/evidence`.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh dev
ruff format --check .
ruff check .
mypy &
pytest -n 2 --dist worksteal --ignore tests/evidence "$@"
wait $! || { echo 'The types are wrong: mypy says above where.' >&2; exit 1; }
