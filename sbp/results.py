"""Writes the results file: one JSON object a line, flushed as each becomes known."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

FORMAT = 1


class ResultsError(OSError):
    """The results file cannot be written; says which and why."""


class ResultsWriter:
    """Appends records to a file. Without a path it only counts.

    Raises ResultsError where the file cannot be opened or written.
    """

    def __init__(self, path: str | None, append: bool = False) -> None:
        self.path = Path(path) if path else None
        self.written = 0
        self._file: TextIO | None = None
        if self.path is None:
            return
        try:
            if append:
                _cut_torn_line(self.path)
            # Half of a surrogate pair, as a message may have it, becomes the escape that JSON has for it.
            self._file = self.path.open("a" if append else "w", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise ResultsError(f"cannot write results to {self.path}: {error.strerror}") from error

    def write(self, record: dict[str, Any]) -> None:
        """Append one record and hand it to the operating system at once."""
        self.written += 1
        if self._file is None:
            return
        try:
            # allow_nan=False: the file is JSON for everyone, so numbers that are not finite come as text.
            self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise ResultsError(f"cannot write results to {self.path}: {error.strerror}") from error

    def close(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError:
                pass  # what could not be written was reported when it was tried
            self._file = None

    def __enter__(self) -> ResultsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _cut_torn_line(path: Path) -> None:
    """Drop a last line that a killed run left half written."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        if end != len(content):
            file.seek(end)
            file.truncate()
            os.fsync(file.fileno())
