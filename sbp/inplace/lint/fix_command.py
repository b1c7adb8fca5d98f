"""``sbp lint --fix`` and ``--diff``: rewrite files, say what was left and why."""

from __future__ import annotations

import difflib
import os
import stat
import sys
import tempfile
from collections.abc import Sequence

from sbp.escape import one_line, printable
from sbp.inplace.lint.config import Configuration
from sbp.inplace.lint.files import read_bytes
from sbp.inplace.lint.findings import Finding
from sbp.inplace.lint.fixes import Fixed, fix_bytes
from sbp.inplace.lint.formats import headline, plural

CLEAN, FOUND = 0, 1


def fix_file(path: str, configuration: Configuration) -> tuple[bytes, Fixed]:
    """The content of a file before, and the outcome; nothing is written."""
    data = read_bytes(path, configuration.max_bytes)
    if isinstance(data, Finding):
        return b"", Fixed(b"", left=(data,) if configuration.wants(data) else ())
    return data, fix_bytes(data, path, configuration)


def run_fixes(paths: Sequence[str], configuration: Configuration, jobs: int, write: bool, show: bool) -> int:
    """Fix files, print what was done, and return 1 if findings are left (with ``--diff`` alone: if there are any)."""
    fixed = left = changed = 0
    for path, (before, outcome) in zip(paths, fix_all(paths, configuration, jobs)):
        if outcome.data != before and outcome.fixed:
            changed += 1
            if show:
                print(shown(difference(path, before, outcome.data)), end="")
            if write and not replace_file(path, outcome.data):
                left += 1
                continue
        fixed += len(outcome.fixed)
        left += len(outcome.left)
        for finding in outcome.left:
            reason = f"; left alone: {finding.kept}" if finding.kept else ""
            print(
                printable(f"{finding.path}:{finding.line}:{finding.column + 1}: {headline(finding)}{reason}")
            )
    done = "fixed" if write else "would be fixed"
    print(f"{plural(fixed, 'finding')} {done} in {plural(changed, 'file')}, {left} left")
    return FOUND if left or (fixed and not write) else CLEAN


def fix_all(paths: Sequence[str], configuration: Configuration, jobs: int) -> list[tuple[bytes, Fixed]]:
    """The outcomes for all files, in their order."""
    if jobs <= 1 or len(paths) < 8:
        return [fix_file(path, configuration) for path in paths]
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(min(jobs, len(paths))) as pool:
        return list(pool.map(fix_file, paths, [configuration] * len(paths), chunksize=4))


def difference(path: str, before: bytes, after: bytes) -> str:
    """A unified diff."""
    old = before.decode("utf-8", "replace").splitlines(keepends=True)
    new = after.decode("utf-8", "replace").splitlines(keepends=True)
    lines = difflib.unified_diff(old, new, path, path)
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def shown(text: str) -> str:
    """A diff as it is for a file or a pipe (``patch`` takes it), without what would steer a terminal on one."""
    return printable(text) if sys.stdout.isatty() else text


def replace_file(path: str, data: bytes) -> bool:
    """Put new content into a file all at once, with the old permissions; False, and a line, if it cannot be."""
    target = os.path.realpath(path)
    temporary = ""
    try:
        mode = stat.S_IMODE(os.stat(target).st_mode)
        descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".sbp-lint-")
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    except OSError as error:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        print(one_line(f"{path}: cannot be written: {error.strerror or error}"))
        return False
    return True
