"""Scripts for failures: what they look for, how they are written, and that one of torch's own faults gets one."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sbp.repro.command import main
from sbp.repro.failure import NoScript, failure_of
from sbp.repro.make import check_cases, file_name, make_script, material_of, styles
from sbp.repro.render import Style, render
from sbp.repro.verify import Outcome
from sbp.session import Verdict
from sbp.trial import Trial
from sbp.verdict.judge import Finding

MSE = Trial("modules", "MSELoss(mean):8x4", "2", {"input": "S(0)"})
WRONG_GRADIENT = Verdict(
    MSE,
    "wrong gradient",
    [Finding("wrong gradient", "input.grad", 0, (0, 1), "S(0)", relation="2 x the reference")],
)


class OtherBench:
    """In place of ranks: whatever is run ends like this."""

    seed, timeout = 0, 1.0

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def run(self, *_: object) -> Outcome:
        return self.outcome


def raised(word: str, kind: str, message: str) -> Verdict:
    found = Finding(word, "", 0, (0,), relation=f"{kind}: {message}")
    return Verdict(MSE, word, [found], error={"type": kind, "message": message})


def test_a_failure_is_what_is_wrong_first() -> None:
    late = Finding("wrong state", "weight after step 1")
    failure = failure_of(replace(WRONG_GRADIENT, findings=[*WRONG_GRADIENT.findings, late]))
    assert [each.label for each in failure.wanted] == ["input.grad"]
    assert failure.backward and failure.steps == 0


def test_the_first_step_of_a_training_needs_no_optimizer() -> None:
    finding = Finding("wrong gradient", "weight.grad of step 1")
    failure = failure_of(replace(WRONG_GRADIENT, findings=[finding]))
    assert failure.wanted[0].label == "weight.grad" and failure.steps == 0
    finding = Finding("wrong state", "weight after step 2")
    assert failure_of(replace(WRONG_GRADIENT, findings=[finding])).steps == 2


@pytest.mark.parametrize(
    ("output", "code", "shown"),
    [
        ("input.grad: differs, 2 x", 1, True),
        ("input.grad: differs, 2 x", 0, False),
        ("target.grad: differs, 2 x", 1, False),
        ("input.grad: wrong layout: ...", 1, False),
        ("Traceback ... RuntimeError: no such thing", 1, False),
        ("", None, False),
    ],
)
def test_only_the_same_failure_counts(output: str, code: int | None, shown: bool) -> None:
    assert failure_of(WRONG_GRADIENT).shown_by(output, code) is shown


def test_errors_crashes_and_hangs_are_recognised() -> None:
    error = failure_of(raised("error", "RuntimeError", "size 4 is not 8"))
    assert error.shown_by("[rank0]: RuntimeError: size 2 is not 4", 1)
    assert not error.shown_by("[rank0]: ValueError: size 2 is not 4", 1)
    crash = failure_of(raised("crash", "crash", "ended by SIGFPE"))
    assert crash.shown_by("rank 1: ended by SIGFPE", -8) and not crash.shown_by("ended by SIGSEGV", -11)
    hang = failure_of(raised("hang", "hang", "no answer"))
    assert hang.shown_by("", None) and not hang.shown_by("RuntimeError: size", 1)


def test_a_script_reads_like_the_case() -> None:
    source = render(material_of(MSE), failure_of(WRONG_GRADIENT), Style(), "title", "repro.py")
    ast.parse(source)
    for line in (
        'PLACEMENTS = {\n    "input": [Shard(0)],\n}',
        'input = place("input", torch.randn(8, 4).requires_grad_())',
        'module = nn.MSELoss(reduction="mean")',
        "output = module(input, target)",
        'note("input.grad", input.grad)',
    ):
        assert line in source
    assert "sbp" not in source
    assert max(map(len, source.splitlines())) <= 120


@pytest.mark.parametrize(
    ("suite", "case", "placements", "quantity", "word", "line"),
    [
        ("modules", "BatchNorm1d(4):8x4:train", {"input": "S(1)"}, "running_mean", "wrong state", "module.running"),
        ("inplace", "add_:8x4", {"input": "P"}, "input afterwards", "lost write", "input.add_(other)"),
        ("inplace", "iadd:6x5", {"input": "P"}, "output", "wrong value", "input.add_(other)"),
        ("redistribute", "8x4->S(1)", {"input": "P"}, "output", "wrong value", "move(input, [Shard(1)])"),
        ("functions", "gelu:8x4", {"input": "P(max)"}, "output", "wrong value", "nn.functional.gelu(input)"),
        ("functions", "max(dim):8x4", {}, "output[0]", "wrong value", "note("),
    ],
)  # fmt: skip
@pytest.mark.parametrize("style", list(styles(2, 0)))
def test_scripts_of_all_suites_can_be_compiled(
    suite: str, case: str, placements: dict[str, str], quantity: str, word: str, line: str, style: Style
) -> None:
    trial = Trial(suite, case, "2", placements)
    failure = failure_of(Verdict(trial, word, [Finding(word, quantity)]))
    source = render(material_of(trial), failure, style, "title", "repro.py")
    compile(source, "repro.py", "exec")
    assert line in source
    assert ("HASH_SEEDS" in source) is bool(style.seeds)


@pytest.mark.parametrize(
    ("trial", "words"),
    [
        (replace(MSE, dtype="bfloat16"), "float64"),
        (replace(MSE, subject="spmd"), "DTensor"),
        (Trial("sources", "rand(64,64)->B", "2"), "random"),
    ],
)
def test_what_has_no_script_says_why(trial: Trial, words: str) -> None:
    with pytest.raises(NoScript, match=words):
        material_of(trial)


def test_a_script_that_does_not_fail_is_not_given_out() -> None:
    with pytest.raises(NoScript, match="nothing differs"):
        make_script(WRONG_GRADIENT, OtherBench(Outcome("", 0)))  # type: ignore[arg-type]
    with pytest.raises(NoScript, match="another way"):
        make_script(WRONG_GRADIENT, OtherBench(Outcome("RuntimeError: x", 1)))  # type: ignore[arg-type]


def test_file_names() -> None:
    assert file_name(MSE.id) == "repro_modules_MSELoss_mean_8x4_2_input_S_0.py"
    long = file_name("x/" * 200)
    assert len(long) < 110 and long != file_name("x/" * 201)


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.jsonl")]) == 2
    results = write_results(tmp_path)
    assert main([str(results), "--id", "no/such/trial"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "has no trial no/such/trial" in said[1]


@pytest.mark.parametrize(
    "hostile", ['"""\nraise SystemExit("got out")\n"""', '\\\\"""\nimport os\n', "\x1b[2J \\"]
)
def test_no_text_of_a_results_file_gets_out_of_the_docstring(hostile: str) -> None:
    trial = Trial("functions", "gelu:8x4", "2", {"input": "P"})
    finding = Finding("wrong value", "output", relation=hostile)
    failure = failure_of(Verdict(trial, "wrong value", [finding]))
    source = render(material_of(trial), failure, Style(), hostile, "repro.py")
    tree = ast.parse(source)
    other = failure_of(Verdict(trial, "wrong value", [Finding("wrong value", "output")]))
    plain = ast.parse(render(material_of(trial), other, Style(), "title", "repro.py"))
    assert [ast.dump(node) for node in tree.body[1:]] == [ast.dump(node) for node in plain.body[1:]]
    assert source.isprintable() or not set(source) - set(filter(str.isprintable, source)) - {"\n"}


