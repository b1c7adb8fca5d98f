"""SARIF: valid by the official schema, within GitHub's limits, with fingerprints that survive edits."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from sbp.report.results import read
from sbp.report.sarif import MOST_RESULTS, Place, Result, Rule, line_fingerprints, results_to_sarif, sarif_log

SCHEMA = json.loads(Path(__file__).with_name("sarif-2.1.0.schema.json").read_text())
RULE = Rule("SBP101", "AugmentedAssignment", "An augmented assignment on a distributed tensor.")


def check(log: dict) -> dict:
    """Validate a log, also as the text that is written, and return its run."""
    validator = jsonschema.Draft202012Validator(SCHEMA, format_checker=jsonschema.FormatChecker())
    problems = [f"{'/'.join(map(str, e.path))}: {e.message}" for e in validator.iter_errors(log)]
    assert problems == []
    assert json.loads(json.dumps(log)) == log
    return log["runs"][0]


def test_the_schema_can_refuse():
    log = sarif_log("1", [RULE], [Result("SBP101", "m", Place("a.py", 1))])
    log["runs"][0]["results"][0]["level"] = "bad"
    with pytest.raises(AssertionError, match="'bad' is not one of"):
        check(log)


def test_a_finding(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a model.py").write_text("import torch\n\nx += y\n")
    place = Place(str(tmp_path / "src/a model.py"), 3, 1, 3, 7)
    related = [(Place("src/b.py", 9), "called here")]
    run = check(sarif_log("1.2", [RULE], [Result("SBP101", "x += y", place, related=related)], root=tmp_path))
    [result] = run["results"]
    location = result["locations"][0]["physicalLocation"]
    assert location["artifactLocation"] == {"uri": "src/a%20model.py", "uriBaseId": "%SRCROOT%"}
    assert location["region"] == {"startLine": 3, "startColumn": 1, "endLine": 3, "endColumn": 7}
    assert result["level"] == "warning"
    assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == "SBP101"
    assert result["relatedLocations"][0]["message"]["text"] == "called here"


def test_a_file_outside_of_the_repository_has_an_absolute_uri(tmp_path):
    place = Place("/somewhere/else/é.py", 1)
    run = check(sarif_log("1", [RULE], [Result("SBP101", "m", place)], root=tmp_path))
    location = run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]
    assert location == {"uri": "file:///somewhere/else/%C3%A9.py"}


def test_fingerprints_are_those_of_githubs_upload_action():
    """The values stand in the tests of github/codeql-action."""
    assert line_fingerprints("") == ["c129715d7a2bc9a3:1"]
    assert line_fingerprints(" a\nb\n  \t\tc\n d") == [
        "271789c17abda88f:1",
        "54703d4cd895b18:1",
        "180aee12dab6264:1",
        "a23a3dc5e078b07b:1",
    ]
    greeting = " hello; \t\nworld!!!\r\n\n\r  \t\tGreetings\r End\r\n"
    assert line_fingerprints(greeting)[0] == "e9496ae3ebfced30:1"
    assert len(line_fingerprints(greeting)) == 7
    repeated = line_fingerprints("Lorem ipsum dolor sit amet.\n" * 10)
    assert repeated[5:7] == ["a7f2ff13bc495cf2:6", "a7f2ff1481e87703:1"]


def test_a_fingerprint_survives_lines_above_and_tells_lines_apart(tmp_path):
    def fingerprints(text: str, *lines: int) -> list[str]:
        results = [Result("SBP101", "m", Place("a.py", line)) for line in lines]
        run = check(sarif_log("1", [RULE], results, root=tmp_path, read_source=lambda path: text))
        return [result["partialFingerprints"]["primaryLocationLineHash"] for result in run["results"]]

    code = "x += y\n" + "z = 1\n" * 60 + "x += y\n" + "z = 1\n" * 60
    first, second = fingerprints(code, 1, 62)
    assert first != second
    assert fingerprints("# new\n" + code, 2, 63) == [first, second]


def test_a_fingerprint_without_the_source_depends_on_the_finding(tmp_path):
    results = [Result("SBP101", message, Place("gone.py", 4)) for message in ("m", "n", "m")]
    run = check(sarif_log("1", [RULE], results, root=tmp_path))
    one, other, again = (r["partialFingerprints"]["primaryLocationLineHash"] for r in run["results"])
    assert one == again != other


def test_no_more_results_than_github_shows_and_the_gravest_of_them():
    results = [Result("SBP101", f"m{n}", Place("a.py", n + 1), "note") for n in range(MOST_RESULTS)]
    results.append(Result("SBP101", "grave", Place("a.py", 1), "error"))
    run = sarif_log("1", [RULE], results)["runs"][0]
    assert len(run["results"]) == MOST_RESULTS
    assert run["results"][0]["message"]["text"] == "grave"
    assert "1 more finding" in run["invocations"][0]["toolExecutionNotifications"][0]["message"]["text"]


def test_long_texts_of_rules_are_cut():
    rule = Rule("SBP101", "Name", "x" * 5000)
    [written] = check(sarif_log("1", [rule], []))["tool"]["driver"]["rules"]
    assert len(written["fullDescription"]["text"]) == 1024


@pytest.mark.parametrize("nasty", [False, True])
def test_a_run(synthetic, tmp_path, nasty):
    records = synthetic.make_records(2000, nasty=nasty)
    if nasty:
        records[1]["origin"] = {"file": synthetic.NASTY, "line": -3}
        records[-2].update(file="../../" + synthetic.NASTY, source=synthetic.NASTY, outcome=synthetic.NASTY)
    results = read(synthetic.write(tmp_path / "r.jsonl", records))
    run = check(results_to_sarif(results, "1.0", tmp_path))
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    found = [result["ruleId"] for result in run["results"]]
    assert set(found) == set(rules)
    assert found.count("inplace-changed-placement") == 1
    homed = [verdict for verdict in results.unexpected if verdict.origin]
    assert sum(not name.startswith("inplace") for name in found) == len(homed) > 5
    notes = run["invocations"][0]["toolExecutionNotifications"]
    assert (
        f"{len(results.unexpected) - len(homed)} failures have no source line" in notes[-1]["message"]["text"]
    )


def test_an_incomplete_run_says_so(synthetic, tmp_path):
    results = read(synthetic.write(tmp_path / "r.jsonl", synthetic.make_records(20)[:-1]))
    [invocation] = check(results_to_sarif(results, "1.0"))["invocations"]
    assert invocation["executionSuccessful"] is False
