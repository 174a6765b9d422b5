#!/usr/bin/env bash
# Format, lint and tests. Arguments go to pytest: tests/run.sh -k checkpoint
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

python=$("${PYTHON:-python3}" torchtitan_lite/environment.py --extra test)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$PWD/outputs/cache/inductor} # compiled once, not per run

"$python" -m ruff format --check .
"$python" -m ruff check .
exec "$python" -m pytest -q "$@"
