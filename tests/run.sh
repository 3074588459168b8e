#!/usr/bin/env bash
# The test suite in a virtual environment of its own.
#   bash tests/run.sh [pytest arguments]
# TEST_VENV: folder of the environment (default .venv-test, made when missing, reused afterwards).
# TORCH_SPEC: torch to install when none is there yet (default torch==2.13.0).
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${TEST_VENV:-.venv-test}
if ! "$venv/bin/python" -m pip --version > /dev/null 2>&1; then
    "${PYTHON:-python3}" -m venv --clear "$venv"
fi
python=$venv/bin/python
if ! "$python" -c "import torch" 2>/dev/null; then
    "$python" -m pip install --quiet "${TORCH_SPEC:-torch==2.13.0}"
fi
"$python" -m pip install --quiet uv setuptools wheel ninja
# deepspeed has no wheels: it is built against the torch that is installed, its own ops on first use
DS_BUILD_OPS=0 "$python" -m uv pip install --quiet --python "$python" \
    --no-build-isolation-package deepspeed --editable ".[dev,deepspeed,bench]"
# there, not in the home folder, where a build that was killed leaves a lock for which everybody waits
export TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$(cd "$venv" && pwd)/torch_extensions}
exec "$python" -m pytest "$@"
