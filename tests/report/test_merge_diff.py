"""Shards put together, and two runs compared."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest

from sbp.report.diff import compare, to_json, to_markdown, to_text
from sbp.report.merge import MergeError, merge
from sbp.report.results import read


def shards_of(synthetic, tmp_path, records, count):
    """The run's verdicts dealt out to ``count`` files, each a whole run of its own."""
    run, *rest = records
    verdicts = [record for record in rest if record["kind"] == "verdict"]
    paths = []
    for number in range(1, count + 1):
        mine = verdicts[number - 1 :: count]
        bad = [v for v in mine if v["verdict"] not in ("pass", "noise", "refused")]
        summary = {
            **rest[-1],
            "planned": len(mine),
            "known": sum(v["known"] is not None for v in bad),
            "unexpected": sum(v["known"] is None for v in bad),
        }
        part = [{**run, "shard": f"{number}/{count}"}, *mine, summary]
        paths.append(synthetic.write(tmp_path / f"shard-{number}.jsonl", part))
    return paths


def test_shards_merged_give_the_verdicts_of_one_run(synthetic, tmp_path, sbp):
    records = synthetic.make_records(100)
    whole = read(synthetic.write(tmp_path / "whole.jsonl", records))
    paths = shards_of(synthetic, tmp_path, records, 3)
    out = tmp_path / "all.jsonl"
    code, _, err = sbp("merge", *reversed(paths), "-o", out)
    assert (code, err) == (0, "")
    merged = read(out)
    assert merged.complete
    assert {v.id: v.raw for v in merged.verdicts} == {v.id: v.raw for v in whole.verdicts}
    assert merged.summary.planned == 100
    assert merged.summary.unexpected == whole.summary.unexpected
    assert merged.summary.known == whole.summary.known
    assert len(merged.runs) == 3
    assert compare(whole, merged).counts["same"] + compare(whole, merged).counts["still"] == 100
    assert sbp("merge", *paths, "-o", tmp_path / "again.jsonl")[0] == 0
    assert (tmp_path / "again.jsonl").read_bytes() == out.read_bytes(), (
        "the order of the files does not matter"
    )


def test_a_shard_with_nothing_to_do_is_fine(synthetic, tmp_path, sbp):
    records = synthetic.make_records(3)
    paths = shards_of(synthetic, tmp_path, records, 5)
    assert [len(read(path).verdicts) for path in paths] == [1, 1, 1, 0, 0]
    assert sbp("merge", *paths, "-o", tmp_path / "all.jsonl")[0] == 0
    assert sbp("merge", *paths[3:], "-o", tmp_path / "none.jsonl")[0] == 3


