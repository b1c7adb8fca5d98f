"""Which files are linted, how they are read, and linting many of them at once."""

from __future__ import annotations

import gc
import io
import os
import stat
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sbp.inplace.lint.analyse import lint_source
from sbp.inplace.lint.config import Configuration
from sbp.inplace.lint.findings import Finding, unreadable
from sbp.inplace.lint.noqa import without_noqa

# Folders that are not one's own source. A path that is given on the command line is linted all the same.
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "node_modules", "site-packages", "venv", "build", "dist", "__pypackages__", "_build"}
)
# Below this, starting processes costs more than it gains.
BYTES_FOR_PROCESSES = 1_500_000
COLLECT_EVERY = 64_000_000


@dataclass(frozen=True)
class FileReport:
    """What was found in one file, with the text of the lines that were found."""

    path: str
    findings: tuple[Finding, ...]
    lines: dict[int, str] = field(default_factory=dict)


class MissingPath(ValueError):
    """A path on the command line that does not exist."""


def discover(paths: Sequence[str], configuration: Configuration) -> list[str]:
    """The files under these paths, in a stable order, each once. Raises MissingPath."""
    found: dict[str, None] = {}
    for path in paths:
        if os.path.isdir(path):
            for file in walk(path, configuration):
                found[file] = None
        elif os.path.lexists(path):
            if not configuration.excludes(path):
                found[path] = None
        else:
            raise MissingPath(f"no such file or folder: {path}")
    return list(found)


def walk(folder: str, configuration: Configuration) -> Iterator[str]:
    """The Python files of a folder and those below it."""
    for current, folders, files in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in SKIPPED_FOLDERS
            and not configuration.excludes(os.path.join(current, name))
        )
        for name in sorted(files):
            if name.endswith(".py"):
                path = os.path.normpath(os.path.join(current, name))
                if not configuration.excludes(path):
                    yield path


def read_text(path: str, max_bytes: int) -> str | Finding:
    """The text of a file, or the finding that says why it cannot be read."""
    data = read_bytes(path, max_bytes)
    return data if isinstance(data, Finding) else decode(data, path)


def read_bytes(path: str, max_bytes: int) -> bytes | Finding:
    """The content of a file, or the finding that says why it cannot be read."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return unreadable(path, "is not a regular file")
        if status.st_size > max_bytes:
            return unreadable(path, f"is larger than {max_bytes} bytes (max-bytes in [tool.sbp.lint])")
        with open(path, "rb") as stream:
            return stream.read()
    except FileNotFoundError:
        reason = "is a link that leads nowhere" if os.path.islink(path) else "is not there any more"
        return unreadable(path, reason)
    except OSError as error:
        return unreadable(path, f"cannot be read: {error.strerror or error}")


def decode(data: bytes, path: str) -> str | Finding:
    """The text in these bytes: UTF-8, or what the file itself declares."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            text = data.decode(encoding)
        except (SyntaxError, UnicodeDecodeError, LookupError):
            line = data.count(b"\n", 0, error.start) + 1
            return unreadable(path, "is not UTF-8, and declares no other encoding", line)
    # Python counts only these as ends of lines.
    return text.replace("\r\n", "\n").replace("\r", "\n")


def lint_text(text: str, path: str, configuration: Configuration) -> FileReport:
    """Lint one text under a configuration."""
    findings = lint_source(text, path, frozenset(configuration.sources))
    if not findings:
        return FileReport(path, ())
    lines = text.split("\n")
    kept = [finding for finding in without_noqa(findings, text, lines) if configuration.wants(finding)]
    shown = {f.line: lines[f.line - 1] for f in kept if f.line <= len(lines)}
    return FileReport(path, tuple(kept), shown)


def lint_file(path: str, configuration: Configuration) -> FileReport:
    """Lint one file; a file that cannot be read is one finding."""
    text = read_text(path, configuration.max_bytes)
    if isinstance(text, Finding):
        return FileReport(path, (text,) if configuration.wants(text) else ())
    return lint_text(text, path, configuration)


def lint_batch(paths: Sequence[str], configuration: Configuration) -> list[FileReport]:
    """Lint some files in this process.

    Syntax trees hold no cycles, so the collector would only cost time; what the analysis leaves behind is
    collected now and then.
    """
    enabled = gc.isenabled()
    gc.disable()
    reports = []
    since = 0
    try:
        for path in paths:
            reports.append(lint_file(path, configuration))
            since += size_of(path)
            if since > COLLECT_EVERY:
                gc.collect()
                since = 0
    finally:
        if enabled:
            gc.enable()
    return reports


def size_of(path: str) -> int:
    """The size of a file in bytes; 0 if it cannot be told."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def lint_files(paths: Sequence[str], configuration: Configuration, jobs: int) -> list[FileReport]:
    """Lint files with up to ``jobs`` processes; the reports come in the order of the paths."""
    sizes = [size_of(path) for path in paths]
    if jobs <= 1 or len(paths) < 2 or sum(sizes) < BYTES_FOR_PROCESSES:
        return lint_batch(paths, configuration)
    from concurrent.futures import ProcessPoolExecutor

    batches = split_evenly(paths, sizes, jobs * 4)
    with ProcessPoolExecutor(min(jobs, len(batches))) as pool:
        results = list(pool.map(lint_batch, batches, [configuration] * len(batches)))
    by_path = {report.path: report for reports in results for report in reports}
    return [by_path[path] for path in paths]


def split_evenly(paths: Sequence[str], sizes: Sequence[int], count: int) -> list[list[str]]:
    """Batches of about the same size in bytes."""
    batches: list[tuple[int, list[str]]] = [(0, []) for _ in range(min(count, len(paths)))]
    for size, path in sorted(zip(sizes, paths), reverse=True):
        smallest = min(range(len(batches)), key=lambda index: batches[index][0])
        total, batch = batches[smallest]
        batch.append(path)
        batches[smallest] = (total + size, batch)
    return [batch for _, batch in batches]
