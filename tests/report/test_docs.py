"""What the pages about reports, known failures and CI say beside their commands (those: tests/docs)."""

from __future__ import annotations

import re
from pathlib import Path

from sbp.known import load
from sbp.report.results import read

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).with_name("data")


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_the_entry_of_the_page_can_be_read(tmp_path):
    (tmp_path / "known.toml").write_text(blocks("known-failures.md", "toml")[0])
    [entry] = load(tmp_path / "known.toml").entries
    assert entry.sometimes
    assert entry.link


def test_the_page_names_every_variable_of_the_stage():
    documented = set(re.findall(r"^\| `(SBP_[A-Z]+)`", (ROOT / "docs/ci.md").read_text(), re.MULTILINE))
    assert documented == set(
        re.findall(r"^#   (SBP_[A-Z]+)=", (ROOT / "ci/distributed.sh").read_text(), re.MULTILINE)
    )
    assert all(
        (ROOT / path).exists()
        for path in re.findall(r"`((?:ci/|action)[\w./-]+)`", (ROOT / "docs/ci.md").read_text())
    )


def test_what_a_real_run_wrote_is_read_in_full():
    """A file of sbp.run, as it is: every field that it writes has its place in the reader."""
    results = read(DATA / "results.jsonl")
    assert results.complete
    assert results.unread == {}
    for verdict in results.verdicts:
        known = set(type(verdict).__dataclass_fields__) | {"kind"}
        assert set(verdict.raw) <= known
        for finding, raw in zip(verdict.findings, verdict.raw["findings"], strict=True):
            assert set(raw) <= set(type(finding).__dataclass_fields__)
