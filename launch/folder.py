"""A private folder for temporary files that is gone at the end, however that comes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

# The variable that tells a worker of a private folder for its temporary files. It is emptied when the worker goes.
FOLDER = "SBP_LAUNCH_FOLDER"
_PREFIX = "sbp-held-"
# Between making a folder and locking it; younger ones are left alone, in seconds.
_YOUNG = 60.0


class PrivateFolder:
    """A folder that nobody but this user can enter.

    It is locked as long as its process lives: what a killed process left behind is known by its open lock, and
    :func:`remove_left_behind` removes it.

    Attributes:
        path: where it is, under ``$TMPDIR``.
    """

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix=_PREFIX)
        self._lock: int | None = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # a file system without locks: then it is only removed in order
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def empty(self) -> None:
        """Remove all that is in it."""
        for entry in os.scandir(self.path):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)

    def close(self) -> None:
        """Remove it."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def remove_left_behind() -> None:
    """Remove the folders of this user's processes that were killed before they could do so themselves."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            found = os.fstat(file)
            if found.st_uid != os.getuid() or time.time() - found.st_mtime < _YOUNG:
                continue
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:  # its process lives
            continue
        finally:
            os.close(file)
