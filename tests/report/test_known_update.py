"""sbp known update: comments stay, what passes goes, what fails comes in with patterns that match nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp.known import Usage, load, parse
from sbp.known_update import head_of, shortest_patterns, update_text
from sbp.report.results import Results, Verdict, apply_known, read

FILE = """\
# About this file: kept by hand.

# --- losses ---

# first: has a comment right above
[[known]]
pattern = "m/A/*"
verdict = "hang"   # trailing comment
reason = "first"

# second: two patterns
[[known]]
pattern = [
    "m/B/4/x=P",  # this one stays
    "m/B/4/x=B",  # this one goes
]
verdict = "wrong value"
reason = "second"

# --- norms ---

# third
[[known]]
pattern = "m/C/*"
verdict = ["wrong state", "crash"]
reason = "third"
# the end
"""


def results_of(**verdicts: str) -> Results:
    """Trials ``m_A_4_all=B="hang"`` and so on, as keyword arguments with slashes for double underscores."""
    made = []
    for name, verdict in verdicts.items():
        trial = name.replace("__", "/").replace("_", "=")
        raw = {"id": trial, "verdict": verdict, "subject": "dtensor", "findings": []}
        made.append(Verdict(trial, verdict, "m", "dtensor", trial.split("/")[1], raw=raw))
    return Results("r.jsonl", verdicts=tuple(made))


def update(text: str, results: Results, **options: object) -> tuple[str, list[str]]:
    return update_text(text, Path("known.toml"), results, whole_run=True, **options)  # type: ignore[arg-type]


FITTING = {
    "m__A__4__x_P": "hang",
    "m__A__4__x_B": "pass",
    "m__B__4__x_P": "wrong value",
    "m__B__4__x_B": "wrong value",
    "m__C__4__x_B": "wrong state",
}


def test_nothing_to_change():
    assert update(FILE, results_of(**FITTING)) == (FILE, [])


def test_a_pattern_that_passes_goes_and_comments_stay():
    new, notes = update(FILE, results_of(**{**FITTING, "m__B__4__x_B": "pass"}))
    assert notes == ["removed: m/B/4/x=B: passes"]
    assert new == FILE.replace('    "m/B/4/x=B",  # this one goes\n', "")


def test_an_entry_that_passes_goes_with_its_own_comment_and_no_other():
    new, notes = update(FILE, results_of(**{**FITTING, "m__A__4__x_P": "noise"}))
    assert notes == ["removed: m/A/*: passes"]
    entry = FILE[FILE.index("# first") : FILE.index("# second")]
    assert new == FILE.replace(entry, "")
    new, _ = update(FILE, results_of(**{**FITTING, "m__B__4__x_B": "pass", "m__B__4__x_P": "pass"}))
    assert new == FILE.replace(FILE[FILE.index("# second") : FILE.index("# --- norms")], "")
    new, _ = update(FILE, results_of(**{**FITTING, "m__C__4__x_B": "pass"}))
    assert "third" not in new
    assert "second" in new
    assert new.startswith("# About this file: kept by hand.\n\n# --- losses ---\n\n# first")


def test_all_entries_may_go():
    new, _ = update(FILE, results_of(**dict.fromkeys(FITTING, "pass")))
    assert "[[known]]" not in new
    assert new.startswith("# About this file: kept by hand.")


def test_a_failure_of_another_kind_corrects_the_verdict_in_place():
    new, notes = update(FILE, results_of(**{**FITTING, "m__A__4__x_P": "crash"}))
    assert new == FILE.replace('verdict = "hang"   # trailing', 'verdict = "crash"   # trailing')
    assert notes == ["corrected: m/A/*: crash"]


def test_what_matches_nothing_stays_unless_pruned():
    results = results_of(**{name: word for name, word in FITTING.items() if "A" not in name})
    new, notes = update(FILE, results)
    assert new == FILE
    assert "matches no trial" in notes[0]
    assert '"m/A/*"' not in update(FILE, results, prune=True)[0]


def test_new_failures_are_added_at_the_end():
    results = results_of(
        **FITTING, m__D__4__x_P="lost write", m__D__4__x_B="lost write", m__D__2x2__x_B="pass"
    )
    new, notes = update(FILE, results, reason='say "why"', link="https://example.org/1")
    assert new.startswith(FILE)
    added = new[len(FILE) :]
    assert 'pattern = "m/D/4/*"' in added
    assert 'say \\"why\\"' in added or "'say \"why\"'" in added
    assert 'link = "https://example.org/1"' in added
    assert 'subject = "dtensor"' in added
    assert len(notes) == 1
    assert update(new, results) == (new, []), "twice changes nothing"
    assert update(FILE, results, add=False) == (FILE, [])


def test_a_flaky_failure_is_not_written_down():
    results = results_of(m__D__4__x_P="hang")
    raw = {**results.verdicts[0].raw, "flaky": True}
    [verdict] = results.verdicts
    flaky = Verdict(**{**vars(verdict), "flaky": True, "raw": raw})
    assert update(FILE, Results(verdicts=(flaky,)))[0] == FILE


def test_what_an_expired_entry_says_is_not_added_again():
    text = '[[known]]\npattern = "m/A/*"\nverdict = "hang"\nreason = "r"\nexpires = 2020-01-01\n'
    new, notes = update(text, results_of(m__A__4__x_P="hang"))
    assert new == text
    assert "expired on 2020-01-01" in notes[0]


@pytest.mark.parametrize("seed", range(3))
def test_on_a_large_run_everything_is_explained_and_nothing_else(synthetic, tmp_path, seed):
    results = read(synthetic.write(tmp_path / "r.jsonl", synthetic.make_records(1500, seed)))
    path = tmp_path / "known.toml"
    path.write_text(update("", results)[0])
    known = load(path)
    judged, usage = apply_known(results, known)
    assert [verdict for verdict in judged.unexpected if not verdict.flaky] == []
    assert usage.stale(whole_run=True) == []
    for verdict in results.verdicts:
        if not verdict.failed:
            assert all(entry.pattern_for(verdict.raw) is None for entry in known.entries)
    assert update(path.read_text(), results) == (path.read_text(), [])
    other = read(synthetic.write(tmp_path / "r.jsonl", synthetic.make_records(1500, seed, torch="2.14.0")))
    assert len(apply_known(other, known)[0].known) == 0, "the entries are for 2.13"


ids = st.builds(
    lambda case, mesh, placed, rest: f"s/m.py/{case}/{mesh}/{placed}{rest}",
    st.sampled_from(["A", "A[0]", "B*"]),
    st.sampled_from(["4", "2x2"]),
    st.sampled_from(["x=S(0)", "x=S(0),y=P", "x=(S(0),B),y=(B,P)", "grad_x=S(0)", "all=B"]),
    st.sampled_from(["", "/train/optimizer=SGD", "/float32"]),
)


@settings(deadline=None)
@given(st.dictionaries(ids, st.booleans(), min_size=1))
def test_shortest_patterns_match_all_that_is_meant_and_nothing_else(fails):
    verdicts = [
        Verdict(name, "hang" if bad else "pass", case=name.split("/")[1]) for name, bad in fails.items()
    ]
    everyone: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        everyone.setdefault(head_of(verdict), []).append(verdict)
    members = [verdict for verdict in verdicts if verdict.failed]
    patterns = shortest_patterns(members, everyone)
    text = "".join(
        f'[[known]]\npattern = {pattern!r}\nverdict = "hang"\nreason = "r"\n' for pattern in patterns
    )
    path = Path("known.toml")
    known = parse(text, path)
    usage = Usage(known)
    for verdict in verdicts:
        record = {"id": verdict.id, "suite": "s/m.py", "verdict": verdict.verdict, "findings": []}
        usage.add(record)
        assert (known.match({**record, "verdict": "hang"}) is not None) == verdict.failed
    assert usage.stale(whole_run=True) == []
    assert len(patterns) <= len(members)


def test_the_command(synthetic, tmp_path, sbp):
    path = synthetic.write(tmp_path / "r.jsonl", synthetic.make_records(300))
    known = tmp_path / "known.toml"
    code, out, _ = sbp("known", "update", path, "--known", known)
    assert code == 0
    assert "known.toml: changed" in out
    code, out, err = sbp("known", "check", path, "--known", known, "--strict")
    flaky = sum(verdict.flaky for verdict in read(path).verdicts)
    assert f"{flaky} unexpected, 0 entries to put right" in out
    assert (code, err) == (1 if flaky else 0, "")
    assert "nothing to change" in sbp("known", "update", path, "--known", known)[1]
    code, out, _ = sbp("known", "list", "--known", known)
    assert code == 0
    assert "known.toml:4: " in out
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert sbp("known", "check", path, "--known", known)[0] == 3


def test_bad_input_is_one_line(tmp_path, sbp, results_file):
    for words, message in (
        (["known", "check", tmp_path / "none", "--known", tmp_path / "k"], "cannot read results"),
        (["known", "check", results_file, "--known", tmp_path / "k"], "cannot read known failures"),
        (["known", "list", "--known", tmp_path], "cannot read known failures"),
        (["known", "update", results_file, "--known", tmp_path / "no/such"], "cannot write"),
    ):
        code, out, err = sbp(*words)
        assert code == 2, words
        assert err.count("\n") == 1
        assert message in err
        assert out == ""
    bad = tmp_path / "bad.toml"
    bad.write_text("[[known]\n")
    code, _, err = sbp("known", "update", results_file, "--known", bad)
    assert code == 2
    assert "not valid TOML" in err
    assert bad.read_text() == "[[known]\n"
