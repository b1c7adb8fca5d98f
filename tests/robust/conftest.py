"""What these tests share: the commands in this process, made-up results, and an alarm for what does not end."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

# Far above what any call here takes, in seconds.
PATIENCE = 60


def load_synthetic() -> ModuleType:
    path = Path(__file__).parents[1] / "report" / "synthetic.py"
    spec = importlib.util.spec_from_file_location("robust_synthetic", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["robust_synthetic"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    return load_synthetic()


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """A test that hangs fails."""

    def ring(number: int, frame: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(PATIENCE * 5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


def _call(main: Callable[[list[str]], int], *words: object) -> Ended:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(word) for word in words])
        except SystemExit as stop:  # argparse
            code = int(stop.code or 0)
    return Ended(code, out.getvalue(), err.getvalue())


@pytest.fixture
def call() -> Callable[..., Ended]:
    """Call a command's main with words; whatever else than an exit comes out of it is an error of the test."""
    return _call


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
