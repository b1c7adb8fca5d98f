#!/usr/bin/env bash
# Sets up what is missing, then runs everything that guards the project. What .ci/run calls.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
prepare_environment run,mpich,test
export PATH="$VENV/bin:$PATH" OMP_NUM_THREADS=1

step() { printf '\n== %s\n' "$*"; "$@"; }

step ruff check .
step ruff format --check .
step mypy
step lint-imports
# The tests that start ranks of their own come after the others: they want the cores for themselves.
step python -m pytest -q -n 2 --dist worksteal -m "not distributed"
step python -m pytest -q -m distributed
