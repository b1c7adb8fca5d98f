"""The pages that are made by a script are current, and every page is reached from the first."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from sbp.known import SHIPPED, load

DOCS = Path(__file__).parents[2] / "docs"


def test_the_findings_are_those_of_the_known_failures() -> None:
    script = DOCS / "make_findings.py"
    ran = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    page = (DOCS / "findings-torch.md").read_text(encoding="utf-8")
    assert all(entry.reason in page for entry in load(SHIPPED).entries)


def test_every_page_is_in_the_index() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "index.md").read_text(encoding="utf-8")))
    assert linked == {path.name for path in DOCS.glob("*.md")} - {"index.md"}
