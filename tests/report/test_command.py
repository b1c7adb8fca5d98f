"""sbp report: options, files, exit codes, and one clear line for what cannot be done."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys

import pytest

from sbp.escape import printable
from sbp.report.files import opened_for_writing
from sbp.report.results import read


def test_all_formats_beside_the_results(results_file, sbp):
    code, out, err = sbp("report", results_file, "--html", "--junit", "--sarif", "--markdown")
    assert (code, err) == (1, "")
    names = {path.name for path in results_file.parent.iterdir()}
    assert names == {"results.jsonl", "results.html", "results.xml", "results.sarif", "results.md"}
    assert "300 verdicts" in out
    assert json.loads(results_file.with_suffix(".sarif").read_text())["version"] == "2.1.0"
    assert results_file.with_suffix(".html").read_text().startswith("<!doctype html>")


def test_the_same_results_give_the_same_reports(results_file, sbp):
    formats = ["--html", "--junit", "--sarif", "--markdown"]
    sbp("report", results_file, *formats)
    first = {path.name: path.read_bytes() for path in results_file.parent.iterdir()}
    sbp("report", results_file, *formats)
    assert {path.name: path.read_bytes() for path in results_file.parent.iterdir()} == first


def test_terminal(results_file, sbp):
    results = read(results_file)
    code, out, _ = sbp("report", results_file)
    assert code == 1
    assert f"{len(results.unexpected)} unexpected" in out
    assert "--id" in out


def test_exit_codes(synthetic, tmp_path, sbp):
    records = synthetic.make_records(30)
    passing = [
        {**record, "verdict": "pass", "findings": [], "known": None}
        if record["kind"] == "verdict"
        else record
        for record in records
    ]
    path = tmp_path / "r.jsonl"
    for content, code in (
        (passing, 0),
        (records, 1),
        (passing[:-1], 3),
        (records[:-1], 3),
        (records[:1], 3),
        ([], 3),
    ):
        synthetic.write(path, content)
        assert sbp("report", path)[0] == code
        assert sbp("report", path, "--exit-zero")[0] == 0


def test_known_failures_are_marked_anew(synthetic, tmp_path, sbp, results_file):
    known = tmp_path / "known.toml"
    code, out, _ = sbp("report", results_file, "--known", "none")
    assert "known failures, as expected" not in out
    sbp("known", "update", results_file, "--known", known)
    results = read(results_file)
    flaky = sum(verdict.flaky for verdict in results.verdicts)
    code, out, _ = sbp("report", results_file, "--known", known, "--strict")
    assert code == (1 if flaky else 0)
    failed = sum(verdict.failed for verdict in results.verdicts)
    assert f"{failed - flaky} known failures, as expected" in out


def test_strict(synthetic, tmp_path, sbp):
    records = synthetic.make_records(5)
    for record in records[1:6]:
        record.update(verdict="pass", findings=[], known=None)
    path = synthetic.write(tmp_path / "r.jsonl", records)
    known = tmp_path / "known.toml"
    known.write_text(f'[[known]]\npattern = "{records[1]["id"]}"\nverdict = "hang"\nreason = "r"\n')
    code, _, err = sbp("report", path, "--known", known)
    assert code == 0
    assert "warning: known.toml:1:" in err
    code, _, err = sbp("report", path, "--known", known, "--strict", "--junit")
    assert code == 1
    assert "error: known.toml:1:" in err
    assert "every known failure still fails" in path.with_suffix(".xml").read_text()
    assert sbp("report", path, "--strict")[0] == 2
    gone = known.read_text().replace(records[1]["id"], "modules/Nothing/*")
    known.write_text(gone)
    assert sbp("report", path, "--known", known, "--strict")[0] == 0, (
        "nobody said that this was the whole run"
    )
    records[0]["whole"] = True
    synthetic.write(path, records)
    code, _, err = sbp("report", path, "--known", known, "--strict")
    assert code == 1
    assert "matches no trial" in err


def test_github(synthetic, results_file, tmp_path, sbp, monkeypatch):
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    code, out, _ = sbp("report", results_file, "--github")
    assert code == 1
    lines = out.splitlines()
    assert lines
    assert all(line.startswith(("::error", "::warning")) for line in lines)
    assert sum(line.startswith("::error") for line in lines) <= 10
    assert "unexpected failure" in summary.read_text()
    assert summary.stat().st_size < 1 << 20


def test_to_stdout(results_file, sbp):
    _, out, _ = sbp("report", results_file, "--junit", "-")
    assert out.startswith("<?xml")
    assert out.rstrip().endswith("</testsuites>")


def test_several_files_are_put_together(synthetic, tmp_path, sbp):
    one = synthetic.make_records(20)
    two = json.loads(json.dumps(one))
    for record in two:
        if record["kind"] == "verdict":
            record["id"] += "/float32"
    paths = synthetic.write(tmp_path / "a.jsonl", one), synthetic.write(tmp_path / "b.jsonl", two)
    assert "40 verdicts" in sbp("report", *paths)[1]


def test_bad_usage_is_one_line_and_harms_nothing(results_file, tmp_path, sbp):
    before = results_file.read_bytes()
    other = tmp_path / "other.jsonl"
    other.write_text("x")
    cases = [
        (["report", results_file, "--html", other], "would overwrite results"),
        (["report", results_file, "--junit", "-", "--sarif", "-"], "only one report can go to stdout"),
        (["report", results_file, "--junit", "-", "--github"], "only one report can go to stdout"),
        (["report", results_file, "--junit", tmp_path / "x", "--sarif", tmp_path / "x"], "to the same file"),
        (["report", results_file, "--html", tmp_path], "is a directory"),
        (["report", results_file, "--html", tmp_path / "no" / "x.html"], "cannot write"),
        (["report", tmp_path / "none.jsonl"], "cannot read results"),
        (["report", other], "not JSON"),
        (["report", results_file, "--compare", tmp_path / "none.jsonl", "--html"], "cannot read results"),
        (["report", results_file, "--known", tmp_path / "none.toml"], "cannot read known failures"),
    ]
    for words, message in cases:
        code, _, err = sbp(*words)
        assert code == 2, words
        assert message in err
        assert err.count("\n") == 1, err
    assert results_file.read_bytes() == before
    assert other.read_text() == "x"


def test_html_before_the_results_does_not_swallow_them(results_file, sbp):
    code, _, err = sbp("report", "--html", results_file)
    assert code == 2
    assert "the following arguments are required: RESULTS" in err
    assert read(results_file).complete


def test_a_full_disk_is_one_line(results_file):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    words = [sys.executable, "-m", "sbp.cli", "report", str(results_file), "--junit", "/dev/full"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away_is_no_traceback(results_file):
    command = f"{sys.executable} -m sbp.cli report {results_file} --junit - | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout == "<?xml vers"
    assert done.stderr == ""


def test_a_report_takes_the_old_ones_place_when_it_is_whole(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")

    def fail_half_way() -> None:
        with opened_for_writing(str(path)) as file:
            file.write("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail_half_way()
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]
    with opened_for_writing(str(path)) as file:
        file.write("new")
    assert path.read_text() == "new"
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real.html").write_text("old")
    (tmp_path / "link.html").symlink_to(tmp_path / "real.html")
    with opened_for_writing(str(tmp_path / "link.html")) as file:
        file.write("new")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "real.html").read_text() == "new"


def test_the_terminal_is_left_alone(synthetic, tmp_path, sbp):
    path = synthetic.write(tmp_path / "r.jsonl", synthetic.make_records(30, nasty=True))
    _, out, _ = sbp("report", path)
    _, out2, _ = sbp("diff", path, path)
    assert "\x1b" not in out + out2
    assert "\\x1b[31mred" in out
    assert printable("a\u202eb\x07\n\t") == "a\\x202eb\\x07\n\t"


def test_help_has_examples(sbp):
    for command in ("report", "diff", "merge", "known"):
        code, out, _ = sbp(command, "--help")
        assert code == 0
        assert "exit code" in out
