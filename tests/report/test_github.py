"""GitHub: escaped annotations, at most ten of a kind, a summary under 1 MiB; and the Markdown that goes there."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from sbp.escape import printable
from sbp.report.github import (
    MOST_SUMMARY_BYTES,
    Annotation,
    annotate,
    annotations_of,
    fit,
    workflow_command,
    write_summary,
)
from sbp.report.markdown import code, plain, results_to_markdown, table
from sbp.report.results import group_failures, read

GFM = MarkdownIt("gfm-like", {"html": True, "linkify": False})


def test_an_annotation():
    annotation = Annotation("error", "100% wrong\nreally", "a: b, c", "src/a.py", 3, 2)
    line = workflow_command(annotation)
    assert line == "::error file=src/a.py,line=3,col=2,title=a%3A b%2C c::100%25 wrong%0Areally"
    assert workflow_command(Annotation("notice", "m")) == "::notice::m"
    with pytest.raises(ValueError, match="no level"):
        workflow_command(Annotation("fatal", "m"))


@given(st.sampled_from(["error", "warning", "notice"]), st.text(), st.text(), st.text())
def test_no_text_can_start_another_command(level, message, title, path):
    line = workflow_command(Annotation(level, message, title, path))
    assert "\n" not in line
    assert "\r" not in line
    head, _, data = line[2:].partition("::")
    assert head.split(" ")[0] == level
    decoded = data.replace("%0A", "\n").replace("%25", "%")
    assert decoded == printable(message)


def test_no_more_than_ten_of_a_kind():
    annotations = [Annotation("error", f"e{n}") for n in range(25)] + [Annotation("warning", "w")] * 10
    lines = annotate(annotations)
    errors = [line for line in lines if line.startswith("::error")]
    assert len(errors) == 10
    assert errors[-1] == "::error::and 16 more; see the job's summary"
    assert sum(line.startswith("::warning") for line in lines) == 10


def test_annotations_of_a_run(synthetic, tmp_path):
    results = read(synthetic.write(tmp_path / "r.jsonl", synthetic.make_records(300)[:-1]))
    annotations = annotations_of(results, ["known.toml:3: a: passes"], strict=True)
    assert annotations[0].title == "sbp: incomplete run"
    failures = [one for one in annotations if one.title.startswith("sbp: ") and "--id" in one.message]
    assert len(failures) == len(group_failures(results.unexpected))
    assert annotations[-1] == Annotation("error", "known.toml:3: a: passes", "sbp: known failures")
    inplace = [one for one in annotations if one.title == "sbp: in-place operation"]
    assert [(one.path, one.line) for one in inplace] == [("my_model.py", 42), ("my_model.py", 57)]


def test_the_summary_stays_under_the_limit(tmp_path, monkeypatch):
    path = tmp_path / "summary.md"
    path.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    assert write_summary("é" * 79 + "\n" * 1)
    assert write_summary(("é" * 79 + "\n") * 20_000)
    content = path.read_bytes()
    assert len(content) < MOST_SUMMARY_BYTES
    assert content.decode().endswith("*The rest was cut: a summary may have 1 MiB.*\n")
    write_summary("more\n" * 100)
    assert len(path.read_bytes()) < MOST_SUMMARY_BYTES
    monkeypatch.delenv("GITHUB_STEP_SUMMARY")
    assert not write_summary("text")


@given(st.text(), st.integers(0, 200))
def test_fit(text, room):
    fitted = fit(text, room)
    assert fitted == text or len(fitted.encode()) < max(room, 1)


# ------------------------------------------------------------------------------------------------ Markdown


def rendered(text: str) -> str:
    return GFM.render(text)


def test_markdown_of_a_run(synthetic, results_file):
    results = read(results_file)
    text = results_to_markdown(results, ["known.toml:3: a/*: passes"])
    assert text.startswith(f"## ❌ sbp: {len(results.unexpected)} unexpected failures in 300 trials\n")
    html = rendered(text)
    assert html.count("<table>") == 3
    assert "known.toml:3" in text
    for worst, _ in group_failures(results.unexpected):
        assert code(worst.id) in text
    for word, count in results.counts.items():
        assert f"| {word} | {count} |" in text


def test_markdown_of_an_incomplete_run(synthetic, tmp_path):
    results = read(synthetic.write(tmp_path / "r.jsonl", synthetic.make_records(30)[:-1]))
    text = results_to_markdown(results)
    assert text.startswith("## ❌ sbp: incomplete run, 30 verdicts")
    assert "[!CAUTION]" in text


def test_nasty_text_makes_no_markup(synthetic, tmp_path):
    results = read(synthetic.write(tmp_path / "r.jsonl", synthetic.make_records(30, nasty=True)))
    html = rendered(results_to_markdown(results, [synthetic.NASTY]))
    tags = set(re.findall(r"<\s*/?\s*([a-zA-Z0-9]+)", html))
    lists = {"h2", "h3", "p", "ul", "li", "code", "strong", "em", "blockquote", "details", "summary", "br"}
    assert tags <= lists | {"table", "thead", "tbody", "tr", "th", "td"}


@given(st.text(min_size=1), st.text())
def test_cells_hold_any_text(one, other):
    html = rendered("\n".join(table(["a", "b", "c"], [[code(one), plain(other), "end"]])))
    assert html.count("<td>") == 3
    assert "<td>end</td>" in html


@given(st.text(min_size=1))
def test_code_spans_hold_any_text(text):
    html = rendered("x " + code(text) + " y")
    assert html.count("<code>") == 1
    assert html.startswith("<p>x <code>")
    assert html.endswith("</code> y</p>\n")


@given(st.text())
def test_plain_text_stays_text(text):
    html = rendered("x" + plain(text) + "y")
    assert set(re.findall(r"<\s*/?\s*([a-zA-Z]+)", html)) <= {"p"}


def test_no_one_is_mentioned():
    assert "@torvalds" not in plain("hello @torvalds")
