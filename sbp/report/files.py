"""Writing reports: the whole file or none of it."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO


@contextlib.contextmanager
def opened_for_writing(path: str) -> Iterator[TextIO]:
    """A text file (``-`` for stdout) that takes the place of ``path`` when all is written.

    A reader never sees half a report, and a failure leaves the old one. What is no ordinary file, such as a pipe,
    is written to directly. Raises OSError whose text is one line that names the path.
    """
    if path == "-":
        yield sys.stdout
        return
    target = Path(path)
    try:
        if target.exists() and not target.is_file():
            if target.is_dir():
                raise OSError(f"cannot write {path}: it is a directory")
            with target.open("w", encoding="utf-8", newline="\n") as file:
                yield file
            return
        if target.is_symlink():
            target = target.resolve()
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise OSError(_line(path, error)) from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            yield file
        # mkstemp makes private files; a report is as readable as any file that is made here.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise OSError(_line(path, error)) from error
        raise


def _line(path: str, error: OSError) -> str:
    return f"cannot write {path}: {error.strerror}" if error.strerror else str(error)


# What a shell reports of a program that SIGPIPE ended.
CLOSED_PIPE = 128 + 13


def ends_with_its_reader(main: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
    """A command that ends without a word where the reader of its output is gone, as in ``sbp report ... | head``."""

    @functools.wraps(main)
    def guarded(argv: Sequence[str]) -> int:
        try:
            code = main(argv)
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            # Python would try to flush once more at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return CLOSED_PIPE

    return guarded
