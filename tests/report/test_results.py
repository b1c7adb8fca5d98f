"""The reader: complete, incomplete and damaged results files."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sbp.report.github import annotate, annotations_of
from sbp.report.html import results_to_html
from sbp.report.junit import results_to_junit
from sbp.report.markdown import results_to_markdown
from sbp.report.results import (
    ResultsError,
    Run,
    Verdict,
    group_failures,
    read,
    read_records,
    short_name,
)
from sbp.report.sarif import results_to_sarif
from sbp.report.text import results_to_text


def test_reads_what_a_run_writes(synthetic, results_file):
    records = synthetic.make_records(300)
    results = read(results_file)
    assert results.complete
    assert results.run.versions["torch"] == "2.13.0+cpu"
    assert results.run.world_size == 4
    assert [verdict.id for verdict in results.verdicts] == [
        r["id"] for r in records if r["kind"] == "verdict"
    ]
    assert results.counts == {k: results.summary.counts[k] for k in results.counts}
    assert sum(results.counts.values()) == 300
    assert len(results.unexpected) == results.summary.unexpected > 0
    assert len(results.known) == results.summary.known > 0
    assert [item.line for item in results.inplace] == [42, 57]
    assert results.exit_code == 1
    failing = next(v for v in results.verdicts if v.verdict == "wrong gradient")
    assert failing.findings[0].quantity.endswith(".grad")
    assert "--id" in failing.command


def test_numbers_that_are_not_finite_come_as_text(tmp_path, synthetic):
    records = synthetic.make_records(5)
    for value in ("nan", "inf", "-inf", None, 1, 10**400):
        records[1]["findings"] = [{"quantity": "output", "relative_error": value}]
        results = read(synthetic.write(tmp_path / "r.jsonl", records))
        error = results.verdicts[0].findings[0].relative_error
        if value is None:
            assert error is None
        elif value == "nan":
            assert math.isnan(error)
        else:
            assert error == float(value) if not isinstance(value, int) or value == 1 else error == math.inf


def test_a_run_without_its_summary_is_incomplete(tmp_path, synthetic):
    records = synthetic.make_records(20)[:-1]
    results = read(synthetic.write(tmp_path / "r.jsonl", records))
    assert results.problems == ("there is no summary: the run did not come to its end",)
    assert results.exit_code == 3


@pytest.mark.parametrize("cut", [1, 2, 30, 300])
def test_a_torn_last_line_is_forgiven_and_incomplete(results_file, cut):
    content = results_file.read_bytes()
    results_file.write_bytes(content[:-cut])
    results = read(results_file)
    if cut == 1:  # only the line's end is missing: the record is whole
        assert results.complete
        return
    assert not results.complete
    assert results.torn or cut >= 300
    assert len(results.verdicts) == 300


def test_every_cut_of_a_file_can_be_read(tmp_path, synthetic):
    path = synthetic.write(tmp_path / "r.jsonl", synthetic.make_records(4, nasty=True))
    content = path.read_bytes()
    for end in range(0, len(content) - 1, 7):
        path.write_bytes(content[:end])
        assert not read(path).complete


def test_an_empty_file_is_an_incomplete_run(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"")
    results = read(path)
    assert results.run == Run()
    assert results.exit_code == 3
    assert "there is no verdict" in results.problems


def test_a_run_with_no_verdict_at_all_is_red(tmp_path, synthetic):
    records = synthetic.make_records(1)
    summary = {"kind": "summary", "planned": 0, "counts": {}, "known": 0, "unexpected": 0, "complete": True}
    results = read(synthetic.write(tmp_path / "r.jsonl", [records[0], summary]))
    assert results.problems == ("there is no verdict",)
    assert results.exit_code == 3


def test_verdicts_that_are_missing_make_it_incomplete(tmp_path, synthetic):
    records = synthetic.make_records(10)
    results = read(synthetic.write(tmp_path / "r.jsonl", records[:1] + records[2:]))
    assert results.problems == ("10 trials were planned, 9 have a verdict",)


def test_a_resumed_run_needs_a_new_summary(tmp_path, synthetic):
    records = synthetic.make_records(10)
    run, *verdicts, _, _, summary = records
    half = [run, *verdicts[:5], {**summary, "planned": 5}, run, *verdicts[5:]]
    assert "there is no summary" in read(synthetic.write(tmp_path / "r.jsonl", half)).problems[0]
    whole = read(synthetic.write(tmp_path / "r.jsonl", [*half, summary]))
    assert whole.complete
    assert len(whole.runs) == 2


LINE = '{"kind": "verdict", "id": "a", "verdict": "pass"}'


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ("{}", "no kind"),
        ('{"kind": 3}', "no kind"),
        (LINE.replace('"pass"', '"passed"'), "'passed' is not a verdict"),
        (LINE.replace('"pass"', "null"), "'verdict' must be text, not null"),
        (LINE.replace('"a"', '""'), "'id' is empty"),
        (LINE.replace('"id": "a", ', ""), "'id' must be text"),
        (LINE.replace("}", ', "findings": {}}'), "'findings' must be a list"),
        (LINE.replace("}", ', "findings": [3]}'), "must be an object"),
        (LINE.replace("}", ', "findings": [{"rank": "a"}]}'), "'rank' must be an integer"),
        (LINE.replace("}", ', "findings": [{"ranks": ["a"]}]}'), "'ranks' must be integers"),
        (LINE.replace("}", ', "findings": [{"relative_error": "much"}]}'), "must be a number"),
        (LINE.replace("}", ', "seconds": NaN}'), "NaN is not JSON"),
        (LINE.replace("}", ', "flaky": 1}'), "'flaky' must be true or false"),
        (LINE.replace("}", ', "placements": {"x": 1}}'), "'placements' of 'x' must be text"),
        (LINE.replace("}", ', "noise": {"x": 1}}'), "'noise' of 'x'"),
        (LINE.replace("}", ', "error": "boom"}'), "'error' must be an object"),
        (LINE.replace("}", ', "known": true}'), "'known' must be text"),
        ('{"kind": "summary", "planned": -1}', "must not be negative"),
        ('{"kind": "summary", "counts": {"pass": "many"}}', "'counts' of 'pass'"),
        ('{"kind": "inplace", "line": "x"}', "'line' must be an integer"),
        ("[" * 100_000, "not JSON"),
        ("1" * 10_000, "too many digits"),
    ],
)
def test_a_malformed_line_is_one_clear_line_with_its_number(tmp_path, line, words):
    path = tmp_path / "r.jsonl"
    path.write_text(f'{{"kind": "run", "format": 1}}\n{LINE}\n{line}\n{LINE.replace("a", "b", 1)}\n')
    with pytest.raises(ResultsError) as caught:
        read(path)
    message = str(caught.value)
    assert f"{path}:3: " in message
    assert words in message
    assert "\n" not in message
    assert len(message) < len(str(path)) + 250


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"kind": "run", "format": 1}\n\xff\xfe\n\n')
    with pytest.raises(ResultsError, match=":2: the line is not UTF-8"):
        read(path)


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (LINE, "must be of kind 'run'"),
        ('{"kind": "run"}', "format None"),
        ('{"kind": "run", "format": 2}', "format 2, this sbp reads format 1"),
    ],
)
def test_what_is_no_results_file(tmp_path, first, words):
    path = tmp_path / "r.jsonl"
    path.write_text(first + "\n")
    with pytest.raises(ResultsError, match=words):
        read(path)


def test_a_trial_that_occurs_twice(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(f'{{"kind": "run", "format": 1}}\n{LINE}\n{LINE}\n')
    with pytest.raises(ResultsError, match=":3: trial a occurs twice, first on line 2"):
        read(path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ResultsError, match="No such file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(ResultsError, match="Is a directory"):
        read(tmp_path)


def test_kinds_of_a_later_version_are_counted_not_lost(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"kind": "run", "format": 1}\n{"kind": "weather"}\n{"kind": "weather"}\n')
    assert read(path).unread == {"weather": 2}


def test_half_a_surrogate_pair_does_not_reach_the_reports(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"kind": "run", "format": 1}\n' + LINE.replace('"a"', '"a\\ud800b"') + "\n")
    assert read(path).verdicts[0].id == "a?b"


def test_it_streams(synthetic, results_file):
    records = read_records(results_file)
    assert isinstance(next(records), Run)
    assert isinstance(next(records), Verdict)
    with results_file.open("a") as file:
        file.write("{torn\n")
    assert isinstance(next(records), Verdict), "what was read before the damage is usable"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=80)
@given(data=st.data())
def test_any_value_in_any_field_is_reported_or_refused_in_one_line(tmp_path, synthetic, data):
    records = synthetic.make_records(3)
    records[1].update(
        verdict="error", error={"type": "E", "message": "m", "traceback": "t", "stacks": {"0": "s"}}
    )
    finding = {"quantity": "q", "verdict": "error", "rank": 0, "ranks": [0], "claimed": "B", "expected": "P"}
    finding.update(max_abs_error=1.0, relative_error=1.0, relation="r", detail="d")
    records[1].update(findings=[finding], origin={"file": "a.py", "line": 1, "module": "m", "operator": "o"})
    record = data.draw(st.sampled_from(records))
    inner = [value for value in record.values() if isinstance(value, dict) and value] + record.get(
        "findings", []
    )
    record = data.draw(st.sampled_from([record, *inner]))
    key = data.draw(st.sampled_from(sorted(record)))
    record[key] = data.draw(json_values)
    path = synthetic.write(tmp_path / "r.jsonl", json.loads(json.dumps(records)))
    try:
        results = read(path)
    except ResultsError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    ET.fromstring(results_to_junit(results).encode())
    json.dumps(results_to_sarif(results, "1"), allow_nan=False)
    for line in annotate(annotations_of(results)):
        assert "\n" not in line
    assert results_to_markdown(results)
    assert "\x1b" not in results_to_text(results)
    assert results_to_html(results, results).startswith("<!doctype html>")


def test_short_name():
    assert short_name("Linear(8,12):4x8") == "Linear"
    assert short_name("Linear-0:train") == "Linear"
    assert short_name("BatchNorm2d") == "BatchNorm2d"
    assert short_name("") == ""


def test_each_distinct_failure_once(results_file):
    results = read(results_file)
    groups = group_failures(results.verdicts)
    failed = [verdict for verdict in results.verdicts if verdict.failed]
    assert sum(len(members) for _, members in groups) == len(failed)
    assert len(groups) < len(failed)
    for simplest, members in groups:
        assert simplest in members
        assert len(simplest.placements) == min(len(member.placements) for member in members)


def test_needs_no_torch():
    code = "import sys, sbp.report.results; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
