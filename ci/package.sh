#!/usr/bin/env bash
# Builds the sdist, the wheel from the sdist, installs the wheel into a clean environment without torch, and runs it
# there: the lint and the reports must work with what the wheel has and what it asks for. Leaves nothing behind.
#
#   ci/package.sh          in CI, after the environment of ci/test.sh is there
#   ci/package.sh DIR      also puts the two files into DIR
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
keep="${1:+$(mkdir -p "$1" && cd "$1" && pwd)}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1
# The checkout must not stand in for what the wheel lacks.
unset PYTHONPATH VIRTUAL_ENV

fail() {
  echo "package.sh: $1" >&2
  exit 1
}

# What is built is what git has, with changes: build folders and caches of the checkout stay out of it.
mkdir "$work/source"
(cd "$here" && git ls-files -z --cached --others --exclude-standard | tar --ignore-failed-read --null -T - -c 2>/dev/null) |
  tar -x -C "$work/source"

"$python" -m venv "$work/build"
# What pyproject.toml asks for to build with, once, and not anew for each of the two files.
requires="$(sed -n 's/^requires = \["\(.*\)"\]/\1/p' "$here/pyproject.toml")"
"$work/build/bin/python" -m pip install --quiet build "$requires"
"$work/build/bin/python" -m build --no-isolation --outdir "$work/dist" "$work/source" > "$work/log" 2>&1 || {
  cat "$work/log" >&2
  fail "it does not build"
}

"$python" -m venv --without-pip "$work/clean"
sbp="$work/clean/bin/sbp"
"$work/build/bin/python" -m pip --python "$work/clean/bin/python" install --quiet --constraint "$here/ci/constraints.txt" "$work"/dist/*.whl
cd "$work"

version="$(sed -n 's/^__version__ = "\(.*\)"/\1/p' "$here/sbp/_version.py")"
[ -n "$version" ] || fail "sbp/_version.py has no version"
for file in "dist/sbp_conformance-$version.tar.gz" "dist/sbp_conformance-$version-py3-none-any.whl"; do
  [ -e "$file" ] || fail "there is no $file, but: $(ls dist)"
done
[ "$("$sbp" --version)" = "sbp $version" ] || fail "sbp --version says $("$sbp" --version), not sbp $version"
grep -q "^## $version" "$here/CHANGELOG.md" || fail "CHANGELOG.md has no section for $version"

"$work/clean/bin/python" - << 'END'
import importlib.util
from importlib.resources import files

assert importlib.util.find_spec("torch") is None, "torch came with the wheel; it is for the extra `run`"
for package in ("sbp", "launch"):
    assert "site-packages" in importlib.util.find_spec(package).origin, f"{package} is not the installed one"
    assert (files(package) / "py.typed").is_file(), f"{package} has no py.typed"
END

printf 'from torch.distributed.tensor import DTensor\n\n\ndef step(x: DTensor) -> None:\n    x += 1\n' > linted.py
code=0
"$sbp" lint linted.py > lint.txt || code=$?
{ [ "$code" = 1 ] && grep -q SBP101 lint.txt; } || fail "sbp lint found nothing (exit code $code): $(cat lint.txt)"
"$sbp" lint --explain all > explained.txt
grep -q "^ .*import torch" explained.txt || fail "the lint's examples are not in the wheel"
cp "$here/tests/report/data/results.jsonl" .
"$sbp" report results.jsonl --html --junit --sarif --markdown --exit-zero > /dev/null
for file in results.html results.xml results.sarif results.md; do
  [ -s "$file" ] || fail "sbp report wrote no $file"
done
"$sbp" known list > known.txt || fail "the known failures are not in the wheel"
"$sbp" completion bash > completion.bash 2> completion.err || fail "sbp completion: $(cat completion.err)"
[ -z "$keep" ] || cp dist/* "$keep"
echo "sbp_conformance $version: sdist and wheel are whole, and run without torch"
