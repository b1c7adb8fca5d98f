"""What the report tests share: made-up results, and the command line without a process."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sbp.cli import main


def load_synthetic() -> ModuleType:
    """tests/ is no package, so its helper is loaded from its file."""
    path = Path(__file__).with_name("synthetic.py")
    spec = importlib.util.spec_from_file_location("report_synthetic", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["report_synthetic"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    return load_synthetic()


@pytest.fixture
def results_file(synthetic, tmp_path: Path) -> Path:
    """A small complete run with failures of most kinds."""
    return synthetic.write(tmp_path / "results.jsonl", synthetic.make_records(300))


@pytest.fixture
def sbp(capsys):
    """Run ``sbp ...``; returns its exit code, stdout and stderr."""

    def run(*words: object) -> tuple[int, str, str]:
        try:
            code = main([str(word) for word in words])
        except SystemExit as stop:  # argparse
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