@pytest.mark.parametrize(
    "quantity",
    [
        'exp_avg"]; raise SystemExit("got out"); ["x of weight after step 1',
        'weight after step 1: raise SystemExit("got out")',
    ],
)
def test_no_quantity_of_a_results_file_gets_out_of_its_string(quantity: str) -> None:
    placements, options = {"input": "S(0)"}, {"optimizer": "SGD"}
    trial = Trial("modules", "BatchNorm1d(4):8x4:train", "2", placements, "train", options)
    material = material_of(trial)
    plain = failure_of(Verdict(trial, "wrong state", [Finding("wrong state", "weight after step 1")]))
    assert "optimizer.step()" in render(material, plain, Style(), "title", "repro.py")
    failure = failure_of(Verdict(trial, "wrong state", [Finding("wrong state", quantity)]))
    try:
        source = render(material, failure, Style(), "title", "repro.py")
    except NoScript:
        return
    calls = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name) and node.id == "SystemExit"
    ]
    assert calls == []


def test_a_results_file_does_not_choose_the_code_that_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('was run')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NoScript, match=r"--cases evil\.py"):
        check_cases("evil.py", [])
    check_cases("evil.py", ["./evil.py"])
    check_cases("modules", [])


def write_results(folder: Path) -> Path:
    path = folder / "results.jsonl"
    summary = {
        "kind": "summary", "planned": 1, "verdicts": 1, "counts": {"wrong gradient": 1}, "known": 0, "unexpected": 1,
        "complete": True, "seconds": 1.0,
    }  # fmt: skip
    records = [{"kind": "run", "format": 1, "seed": 0}, WRONG_GRADIENT.to_dict("command"), summary]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.distributed
def test_a_script_for_a_fault_of_torch(tmp_path: Path) -> None:
    """torch 2.13 gives the gradient of a mean-squared error on a split input once for each rank."""
    command = [
        sys.executable,
        "-m",
        "sbp.cli",
        "repro",
        str(write_results(tmp_path)),
        "--output",
        str(tmp_path),
    ]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "made.json")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [record] = json.loads((tmp_path / "made.json").read_text())
    assert Path(record["script"]).is_file() and record["ranks"] == 2
