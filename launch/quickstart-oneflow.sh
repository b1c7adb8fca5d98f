#!/usr/bin/env bash
# Sets up OneFlow 0.9.0 in an environment of its own and runs the suites on it, on 4 ranks. Arguments go to sbp.run.
set -euo pipefail
cd "$(dirname "$0")/.."
ONEFLOW_VENV="${SBP_ONEFLOW_VENV:-$PWD/.venv-oneflow}"
if ! "$ONEFLOW_VENV/bin/python" -c 'import importlib.metadata as m; m.version("oneflow")' 2>/dev/null; then
  python="${ONEFLOW_PYTHON:-python3.10}"
  if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 10))' 2>/dev/null; then
    echo "OneFlow 0.9.0 needs Python 3.10: install it, or set ONEFLOW_PYTHON to one" >&2
    exit 2
  fi
  "$python" -m venv "$ONEFLOW_VENV"
  "$ONEFLOW_VENV/bin/python" -m pip install --quiet 'oneflow==0.9.0' 'numpy<2'
  # The wheel is linked with them; no GPU is needed.
  "$ONEFLOW_VENV/bin/python" -m pip install --quiet --no-deps nvidia-cublas-cu11==11.10.3.66 nvidia-cudnn-cu11==8.5.0.96
fi
. launch/environment.sh
prepare_environment run,mpich
exec "$VENV/bin/mpirun" -n 4 "$VENV/bin/python" -m sbp.run --subject oneflow \
  --subject-python "$ONEFLOW_VENV/bin/python" "$@"
