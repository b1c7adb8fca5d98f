#!/usr/bin/env bash
# Sets up what is missing, then runs everything that guards the project. What .ci/run calls.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
prepare_environment run,mpich,fuzz,flake8,test
prepare_open_mpi
export PATH="$VENV/bin:$PATH" OMP_NUM_THREADS=1

# The HTML page is tried in a real browser, the shell scripts are checked, the completions in their shells. Where they cannot be had, the tests that
# need them say that they were skipped.
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  for package in chromium shellcheck zsh fish; do
    command -v "$package" >/dev/null && continue
    { apt-get -qq update && apt-get -qq install --yes --no-install-recommends "$package"; } >/dev/null 2>&1 ||
      echo "could not install $package; its tests are skipped" >&2
  done
fi

step() { printf '\n== %s\n' "$*"; "$@"; }

step ruff check .
step ruff format --check .
step mypy
step lint-imports
step env PYTHON="$VENV/bin/python" bash ci/package.sh
# The tests that start ranks of their own come after the others: they want the cores for themselves.
step python -m pytest -q -n 2 --dist worksteal -m "not distributed"
step python -m pytest -q -m distributed