def test_a_missing_or_killed_shard_makes_the_whole_incomplete(synthetic, tmp_path, sbp):
    paths = shards_of(synthetic, tmp_path, synthetic.make_records(60), 3)
    code, _, err = sbp("merge", paths[0], paths[2], "-o", tmp_path / "all.jsonl")
    assert code == 3
    assert "shard 2 of 3 is missing" in err
    assert read(tmp_path / "all.jsonl").exit_code == 3
    content = paths[1].read_bytes()
    paths[1].write_bytes(content[: len(content) // 2])
    code, _, err = sbp("merge", *paths, "-o", tmp_path / "all.jsonl")
    assert code == 3
    assert "shard-2.jsonl: the last line is cut off" in err
    assert read(tmp_path / "all.jsonl").exit_code == 3


def test_worlds_of_different_sizes_are_put_together(synthetic, tmp_path, sbp):
    one = synthetic.make_records(40)
    two = copy.deepcopy(one)
    two[0]["world"]["size"] = 2
    for record in two[1:]:
        if record["kind"] == "verdict":
            record.update(id=record["id"].replace("/4/", "/2/").replace("/2x2/", "/1x2/"), mesh="2")
    paths = synthetic.write(tmp_path / "4.jsonl", one), synthetic.write(tmp_path / "2.jsonl", two)
    assert sbp("merge", *paths, "-o", tmp_path / "all.jsonl")[0] == 0
    merged = read(tmp_path / "all.jsonl")
    assert merged.complete
    assert len(merged.verdicts) == 80
    assert [run.world_size for run in merged.runs] == [4, 2]


def test_the_same_file_twice_counts_once(synthetic, tmp_path):
    results = read(synthetic.write(tmp_path / "r.jsonl", synthetic.make_records(30)))
    merged = merge([results, results])
    assert merged.complete
    assert len(merged.verdicts) == 30


def test_what_does_not_belong_together_is_refused(synthetic, tmp_path, sbp):
    records = synthetic.make_records(30)
    path = synthetic.write(tmp_path / "a.jsonl", records)
    other = copy.deepcopy(records)
    other[1]["verdict"] = "hang"
    cases = {
        "is of torch 2.13.0+cpu": synthetic.make_records(30, torch="2.14.0"),
        "has the seed 0": [{**records[0], "seed": 1}, *records[1:]],
        "merge files of one run only": other,
    }
    for words, made in cases.items():
        code, out, err = sbp("merge", path, synthetic.write(tmp_path / "b.jsonl", made), "-o", tmp_path / "c")
        assert (code, out) == (2, "")
        assert words in err
        assert err.count("\n") == 1
        assert not (tmp_path / "c").exists()
    code, _, err = sbp("merge", path, "-o", path)
    assert code == 2
    assert "write to another" in err
    assert read(path).complete
    with pytest.raises(MergeError):
        merge([])


# ------------------------------------------------------------------------------------------------- diff


def changed(records, **verdicts):
    """A copy whose n-th verdict is another: ``v3="hang"``; None takes it out."""
    records = copy.deepcopy(records)
    for name, verdict in verdicts.items():
        record = records[int(name[1:])]
        if verdict is None:
            records[int(name[1:])] = None
        else:
            record.update(verdict=verdict, known=None, findings=[])
    kept = [record for record in records if record is not None]
    kept[-1]["planned"] = sum(record["kind"] == "verdict" for record in kept)
    return kept


@pytest.fixture
def base(synthetic):
    """Ten passing trials."""
    records = synthetic.make_records(10)
    return changed(records, **{f"v{n}": "pass" for n in range(1, 11)})


def diff_of(synthetic, tmp_path, old, new):
    return compare(
        read(synthetic.write(tmp_path / "old.jsonl", old)), read(synthetic.write(tmp_path / "new.jsonl", new))
    )


def test_every_state(synthetic, tmp_path, base):
    old = changed(base, v1="hang", v2="hang", v3="wrong value", v4=None, v9=None)
    new = changed(base, v2="hang", v3="crash", v4="wrong state", v5="wrong gradient", v6=None, v7="noise")
    new[7]["known"] = None
    known = changed(new, v8="error")
    next(r for r in known if r.get("verdict") == "error")["known"] = "a reason"
    diff = diff_of(synthetic, tmp_path, old, known)
    states = {change.verdict.id: change.state for change in diff.changes}
    names = {n: base[n]["id"] for n in range(1, 11)}
    assert states == {
        names[1]: "fixed",
        names[2]: "still",
        names[3]: "changed",
        names[4]: "new",
        names[5]: "new",
        names[6]: "gone",
        names[7]: "same",
        names[8]: "same" if known[7]["verdict"] == "pass" else "new known",
        names[9]: "added" if known[8]["verdict"] == "pass" else "new known",
        names[10]: "same",
    }
    assert diff.exit_code == 1
    text = to_text(diff)
    assert "wrong gradient (was pass)" in text
    assert "wrong state (was not there)" in text
    assert "crash (was wrong value)" in text
    assert "2 new, 1 changed, 1 fixed, 1 still failing" in text
    assert "2 new, 1 changed" in to_markdown(diff)
    data = to_json(diff)
    assert json.loads(json.dumps(data)) == data
    assert [entry["new"] for entry in data["changed"]] == ["crash"]


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ({}, {}, 0),
        ({"v1": "hang"}, {}, 0),
        ({"v1": "hang"}, {"v1": "hang"}, 0),
        ({}, {"v1": "hang"}, 1),
        ({"v1": "hang"}, {"v1": "crash"}, 1),
        ({}, {"v1": "refused"}, 0),
        ({}, {"v1": "noise"}, 0),
        ({"v1": None}, {"v1": "hang"}, 1),
        ({}, {"v1": None}, 0),
    ],
)
def test_exit_code(synthetic, tmp_path, base, sbp, old, new, code):
    paths = (
        synthetic.write(tmp_path / "old.jsonl", changed(base, **old)),
        synthetic.write(tmp_path / "new.jsonl", changed(base, **new)),
    )
    assert sbp("diff", *paths)[0] == code


def test_a_known_failure_is_not_new(synthetic, tmp_path, base, sbp):
    new = changed(base, v1="hang")
    new[1]["known"] = "it is known"
    paths = synthetic.write(tmp_path / "old.jsonl", base), synthetic.write(tmp_path / "new.jsonl", new)
    code, out, _ = sbp("diff", *paths)
    assert code == 0
    assert "New, but known failures" in out


def test_an_incomplete_new_run_is_red(synthetic, tmp_path, base, sbp):
    paths = synthetic.write(tmp_path / "old.jsonl", base), synthetic.write(tmp_path / "new.jsonl", base[:-1])
    code, _, err = sbp("diff", *paths)
    assert code == 3
    assert "no summary" in err
    assert sbp("diff", *reversed(paths))[0] == 0


def test_two_subjects_are_compared_by_id(synthetic, tmp_path, base):
    new = copy.deepcopy(base)
    for record in new:
        record["subject"] = "spmd"
    assert diff_of(synthetic, tmp_path, base, new).counts["same"] == 10


def test_reports_of_the_diff(synthetic, tmp_path, base, sbp):
    old = synthetic.write(tmp_path / "old.jsonl", base)
    new = synthetic.write(tmp_path / "new.jsonl", changed(base, v1="hang"))
    targets = [tmp_path / name for name in ("d.json", "d.md", "d.html")]
    code, out, _ = sbp("diff", old, new, "--json", targets[0], "--markdown", targets[1], "--html", targets[2])
    assert code == 1
    assert "1 new" in out
    assert json.loads(targets[0].read_text())["counts"]["new"] == 1
    assert targets[1].read_text().startswith("## ❌ sbp: 1 new")
    assert "<!doctype html>" in targets[2].read_text()
    code, out, _ = sbp("diff", old, new, "--json", "-")
    assert json.loads(out)["counts"]["new"] == 1
    code, _, err = sbp("diff", old, tmp_path / "none")
    assert code == 2
    assert err.count("\n") == 1


def test_nothing_here_needs_torch():
    code = (
        "import sys\n"
        "import sbp.report.command, sbp.report.diff, sbp.report.merge, sbp.known_command\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
