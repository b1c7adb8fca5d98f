#!/usr/bin/env bash
# The distributed stage of a CI: runs the suites in worlds of several sizes, writes the reports, and says with its
# exit code what came out. Any CI can call it; everything is set by the environment, arguments go to sbp.run.
#
#   ci/distributed.sh                          all suites on 2 and on 4 ranks
#   ci/distributed.sh my_cases.py              your own cases
#   SBP_SHARD=2/8 SBP_REPORT=no ci/distributed.sh         one machine's part; put together with:
#   SBP_MERGE="shard-*/results.jsonl" ci/distributed.sh   the reports of all parts
#
#   SBP_WORLDS="2 4"   numbers of ranks, one run for each
#   SBP_SUITES=""      such as "modules inplace ops"; empty for those that sbp.run runs by itself
#   SBP_BUDGET=""      time for all worlds together, such as 10m; empty for no limit
#   SBP_KNOWN=""       known failures: a TOML file, or none; empty for those that ship with sbp
#   SBP_STRICT=yes     a known failure that passes or matches nothing is an error, not a warning
#   SBP_SHARD=""       such as 2/8
#   SBP_MERGE=""       results of the shards: nothing is run, they are put together and reported
#   SBP_REPORT=yes     no: only the results
#   SBP_OUT=sbp-results  the folder that results and reports go to
#   SBP_PYTHON=""      the Python that has sbp; empty to set one up here, or the python3 on the path
#
# Exit code, the gravest of all worlds: 0 no unexpected failure; 1 unexpected failures, or known ones that pass;
# 2 bad usage or input; 3 a run could not be done or is incomplete, or there is no verdict at all.
set -uo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
worlds="${SBP_WORLDS:-2 4}"
out="${SBP_OUT:-sbp-results}"
known="${SBP_KNOWN:-}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

complain() {
  echo "distributed.sh: $1" >&2
  exit 2
}

# seconds 90s|10m|1h -> whole seconds
seconds() {
  [[ "$1" =~ ^([0-9]+)([smh]?)$ ]] || complain "SBP_BUDGET=$1 is not a time; write 90s, 10m or 1h"
  case "${BASH_REMATCH[2]}" in
    m) echo $((BASH_REMATCH[1] * 60)) ;;
    h) echo $((BASH_REMATCH[1] * 3600)) ;;
    *) echo "${BASH_REMATCH[1]}" ;;
  esac
}

python="${SBP_PYTHON:-}"
if [ -z "$python" ] && [ -f "$here/launch/environment.sh" ] && [ -f "$here/pyproject.toml" ]; then
  cd_back="$PWD"
  cd "$here" || exit 2
  # shellcheck source=launch/environment.sh
  . launch/environment.sh
  # The test extra too, so that this and ci/test.sh share one environment.
  prepare_environment run,mpich,test || exit 2
  python="$VENV/bin/python"
  cd "$cd_back" || exit 2
fi
python="${python:-python3}"
"$python" -c 'import sbp' 2>/dev/null || complain "$python has no sbp; pip install 'sbp-conformance[run,mpich]'"
# So that the mpirun that belongs to this Python's mpi4py is found.
directory="$("$python" -c 'import os, sys; print(os.path.dirname(sys.executable))')"
export PATH="$directory:$PATH"

# A worse code replaces a better one; 2 is the worst, since then nothing can be trusted.
code=0
grave() {
  local order=" 0 1 3 2 " new="$1"
  case "$order" in *" $new "*) ;; *) new=3 ;; esac # killed, say
  local a="${order%% "$code" *}" b="${order%% "$new" *}"
  if [ "${#b}" -gt "${#a}" ]; then code="$new"; fi
}

mkdir -p "$out" || complain "cannot make the folder $out"
results="$out/results.jsonl"
parts=()

if [ -n "${SBP_MERGE:-}" ]; then
  # A pattern, on purpose unquoted.
  # shellcheck disable=SC2206
  parts=($SBP_MERGE)
  [ -e "${parts[0]}" ] || { echo "distributed.sh: no results match $SBP_MERGE" >&2; exit 3; }
else
  budget=()
  if [ -n "${SBP_BUDGET:-}" ]; then
    total="$(seconds "$SBP_BUDGET")" || exit 2
    number="$(wc -w <<< "$worlds")"
    budget=(--budget "$((total / number > 0 ? total / number : 1))s")
  fi
  options=()
  for suite in ${SBP_SUITES:-}; do options+=(--suite "$suite"); done
  [ -z "$known" ] || options+=(--known "$known")
  [ -z "${SBP_SHARD:-}" ] || options+=(--shard "$SBP_SHARD")
  for world in $worlds; do
    [[ "$world" =~ ^[1-9][0-9]*$ ]] || complain "SBP_WORLDS=$worlds: $world is not a number of ranks"
    part="$out/world-$world.jsonl"
    rm -f "$part"
    echo "== $world ranks"
    "$python" -m sbp.run -n "$world" --results "$part" ${budget[@]+"${budget[@]}"} ${options[@]+"${options[@]}"} "$@"
    grave $?
    [ "$code" != 2 ] || exit 2
    # A run that did not even begin to write is an incomplete one.
    [ -e "$part" ] || : > "$part"
    parts+=("$part")
  done
fi

# Worlds of one shard put together are still one shard: only the last merge asks for the others.
whole=()
[ -z "${SBP_SHARD:-}" ] || [ -n "${SBP_MERGE:-}" ] || whole=(--part)
"$python" -m sbp.cli merge "${parts[@]}" ${whole[@]+"${whole[@]}"} -o "$results"
grave $?
[ "$code" != 2 ] || exit 2
[ "${SBP_REPORT:-yes}" = yes ] || exit "$code"

report=(--html "$out/report.html" --junit "$out/junit.xml" --sarif "$out/sbp.sarif" --markdown "$out/report.md")
[ "${GITHUB_ACTIONS:-}" != true ] || report+=(--github)
if [ "$known" != none ]; then
  # Held against the results of all worlds together: an entry may be about one of them only.
  shipped="$("$python" -c 'from sbp.known import SHIPPED; print(SHIPPED if SHIPPED.exists() else "none")')"
  report+=(--known "${known:-$shipped}")
  { [ "${SBP_STRICT:-yes}" != yes ] || [ "${known:-$shipped}" = none ]; } || report+=(--strict)
fi
"$python" -m sbp.cli report "$results" "${report[@]}"
grave $?
exit "$code"
