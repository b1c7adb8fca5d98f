"""JUnit XML: well-formed whatever is in it, with the elements and attributes that Jenkins' schema allows."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbp.report.junit import JUnitCase, JUnitSuite, junit_xml, results_to_junit
from sbp.report.results import read

# Of the xUnit plugin's junit-10.xsd: element -> (attributes that it must have, that it may have, children).
ALLOWED = {
    "testsuites": (set(), {"name", "time", "tests", "failures", "errors"}, {"testsuite"}),
    "testsuite": (
        {"name", "tests", "failures", "errors"},
        {"group", "time", "skipped", "timestamp", "hostname", "id", "package", "file", "log", "url"},
        {"testsuite", "properties", "testcase", "system-out", "system-err"},
    ),
    "properties": (set(), set(), {"property"}),
    "property": ({"name", "value"}, set(), set()),
    "testcase": (
        {"name"},
        {"time", "classname", "group"},
        {"skipped", "error", "failure", "system-out", "system-err"},
    ),
    "failure": (set(), {"type", "message"}, set()),
    "error": (set(), {"type", "message"}, set()),
    "skipped": (set(), {"type", "message"}, set()),
    "system-out": (set(), set(), set()),
}
OUTCOMES = ("failure", "error", "skipped")


def check(text: str) -> ET.Element:
    """Parse and hold against the schema and against its own counts."""
    root = ET.fromstring(text.encode("utf-8"))
    assert root.tag == "testsuites"
    for element in root.iter():
        needed, optional, children = ALLOWED[element.tag]
        assert needed <= set(element.attrib) <= needed | optional, element.tag
        assert {child.tag for child in element} <= children
        if element.tag == "testcase":
            assert sum(child.tag in OUTCOMES for child in element) <= 1
        if "time" in element.attrib:
            assert re.fullmatch(r"\d+\.\d{3}", element.attrib["time"])
    for suite in (root, *root.iter("testsuite")):
        cases = list(suite.iter("testcase"))
        assert int(suite.attrib["tests"]) == len(cases)
        assert int(suite.attrib["failures"]) == sum(case.find("failure") is not None for case in cases)
        assert int(suite.attrib["errors"]) == sum(case.find("error") is not None for case in cases)
    return root


def test_one_test_case_for_each_case_and_one_for_the_run(results_file):
    results = read(results_file)
    root = check(results_to_junit(results))
    modules = root.find("testsuite[@name='sbp.modules.dtensor']")
    assert modules is not None
    cases = {case.attrib["name"]: case for case in modules.iter("testcase")}
    assert set(cases) == {verdict.case for verdict in results.verdicts}
    for name, case in cases.items():
        failing = [v for v in results.unexpected if v.case == name]
        assert (case.find("failure") is not None or case.find("error") is not None) == bool(failing)
        for verdict in failing[:1]:
            found = next(element for element in case if element.tag in OUTCOMES)
            assert f"{len(failing)} of " in found.attrib["message"]
            assert "--id" in (found.text or "")
            assert verdict.findings[0].relation[:20] in (found.text or "")
    known = {verdict.case for verdict in results.known}
    assert known
    for name in known:
        assert "known wrong layout" in (cases[name].findtext("system-out") or "")
    run = root.find("testsuite[@name='sbp.run']/testcase")
    assert run is not None
    assert len(run) == 0
    stamp = modules.attrib["timestamp"]
    assert stamp == "2026-10-01T12:00:00"
    assert modules.find("properties/property[@name='version.torch']") is not None


def test_an_incomplete_run_and_no_results_are_red(tmp_path, synthetic):
    records = synthetic.make_records(5, seed=3)
    passing = [{**record, "verdict": "pass", "findings": []} for record in records[1:6]]
    for some in ([records[0], *passing], records[:1], []):
        root = check(results_to_junit(read(synthetic.write(tmp_path / "r.jsonl", some))))
        assert root.attrib["errors"] == "1"
        assert "no summary" in root.find(".//error").attrib["message"]


def test_cases_that_are_refused_throughout_are_skipped(tmp_path, synthetic):
    records = synthetic.make_records(5)
    for record in records[1:6]:
        record.update(verdict="refused", case="same", findings=[{"relation": "NotImplementedError: no"}])
    root = check(results_to_junit(read(synthetic.write(tmp_path / "r.jsonl", records))))
    [skipped] = root.iter("skipped")
    assert skipped.attrib["message"] == "all trials refused: NotImplementedError: no"


def test_stale_known_failures_are_a_failure_when_they_are_given(results_file):
    root = check(results_to_junit(read(results_file), ["known.toml:3: a/*: passes"]))
    run = root.find("testsuite[@name='sbp.run']")
    assert run.attrib["failures"] == "1"
    assert "known.toml:3" in run.find(".//failure").text


def test_nasty_text(tmp_path, synthetic):
    results = read(synthetic.write(tmp_path / "r.jsonl", synthetic.make_records(30, nasty=True)))
    root = check(results_to_junit(results))
    text = "".join(root.itertext())
    assert "</script><script>alert(1)</script>" in text
    assert "\x1b" not in text


@given(st.text(), st.text())
def test_any_text_is_well_formed_and_comes_back(one, other):
    case = JUnitCase(one, other, 1.0, "failure", one, other, one, other)
    root = check(junit_xml([JUnitSuite(one, [case], {one: other})]))
    found = root.find(".//failure")
    legal = re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", one)
    assert found.attrib.get("type", "") == legal
    assert (found.text or "") == legal.replace("\r\n", "\n").replace("\r", "\n")


def test_long_texts_are_cut():
    case = JUnitCase("c", "n", 0, "failure", "t", "m" * 10_000, "b" * 1_000_000)
    root = check(junit_xml([JUnitSuite("s", [case])]))
    found = root.find(".//failure")
    assert len(found.attrib["message"]) == 1000
    assert len(found.text) < 61_000
    assert found.text.endswith("cut here")


def test_size_for_a_large_run(synthetic, tmp_path):
    results = read(synthetic.write(tmp_path / "r.jsonl", synthetic.make_records(5000)))
    text = results_to_junit(results)
    check(text)
    assert len(text) < 2_000_000


@pytest.mark.parametrize("seconds", [0, -1.0, 12345.6789])
def test_times(seconds):
    check(junit_xml([JUnitSuite("s", [JUnitCase("c", "n", seconds)])]))
