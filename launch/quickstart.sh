#!/usr/bin/env bash
# Sets up what is missing and runs the built-in suite on 4 ranks. Arguments go to sbp.run.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
prepare_environment run,mpich
exec "$VENV/bin/mpirun" -n 4 "$VENV/bin/python" -m sbp.run "$@"
