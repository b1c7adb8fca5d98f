"""Known failures: reading, matching, and that no entry can rot unseen."""

from __future__ import annotations

import glob
import subprocess
import sys
from datetime import date, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbp.known import SHIPPED, Entry, Known, KnownError, Pattern, Usage, describe_stale, load, load_known

ENTRY = """
# why this is here
[[known]]
pattern = "modules/MSELoss(mean)*/input=S(0)*"
verdict = ["wrong gradient", "wrong value"]
reason = "mean of a shard"
torch = "==2.13.*"
"""


def record(name: str, verdict: str = "wrong gradient", *quantities: str, **more: object) -> dict:
    findings = [{"quantity": quantity} for quantity in quantities]
    return {"id": name, "verdict": verdict, "findings": findings, "subject": "dtensor", **more}


def read(tmp_path: Path, text: str, torch: str | None = "2.13.0+cpu") -> Known:
    path = tmp_path / "known.toml"
    path.write_text(text)
    return load(path, torch)


HIT = "modules/MSELoss(mean):8x4/4/input=S(0),target=B"


def test_a_failure_is_known_by_id_verdict_and_version(tmp_path):
    known = read(tmp_path, ENTRY)
    entry = known.match(record(HIT))
    assert entry is not None
    assert entry.line == 3
    assert known.reason(record(HIT)) == "mean of a shard"
    assert known.match(record(HIT, "wrong value")) is entry
    assert known.match(record(HIT, "hang")) is None
    assert known.match(record(HIT, "pass")) is None
    assert known.match(record(HIT.replace("mean", "sum"))) is None
    assert known.match(record(HIT.replace("modules", "Modules"))) is None, "case matters"
    assert known.match(record(HIT), "2.14.0") is None
    assert known.match(record(HIT), "2.13.1.dev20260101+cu130") is entry


def test_the_first_entry_that_matches_explains(tmp_path):
    known = read(tmp_path, ENTRY + ENTRY.replace("mean of a shard", "second"))
    assert known.reason(record(HIT)) == "mean of a shard"


def test_quantity_must_hold_for_every_finding(tmp_path):
    known = read(tmp_path, ENTRY + 'quantity = "*.grad"\n')
    assert known.match(record(HIT, "wrong gradient", "input.grad", "weight.grad"))
    assert known.match(record(HIT, "wrong gradient", "input.grad", "output")) is None
    assert known.match(record(HIT, "wrong gradient")) is None


def test_subject(tmp_path):
    known = read(tmp_path, ENTRY + 'subject = "oneflow"\n')
    assert known.match(record(HIT)) is None
    assert known.match({**record(HIT), "subject": "oneflow"})


def test_an_expired_entry_no_longer_counts_and_is_reported(tmp_path):
    yesterday = date.today() - timedelta(days=1)
    known = read(tmp_path, ENTRY + f"expires = {yesterday}\n")
    assert known.match(record(HIT)) is None
    [stale] = Usage(known).stale(whole_run=False)
    assert stale.problem == "expired"
    assert str(yesterday) in stale.describe(known)
    later = read(tmp_path, ENTRY + f"expires = {date.today() + timedelta(days=1)}\n")
    assert later.match(record(HIT))
    assert Usage(later).stale(whole_run=False) == []


def usage_of(known: Known, *records: dict, whole_run: bool = True) -> list[str]:
    usage = Usage(known)
    for one in records:
        usage.add(one)
    return [stale.problem for stale in usage.stale(whole_run)]


def test_an_entry_that_passes_or_matches_nothing_is_stale(tmp_path):
    known = read(tmp_path, ENTRY)
    other = HIT.replace("target=B", "target=S(0)")
    assert usage_of(known, record(HIT)) == []
    assert usage_of(known, record(HIT), record(other, "pass")) == [], "one of the matching trials fails: fine"
    assert usage_of(known, record(HIT, "pass"), record(other, "noise")) == ["passes"]
    assert usage_of(known, record(HIT, "hang")) == ["passes"], "fails, but not as the entry says"
    assert usage_of(known, record("modules/Linear/4/all=B", "pass")) == ["matches nothing"]
    assert usage_of(known, record(HIT, "pass"), whole_run=False) == [], (
        "the trial that fails may be elsewhere"
    )
    assert usage_of(known, whole_run=False) == []


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("ops/add*", "ops/mul/4/all=B"),
        ("modules/Linear*/2/*", "modules/ReLU/2/all=B"),
        ("modules/*/4/x=*/float32", "modules/ReLU/4/y=P/float32"),
        ("*/4/x=*/cuda", "modules/ReLU/4/y=P/cuda"),
    ],
)
def test_a_pattern_for_what_the_run_did_not_have_is_not_judged(tmp_path, pattern, name):
    known = read(tmp_path, ENTRY.replace("modules/MSELoss(mean)*/input=S(0)*", pattern))
    elsewhere = record("modules/Linear/4/input=S(0)", "pass")
    assert usage_of(known, elsewhere) == []
    assert usage_of(known, elsewhere, record(name, "pass")) == ["matches nothing"]


