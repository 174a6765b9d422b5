#!/usr/bin/env bash
# Format, lint, types and tests. Arguments go to pytest: tests/run.sh -k checkpoint. With --all first, slow tests run too.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

python=$("${PYTHON:-python3}" -m torchtitan_lite.tools.environment test)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$PWD/outputs/cache/inductor} # compiled once, not per run

"$python" -m ruff format --check .
"$python" -m ruff check .
"$python" -m pyrefly check --summary=none
[[ ${1:-} != --all ]] || set -- -m "slow or not slow" "${@:2}"
# Two files at a time: with three, ranks take turns on two cores, and the suite takes almost twice as long. First those
# that start most processes; last the short ones (`testpaths` in pyproject.toml), so that no core is idle at the end.
exec "$python" -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder "$@"
