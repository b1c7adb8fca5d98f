"""Malformed arguments, known failures, results and tables: one clear line, exit code 2 or 3, no traceback."""

from __future__ import annotations

import gzip
import json
import os
import random
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import launch
from sbp import run
from sbp.cli import main as sbp_main
from sbp.lead import _taken_over, check_options
from sbp.report import results
from sbp.run import make_parser
from sbp.select import SelectionError, compile_expression
from sbp.signatures_table import FORMAT as TABLE_FORMAT
from sbp.usage import UsageError

many = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
    max_examples=120,
)
few = settings(many, max_examples=40)

# What an argument can hold: anything but NUL, with halves of surrogate pairs for bytes that are no text.
arguments = st.text(st.characters(exclude_characters="\0"), max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def is_clear(ended: Any, codes: tuple[int, ...] = (2, 3)) -> None:
    """One line that says what is wrong, or no complaint at all."""
    assert "Traceback" not in ended.err
    if ended.code in codes:
        assert len(ended.err.splitlines()) == 1, ended.err
        assert len(ended.err) > 15
    assert "\x1b" not in ended.err + ended.out


# ------------------------------------------------------------------------------------------- the runner


class _Side:
    """Stands for the planner: plans the trials of a results file, or none."""

    def __init__(self, trials: list[dict[str, Any]]) -> None:
        self.messages = [{"trials": trials}, {"done": True, "planned": len(trials), "skipped": {}}]

    def receive(self, timeout: float) -> Any:
        return self.messages.pop(0)

    def close(self) -> None:
        return


class _Job:
    """Stands for the ranks: none of these runs gets as far as to use them."""

    def __init__(self, trials: list[dict[str, Any]]) -> None:
        self.size, self.launcher, self.address, self.trials = 4, "none", "127.0.0.1", trials
        self.ranks = [types.SimpleNamespace(host="here")]
        self.on_new_world = self.worlds = None

    def side(self, entry: str, argument: Any) -> _Side:
        json.dumps(argument)
        return _Side(self.trials)

    def close(self) -> None:
        return


def _spawn_nothing(ranks: int, arguments: list[str]) -> int:
    print(f"no {ranks} ranks here", file=sys.stderr)
    return 3


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Nothing is started; what the planner is to say can be put into the list."""
    trials: list[dict[str, Any]] = []
    monkeypatch.setattr(launch, "start", lambda settings, ranks_per_world=None: _Job(trials))
    monkeypatch.setattr(launch, "spawn", _spawn_nothing)
    monkeypatch.setattr("sbp.foreign.offers", lambda subject, python: {"versions": {}, "names": []})
    return trials


# Any value of these would be a file or a folder that is made.
MAKING = ("--results", "--rank-logs")
OPTIONS = [word for action in make_parser()._actions for word in action.option_strings if word not in MAKING]
GOOD = [
    "Linear",
    "modules",
    "dtensor",
    "float64",
    "cpu",
    "4",
    "2x2",
    "input=S(0)",
    "60s",
    "1/2",
    "quick",
    "none",
]


@many
@given(st.lists(st.sampled_from(OPTIONS) | st.sampled_from(GOOD) | arguments, max_size=7))
def test_any_words_on_the_command_line(here: Path, no_ranks: list[Any], call: Any, words: list[str]) -> None:
    is_clear(call(run.main, *words))


@many
@given(st.sampled_from(OPTIONS), arguments)
def test_any_value_of_an_option(here: Path, no_ranks: list[Any], call: Any, option: str, value: str) -> None:
    ended = call(run.main, f"{option}={value}" if option.startswith("--") else f"{option}{value}")
    is_clear(ended)


@pytest.mark.parametrize(
    "words",
    [
        ("-n", "0"),
        ("-n", "-3"),
        ("-n", "99999999"),
        ("-n", "four"),
        ("--seed", "9" * 5000),
        ("--mesh", ""),
        ("--mesh", "0x4"),
        ("--mesh", "999999x999999x999999"),
        ("--mesh", "x".join(["1"] * 500)),
        ("--suite", "none"),
        ("--subject", "none"),
        ("--subject", "oneflow"),
        ("--subject", "oneflow", "--subject-python", "/no/such/python"),
        ("--subject", "oneflow", "--subject-python", os.path.dirname(__file__)),
        ("--dtype", "float7"),
        ("--device", "tpu"),
        ("--device", "cuda:"),
        ("--device", "cpu:\x1b[31m"),
        ("--placement", "input"),
        ("--placement", "=S(0)"),
        ("--placement", "input=S(" + "9" * 5000 + ")"),
        ("--placement", "input=" + "(" * 5000),
        ("-k", "(" * 5000),
        ("-k", "not " * 5000 + "a"),
        ("-k", "(" * 5000 + "a" + ")" * 5000),
        ("-k", "a and"),
        ("--budget", "nan"),
        ("--budget", "1e999h"),
        ("--timeout", "-1"),
        ("--timeout", ""),
        ("--shard", "0/0"),
        ("--shard", "3/2"),
        ("--shard", "1/" + "9" * 50),
        ("--known", "/no/such/file"),
        ("--known", "/"),
        ("--known", "/dev/zero"),
        ("--resume", "/no/such/file"),
        ("--resume", "/"),
        ("--resume", "/dev/zero"),
        ("--resume", "a.jsonl", "--results", "b.jsonl"),
        ("--results", "/no/such/folder/r.jsonl"),
        ("--results", "/"),
        ("--results", "/dev/full"),
        ("--results", "x" * 5000),
        ("--level", "all"),
        ("--no-such-option",),
        ("--id",),
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_nonsense_is_refused(here: Path, no_ranks: list[Any], call: Any, words: tuple[str, ...]) -> None:
    ended = call(run.main, *words)
    assert ended.code in (2, 3)
    is_clear(ended)


@many
@given(arguments)
def test_any_expression_selects_or_is_refused(text: str) -> None:
    try:
        assert compile_expression(text)("modules/Linear/4/all=B") in (True, False)
    except SelectionError as error:
        assert str(error)  # noqa: PT017


@few
@given(st.lists(st.sampled_from(OPTIONS[1:]).flatmap(lambda o: st.tuples(st.just(o), arguments)), max_size=4))
def test_options_are_checked_without_any_other_error(
    here: Path, call: Any, pairs: list[tuple[str, str]]
) -> None:
    def check(words: list[str]) -> int:
        try:
            check_options(make_parser().parse_args(words))
        except UsageError as error:
            assert str(error)  # noqa: PT017
        return 0

    call(check, *[word for pair in pairs for word in pair])


# -------------------------------------------------------------------------------------------- results files


@st.composite
def damaged(draw: Any, text: bytes) -> bytes:
    """The bytes with a few places changed, taken out, doubled or put in."""
    data = bytearray(text)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        length = draw(st.integers(1, 40))
        how = draw(st.sampled_from(["out", "twice", "other", "in", "cut"]))
        if how == "out":
            del data[at : at + length]
        elif how == "twice":
            data[at:at] = data[at : at + length]
        elif how == "other":
            data[at : at + 1] = draw(st.binary(min_size=1, max_size=2))
        elif how == "in":
            data[at:at] = draw(
                st.sampled_from([b"\n", b"\0", b"{", b"[" * 3000, b'"', b"1e999", b"\xff", b"\x1b["])
            )
        else:
            del data[at + length * 20 :]
    return bytes(data)


def replaced(data: Any, value: Any, rng: random.Random) -> Any:
    """A copy of a JSON tree with one place in it replaced."""
    copy = json.loads(json.dumps(data))
    place = copy
    while True:
        keys = list(range(len(place))) if isinstance(place, list) else list(place)
        if not keys:
            return copy
        key = rng.choice(keys)
        if isinstance(place[key], (dict, list)) and place[key] and rng.random() < 0.8:
            place = place[key]
            continue
        place[key] = value
        return copy


def commands_on(path: Path, folder: Path) -> list[tuple[Any, ...]]:
    known = folder / "k.toml"
    known.write_text("")
    return [
        (sbp_main, "report", path),
        (
            *(sbp_main, "report", path, "--html", folder / "r.html", "--junit", folder / "r.xml"),
            *("--sarif", folder / "r.sarif", "--markdown", folder / "r.md"),
        ),
        (sbp_main, "report", path, "--github"),
        (sbp_main, "diff", path, path, "--json", folder / "d.json", "--markdown", folder / "d.md"),
        (sbp_main, "merge", path, "-o", folder / "m.jsonl"),
        (sbp_main, "known", "check", path, "--known", known, "--strict"),
        (sbp_main, "known", "update", path, "--known", known),
    ]


@pytest.fixture(scope="module")
def lines(synthetic: Any) -> bytes:
    records = synthetic.make_records(12)
    return "".join(json.dumps(record) + "\n" for record in records).encode()


@few
@given(data=st.data())
def test_damaged_results(here: Path, lines: bytes, call: Any, data: Any) -> None:
    path = here / "r.jsonl"
    path.write_bytes(data.draw(damaged(lines)))
    for command in commands_on(path, here):
        is_clear(call(*command), codes=(2,))


@few
@given(value=json_values, seed=st.integers(0, 10**6))
def test_results_with_any_value_anywhere(here: Path, lines: bytes, call: Any, value: Any, seed: int) -> None:
    path, rng = here / "r.jsonl", random.Random(seed)
    records = [json.loads(line) for line in lines.splitlines()]
    records = replaced(records, value, rng)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    for command in commands_on(path, here):
        is_clear(call(*command), codes=(2,))


@few
@given(value=json_values, seed=st.integers(0, 10**6), data=st.data())
def test_a_run_is_resumed_or_refused(
    here: Path, lines: bytes, no_ranks: list[Any], call: Any, value: Any, seed: int, data: Any
) -> None:
    path, rng = here / "r.jsonl", random.Random(seed)
    if data.draw(st.booleans()):
        records = replaced([json.loads(line) for line in lines.splitlines()], value, rng)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        path.write_bytes(data.draw(damaged(lines)))
    no_ranks.clear()
    try:
        for record in results.read_records(path):
            if isinstance(record, results.Verdict):
                no_ranks.append(_taken_over(record).trial.to_dict())
    except results.ResultsError:
        no_ranks.clear()
    is_clear(call(run.main, "--resume", path, "--known", "none"))


@pytest.mark.parametrize("command", ["report", "diff", "merge", "known check"])
@pytest.mark.parametrize("path", ["/no/such/file", "/", "/dev/zero", "/proc/self/mem", "x" * 5000])
def test_what_is_no_results_file(here: Path, call: Any, command: str, path: str) -> None:
    more = {"diff": [path], "merge": ["-o", "m"]}.get(command, [])
    ended = call(sbp_main, *command.split(), path, *more)
    assert ended.code in (2, 3)
    is_clear(ended)


@pytest.mark.parametrize(
    "command", ["", "report", "diff", "merge", "known", "signatures", "audit", "lint", "doctor"]
)
@few
@given(words=st.lists(arguments.filter(lambda word: "/" not in word), min_size=1, max_size=3))
def test_any_words_for_any_command(here: Path, call: Any, command: str, words: list[str]) -> None:
    words = [word for word in words if word.strip(".")] or ["--nonsense"]
    if command in ("signatures", "audit", "doctor"):
        words = ["--nonsense=" + word for word in words]  # none that would import torch and judge operators
    is_clear(call(sbp_main, *command.split(), *words))


# ---------------------------------------------------------------------------------- known failures and tables


TOML = b"""\
# A file as people write it.
[[known]]
pattern = ["modules/A*", "modules/B/4/all=B"]
verdict = "wrong gradient"
reason = "for a test"
torch = "==2.13.*"
expires = 2027-01-01
quantity = "input.grad"
sometimes = true

[[known]]
pattern = "modules/C[0-9]*"
verdict = ["error", "hang"]
reason = '''long
[[known]]
text'''
"""
toml_values = st.sampled_from(
    [
        *(
            "1",
            "-1.5",
            "1e999",
            "nan",
            "true",
            '""',
            '"x"',
            "[]",
            "[1]",
            '["a", 2]',
            "{}",
            "{a=1}",
            "2027-13-45",
        ),
        *(
            "9" * 5000,
            "[" * 3000 + "]" * 3000,
            "'\\x1b[31m'",
            '"\\ud800"',
            '"\\u001b[2J"',
            "'''",
            "2027-01-01T00Z",
        ),
        *("0x" + "f" * 5000, '">=999999999999999999999999"', '"==*.*"', '"["', '"[!"', '"***************a"'),
    ]
)


@st.composite
def changed_toml(draw: Any) -> bytes:
    """The file with the value of one key replaced, or with a key or table that is not known."""
    text = TOML.decode().split("\n")
    at = draw(st.sampled_from([number for number, line in enumerate(text) if " = " in line]))
    key = draw(
        st.just(text[at].split(" = ")[0]) | st.sampled_from(["link", "colour", "known", '"a b"', "a.b"])
    )
    text[at] = f"{key} = {draw(toml_values)}"
    return "\n".join(text).encode()


@many
@given(content=damaged(TOML) | changed_toml())
def test_damaged_known_failures(
    here: Path, lines: bytes, no_ranks: list[Any], call: Any, content: bytes
) -> None:
    known, path = here / "k.toml", here / "r.jsonl"
    path.write_bytes(lines)
    for command in (
        (sbp_main, "known", "list", "--known", known),
        (sbp_main, "known", "check", path, "--known", known),
        (sbp_main, "report", path, "--known", known, "--markdown", here / "r.md"),
        (run.main, "--known", known),
        (sbp_main, "known", "update", path, "--known", known, "--prune"),
    ):
        known.write_bytes(content)
        is_clear(call(*command), codes=(2,))


TABLE: dict[str, Any] = {
    "format": TABLE_FORMAT,
    "torch": "2.13.0",
    "operators": {
        "add": {
            "dtype": "float64",
            "calls": [{"call": "add(4x4, 4x4)", "signatures": [[["S(0)", "S(0)"], 0, "S(0)", ["even"]]]}],
            "gradients": {"input": [{"call": "add(4x4)", "signatures": [[["B"], 0, "B", []]]}]},
            "left out": [],
        },
        "bad": {"error": "died"},
    },
}


@many
@given(value=json_values, seed=st.integers(0, 10**6), data=st.data())
def test_damaged_tables_of_signatures(here: Path, call: Any, value: Any, seed: int, data: Any) -> None:
    good, bad = here / "good.json", here / "bad.json"
    good.write_text(json.dumps(TABLE))
    content = json.dumps(replaced(TABLE, value, random.Random(seed))).encode()
    packed = data.draw(st.sampled_from([content, gzip.compress(content)]))
    bad.write_bytes(data.draw(st.just(packed) | damaged(packed)))
    for pair in ((good, bad), (bad, good), (bad, bad)):
        is_clear(call(sbp_main, "signatures", "--diff", *pair), codes=(2,))


def test_a_table_that_unpacks_to_more_than_the_memory(here: Path, call: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("sbp.signatures_table._MOST", 1 << 20)
    (here / "bomb.json.gz").write_bytes(gzip.compress(b" " * (2 << 20)))
    ended = call(sbp_main, "signatures", "--diff", "bomb.json.gz", "bomb.json.gz")
    assert ended.code == 2
    assert "longer than 1 MiB" in ended.err
    is_clear(ended)