def test_of_a_part_of_a_run_only_exact_ids_can_be_said_to_pass(tmp_path):
    exact = glob.escape(HIT)
    known = read(tmp_path, ENTRY.replace("modules/MSELoss(mean)*/input=S(0)*", exact))
    assert usage_of(known, record(HIT, "pass"), whole_run=False) == ["passes"]
    sometimes = read(tmp_path, ENTRY + "sometimes = true\n")
    assert usage_of(sometimes, record(HIT, "pass")) == []


def test_an_entry_for_another_torch_is_not_stale(tmp_path):
    assert usage_of(read(tmp_path, ENTRY, torch="2.12.0"), record(HIT, "pass")) == []


def test_each_pattern_of_a_list_is_held_to_its_word(tmp_path):
    text = ENTRY.replace('"modules/MSELoss(mean)*/input=S(0)*"', '["a/*", "b/*"]')
    known = read(tmp_path, text)
    usage = Usage(known)
    usage.add(record("a/1"))
    usage.add(record("b/1", "pass"))
    [stale] = usage.stale(whole_run=True)
    [line] = describe_stale(known, [stale])
    seen = "no trial is wrong gradient or wrong value any more (1 pass)"
    assert line == f"known.toml:3: b/*: {seen}; remove it (sbp known update)"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[known]", "not valid TOML"),
        ("other = 1", "unknown key 'other'"),
        ("known = 3", "write [[known]] above each entry"),
        ('[[known]]\npattern = "a"\nverdict = "wrong"\nreason = "r"', "'wrong' is not a failing verdict"),
        ('[[known]]\npattern = "a"\nverdict = "pass"\nreason = "r"', "'pass' is not a failing verdict"),
        ('[[known]]\npattern = "a"\nverdict = "hang"', "needs a reason"),
        ('[[known]]\nverdict = "hang"\nreason = "r"', "pattern must be a text or a list"),
        ('[[known]]\npattern = []\nverdict = "hang"\nreason = "r"', "pattern must be a text or a list"),
        ('[[known]]\npattern = "a"\nverdict = "hang"\nreason = 3', "reason must be text"),
        ('[[known]]\npattern = "a"\nverdict = "hang"\nreason = "r"\ntorch = "2.13"', "version specifier"),
        ('[[known]]\npattern = "a"\nverdict = "hang"\nreason = "r"\nexpires = "soon"', "must be a date"),
        ('[[known]]\npattern = "a"\nverdict = "hang"\nreason = "r"\nexpires = 3', "must be a date"),
        ('[[known]]\npattern = "a"\nverdict = "hang"\nreason = "r"\nsometimes = 1', "true or false"),
        ('[[known]]\npattern = "a"\nverdict = "hang"\nreason = "r"\nverdicts = 1', "unknown key 'verdicts'"),
    ],
)
def test_bad_files_are_one_clear_line(tmp_path, text, words):
    with pytest.raises(KnownError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert words in message
    assert "known.toml" in message
    assert "\n" not in message


def test_without_tomllib_the_same_is_read(tmp_path, monkeypatch):
    """Python 3.10 has no tomllib: tomlkit reads the file there."""
    text = ENTRY + "expires = 2100-01-31\nsometimes = true\n"
    first = read(tmp_path, text)
    monkeypatch.setattr("sbp.toml.sys", SimpleNamespace(version_info=(3, 10)))
    assert read(tmp_path, text) == first
    with pytest.raises(KnownError, match="not valid TOML"):
        read(tmp_path, "[[known]")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(KnownError, match="No such file"):
        load(tmp_path / "none.toml")
    with pytest.raises(KnownError, match="Is a directory"):
        load(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KnownError, match="not UTF-8"):
        load(binary)


def test_option():
    assert load_known("none").entries == ()
    assert load_known(None).path == (SHIPPED if SHIPPED.exists() else None)


@pytest.mark.skipif(not SHIPPED.exists(), reason="no known failures ship yet")
def test_the_file_that_ships_can_be_read():
    assert all(isinstance(entry, Entry) and entry.line for entry in load(SHIPPED).entries)


@given(st.text(min_size=1))
def test_an_escaped_id_matches_itself_and_is_exact(name):
    pattern = Pattern(glob.escape(name))
    assert pattern.matches(name)
    assert pattern.exact
    assert not pattern.matches(name + "x")


def test_needs_no_torch():
    code = "import sys, sbp.known; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
