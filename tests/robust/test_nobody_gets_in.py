"""Case files are a person's own code and are run; nothing else that is read is. Nobody else is let in.

What is promised, and how far it goes, stands in docs/security.md; here is a test for each sentence of it.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from launch.folder import PrivateFolder, remove_left_behind
from launch.process import children
from launch.ranks import Announced, keep_mpi_on_loopback
from launch.spawn import find_mpirun
from sbp.known_command import main as known
from sbp.ranks import Ranks
from sbp.report.command import main as report
from sbp.report.diff import main as diff
from sbp.report.merge import main as merge

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(
    path for folder in ("sbp", "launch", "ci", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)

# ------------------------------------------------------------------------------------------ read as data

# What could run what it is given -> in which files it stands, and why that is no way in.
TAKES_THE_USERS_OWN = "what is named on the command line by the person who runs it"
BETWEEN_OWN_PROCESSES = "from a process that this one has forked, over a pipe that nobody else has"
WRITTEN_HERE = (
    "a script that sbp repro has just written; tests/repro looks that no text gets out of its strings"
)
NAMES_OF_OURS = "names of modules of this project that stand in its source, or come from its own supervisor"
REASONS: dict[tuple[str, str], str] = {
    (
        "pickle",
        "sbp/conform.py",
    ): "a case of the calling process for the ranks that it started; over a socket in a folder that only "
    "this user enters",
    ("multiprocessing", "sbp/apart.py"): BETWEEN_OWN_PROCESSES,
    ("multiprocessing", "sbp/signatures_table.py"): BETWEEN_OWN_PROCESSES,
    ("concurrent.futures", "sbp/inplace/lint/files.py"): BETWEEN_OWN_PROCESSES,
    ("concurrent.futures", "sbp/inplace/lint/fix_command.py"): BETWEEN_OWN_PROCESSES,
    ("runpy", "sbp/repro/warm.py"): WRITTEN_HERE,
    ("run_path", "sbp/repro/warm.py"): WRITTEN_HERE,
    ("import_module", "sbp/suites/users.py"): TAKES_THE_USERS_OWN,
    ("spec_from_file_location", "sbp/suites/users.py"): TAKES_THE_USERS_OWN,
    ("exec_module", "sbp/suites/users.py"): TAKES_THE_USERS_OWN,
    ("import_module", "sbp/conform.py"): TAKES_THE_USERS_OWN,
    ("spec_from_file_location", "sbp/conform.py"): TAKES_THE_USERS_OWN,
    ("exec_module", "sbp/conform.py"): TAKES_THE_USERS_OWN,
    ("load_module", "sbp/suites/users.py"): TAKES_THE_USERS_OWN,
    (
        "exec_module",
        "sbp/subjects/oneflow_preload.py",
    ): "delegates to the loader of an import that is under way",
    ("import_module", "sbp/subjects/foreign.py"): TAKES_THE_USERS_OWN,
    ("import_module", "sbp/__init__.py"): NAMES_OF_OURS,
    ("import_module", "sbp/cli.py"): NAMES_OF_OURS,
    ("import_module", "sbp/completion.py"): NAMES_OF_OURS,
    ("import_module", "sbp/suites/__init__.py"): NAMES_OF_OURS,
    ("import_module", "launch/warm.py"): NAMES_OF_OURS,
    ("import_module", "launch/worker.py"): NAMES_OF_OURS,
}
UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "dbm"}
MODULES = UNPICKLERS | {"multiprocessing", "concurrent.futures", "yaml", "runpy", "code", "xmlrpc", "pty"}
BUILTINS = {"eval", "exec", "compile", "__import__", "execfile", "input"}
CALLS = {
    *("import_module", "spec_from_file_location", "exec_module", "load_module", "run_path", "run_module"),
    *("literal_eval", "read_pickle", "mktemp", "system", "popen"),
    # torch.distributed's collectives of objects unpickle what arrives.
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}


def name_of(node: ast.expr) -> str:
    """The dotted name of what is called; empty for anything else."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value) or '?'}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def can_run_what_it_reads(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The places of a source that could run what they are given: what, and the line."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [n.name for n in node.names]
            for name in names:
                found = [one for one in MODULES if name == one or name.startswith(one + ".")]
                if found and not (isinstance(node, ast.ImportFrom) and node.level):
                    yield found[0], node.lineno
        if not isinstance(node, ast.Call):
            continue
        name = name_of(node.func)
        last = name.rpartition(".")[2]
        keywords = {word.arg: word.value for word in node.keywords}
        if name in BUILTINS:
            yield name, node.lineno
        elif last in CALLS and not (node.args and isinstance(node.args[0], ast.Constant)):
            yield last, node.lineno
        elif name in ("torch.load", "numpy.load", "np.load"):
            safe = keywords.get("weights_only" if name == "torch.load" else "allow_pickle")
            wanted = name == "torch.load"
            if not (isinstance(safe, ast.Constant) and safe.value is wanted):
                yield name, node.lineno
        shell = keywords.get("shell")
        if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
            yield "shell=True", node.lineno


def test_nothing_that_ships_could_run_what_it_reads_but_for_the_known_places() -> None:
    found = {
        (what, str(path.relative_to(ROOT))): line
        for path in SHIPPED
        for what, line in can_run_what_it_reads(ast.parse(path.read_text()))
        if not str(path.relative_to(ROOT)).startswith("benchmarks/")
    }
    new = {key: line for key, line in found.items() if key not in REASONS}
    assert new == {}, "these could run what they are given"
    assert set(REASONS) <= set(found), "these reasons are for nothing"


@pytest.mark.parametrize(
    "source",
    [
        "eval(text)",
        "exec(text)",
        "import pickle",
        "from multiprocessing import Pipe",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(line, shell=True)",
        "os.system(line)",
        "importlib.import_module(name)",
        "dist.broadcast_object_list(values)",
        "import yaml",
    ],
)
def test_the_search_finds(source: str) -> None:
    assert list(can_run_what_it_reads(ast.parse(source)))


def test_the_page_makes_no_markup_of_text() -> None:
    templates = ROOT / "sbp" / "report" / "templates"
    makes_markup = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setTimeout\(['\"]"
    )
    for path in templates.glob("*.js"):
        assert not makes_markup.search(path.read_text()), path
    for path in templates.glob("*.j2"):
        # The style and the script are files of this project.
        assert set(re.findall(r"\{\{\s*(\w+)\s*\|\s*safe", path.read_text())) <= {"style", "script"}


MARK = "somebody_got_in"


class Evil:
    """Unpickled, it writes a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {MARK}",)


TEXTS = {
    "python": f"__import__('os').system('touch {MARK}')",
    "pickle": pickle.dumps(Evil(), 0).decode("latin-1"),
    "yaml": f"!!python/object/apply:os.system ['touch {MARK}']",
    "jinja": "{{ ''.__class__.__mro__[1].__subclasses__() }}{% include '/etc/passwd' %}{{ 7 * 191 }}",
    "format": "{0.__class__.__init__.__globals__} %(id)s ${HOME} $(touch " + MARK + ")",
    "shell": f"; touch {MARK} #`touch {MARK}`",
    "markup": "</script><script>document.title='in'</script><img src=x onerror=alert(1)><!--",
    "xml": "]]><!DOCTYPE a [<!ENTITY b SYSTEM 'file:///etc/passwd'>]>&b;<?xml version='1.0'?><failure/>",
    "rich": "[bold red]x[/bold red][link=file:///etc/passwd]y[/link][/]",
    "terminal": "\x1b[2J\x1b]0;title\x07\x1b]8;;http://evil\x07\x9b31m\u202e\x08\x7f\r",
    "path": "../../../../etc/cron.d/x\x00/" + "y" * 300,
    "workflow": "\n::set-env name=PATH::/evil\n##[command]x\n::stop-commands::x",
}

# Recorded by Python itself, whatever the code that is run looks like.
WATCHED = """\
import os, sys
seen = []
RUNS = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pty.spawn",
        "socket.bind", "socket.connect", "ctypes.dlopen", "shutil.rmtree", "code.__new__")

def watch(event, arguments):
    if event in RUNS:
        seen.append([event, repr(arguments)[:200]])
    elif event == "open" and not isinstance(arguments[0], int):  # a number is a file that is open already
        path, mode, flags = arguments
        if set(mode) & set("wax+") if mode else flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            seen.append(["write", str(path)])
    elif event == "import" and arguments[0] in ("evil", "torch"):
        seen.append(["import", arguments[0]])

sys.path.insert(0, sys.argv[3])
from sbp.cli import main  # what it imports is its own
import sbp.report.command, sbp.report.diff, sbp.report.merge, sbp.known_command, sbp.signatures_cli
import sbp.inplace.lint.command, sbp.report.html, rich.console, jinja2
import json
sys.addaudithook(watch)
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit:
        pass
sys.stdout.flush()
found = list(seen)
json.dump(found, open(sys.argv[2], "w"))
"""


def put_everywhere(value: Any, text: str) -> Any:
    """A record with the text in all of its fields that are text, but for those that say what it is."""
    if isinstance(value, dict):
        return {
            key: part if key in ("kind", "verdict", "trial") else put_everywhere(part, text)
            for key, part in value.items()
        }
    if isinstance(value, list):
        return [put_everywhere(part, text) for part in value]
    return f"{value}{text}" if isinstance(value, str) else value


def hostile_results(synthetic: Any, path: Path, text: str) -> Path:
    """A results file whose every text holds ``text``."""
    records = [put_everywhere(record, text) for record in synthetic.make_records(24, nasty=True)]
    for record in records:
        record.pop("known", None)
        for name in ("mesh", "dtype", "device"):
            if isinstance(record.get(name), str):
                record[name] = record[name].removesuffix(text)
    written: Path = synthetic.write(path, records)
    return written


def hostile_known(path: Path, text: str) -> Path:
    quoted = json.dumps(text, ensure_ascii=True).replace("\\u0000", " ")
    path.write_text(f'[[failure]]\nid = {quoted}\nverdicts = ["error"]\nreason = {quoted}\n')
    return path


@pytest.mark.parametrize("kind", sorted(TEXTS))
def test_results_known_failures_and_sources_are_read_as_data(here: Path, synthetic: Any, kind: str) -> None:
    text = TEXTS[kind]
    results = hostile_results(synthetic, here / "r.jsonl", text)
    hostile_known(here / "known.toml", text)
    # For the lint a source is text as well.
    (here / "evil.py").write_text(
        f"open({MARK!r}, 'w').close()\nimport torch\nx = torch.ones(2)\nx += 1  # {text!a}\n"
    )
    (here / "table.json").write_text(json.dumps({"torch": text, "operators": {text: {"calls": [text]}}}))
    (here / "pyproject.toml").write_text(f"[tool.sbp.lint]\nexclude = [{json.dumps(text)}]\n")
    (here / "conftest.py").write_text(f"open({MARK!r}, 'w').close()\n")
    commands = [
        ["report", str(results), "--html", "o.html", "--junit", "o.xml", "--sarif", "o.sarif"],
        ["report", str(results), "--markdown", "o.md", "--github"],
        ["report", str(results), "--known", "known.toml"],
        ["diff", str(results), str(results)],
        ["merge", str(results), "-o", "o.jsonl"],
        ["known", "list", "--known", "known.toml"],
        ["known", "check", str(results), "--known", "known.toml"],
        ["signatures", "--diff", "table.json", "table.json"],
        ["lint", "evil.py"],
        ["lint", "--diff", "evil.py"],
    ]
    script = here / "watched_by_python"
    script.write_text(WATCHED)
    ended = subprocess.run(
        [sys.executable, "-I", "-B", str(script), json.dumps(commands), "seen.json", str(ROOT)],
        capture_output=True,
        timeout=100,
    )
    assert b"Traceback" not in ended.stderr, ended.stderr.decode("utf-8", "replace")
    seen = json.loads((here / "seen.json").read_text())
    written = {Path(what).name for event, what in seen if event == "write"}
    others = [item for item in seen if item[0] != "write"]
    assert others == []
    # Files appear under a name of their own first, then take the place of the one that was asked for.
    wanted = {"o.html", "o.xml", "o.sarif", "o.md", "o.jsonl"}
    assert {re.sub(r"^\.(.*)\.\w{8}$", r"\1", name) for name in written} <= wanted
    given = {"r.jsonl", "known.toml", "evil.py", "table.json", "pyproject.toml", "conftest.py"}
    made = {path.name for path in here.rglob("*")} - given - {script.name, "seen.json"}
    assert made == wanted, "no file is named after what is in the data"
    assert_page_has_no_markup_of(here / "o.html")
    ElementTree.parse(here / "o.xml")
    json.loads((here / "o.sarif").read_text())
    assert_nothing_steers(ended.stdout + ended.stderr)


class Tags(HTMLParser):
    """The elements and attributes of a page, without what stands in scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attributes}


def assert_page_has_no_markup_of(path: Path) -> None:
    page = Tags()
    page.feed(path.read_text())
    assert page.tags.count("script") == 2 and page.tags.count("style") == 1
    assert page.tags.count("form") == 1, "its own"
    assert not {"img", "iframe", "object", "embed", "base"} & set(page.tags)
    assert not {name for name in page.attributes if name.startswith("on")}


# Anything but line ends and tabs that moves the cursor, colours, rings or reorders.
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def assert_nothing_steers(output: bytes) -> None:
    assert STEERS.findall(output.decode("utf-8", "replace")) == []


def test_the_made_up_texts_would_be_seen() -> None:
    assert STEERS.search(TEXTS["terminal"])
    page = Tags()
    page.feed(f"<p>{TEXTS['markup']}")
    assert "script" in page.tags and "onerror" in page.attributes


class Screen:
    """A terminal that keeps what it is sent."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        return

    def isatty(self) -> bool:
        return True


def test_a_diff_of_a_source_does_not_steer_a_terminal(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sbp.inplace.lint.command import main as lint

    (here / "a.py").write_text(
        "from torch.distributed.tensor import distribute_tensor\n\n\ndef f(mesh, y):\n"
        "    x = distribute_tensor(y, mesh)\n    x = x * 2\n    x += y  # \x1b[2J\x1b]0;t\x07\n    return x\n"
    )
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    lint(["--diff", "--level", "likely", "a.py"])
    assert "\\x1b[2J" in screen.text, "the test needs a fix of that line"
    assert not STEERS.search(screen.text)


def test_a_live_terminal_shows_text_from_elsewhere_as_text(
    here: Path, synthetic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = hostile_results(synthetic, here / "r.jsonl", TEXTS["terminal"] + TEXTS["rich"])
    hostile_known(here / "known.toml", TEXTS["terminal"])
    commands: list[tuple[Callable[[list[str]], int], list[str]]] = [
        (report, [str(path)]),
        (diff, [str(path), str(path)]),
        (merge, [str(path), "-o", "m.jsonl"]),
        (known, ["list", "--known", "known.toml"]),
        (known, ["check", str(path), "--known", "known.toml"]),
    ]
    for main, words in commands:
        screen = Screen()
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setattr(sys, "stderr", screen)
        main(words)
        monkeypatch.undo()
        monkeypatch.chdir(here)
        assert screen.text and not STEERS.search(screen.text), (main, words)


# ------------------------------------------------------------------------------------------------ sockets


def listens_everywhere(tree: ast.AST) -> Iterator[int]:
    """The lines of a source that open a listener on all of the host's addresses."""
    everywhere = {"", "0.0.0.0", "::", None}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        last = name_of(node.func).rpartition(".")[2]
        if last in ("create_server", "bind") and node.args and isinstance(node.args[0], ast.Tuple):
            address = node.args[0].elts[0]
            if isinstance(address, ast.Constant) and address.value in everywhere:
                yield node.lineno
        keywords = {word.arg: word.value for word in node.keywords}
        master = keywords.get("is_master")
        holds = not (isinstance(master, ast.Constant) and master.value is False)
        # Left to itself, torch's store listens on all addresses.
        if last == "TCPStore" and (holds or master is None):
            given = {"master_listen_fd", None}  # None: **options
            if not given & set(keywords):
                yield node.lineno


def test_nothing_that_ships_listens_on_all_addresses() -> None:
    shipped = [path for path in SHIPPED if path.parent.name != "benchmarks"]
    assert [
        (str(path), line) for path in shipped for line in listens_everywhere(ast.parse(path.read_text()))
    ] == []
    for source in (
        "socket.create_server(('', 0))",
        "s.bind(('0.0.0.0', 80))",
        "TCPStore(a, 0, 2, is_master=True)",
    ):
        assert list(listens_everywhere(ast.parse(source)))


@pytest.mark.parametrize(("local", "here_alone"), [("4", True), ("2", False)])
def test_mpi_is_kept_on_loopback_where_all_ranks_are_on_one_host(
    monkeypatch: pytest.MonkeyPatch, local: str, here_alone: bool
) -> None:
    monkeypatch.setattr(os, "environ", {"MPI_LOCALNRANKS": local, "FI_TCP_IFACE": "chosen"})
    keep_mpi_on_loopback(Announced("mpich", 4, 0))
    assert os.environ.get("UCX_NET_DEVICES") == ("lo" if here_alone else None)
    assert os.environ["FI_TCP_IFACE"] == "chosen", "what a person has set stays"


def listeners() -> dict[str, str]:
    """The listening TCP sockets of this machine: inode -> address, as the kernel writes it."""
    found = {}
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(name).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                found[words[9]] = words[1].partition(":")[0]
    return found


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def sockets_of(mark: str) -> dict[str, set[str]]:
    """The sockets of all processes under the mark: inode -> the processes' command lines."""
    found: dict[str, set[str]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"SBP_TEST_MARK={mark}".encode() not in (entry / "environ").read_bytes():
                continue
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            for file in (entry / "fd").iterdir():
                inode = re.match(r"socket:\[(\d+)\]", os.readlink(file))
                if inode:
                    found.setdefault(inode[1], set()).add(words)
        except OSError:
            continue
    return found


WAITING_CASE = """\
import os, time
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from sbp import case


class Waits(nn.Module):
    def forward(self, x):
        while isinstance(x, DTensor) and os.path.exists("go_on_waiting"):
            time.sleep(0.02)
        return x * 2


@case
def waits():
    return Waits(), torch.randn(4, 3, dtype=torch.float64)
"""
SPAWN = "import sys; from launch.spawn import spawn_here; sys.exit(spawn_here(2, sys.argv[1:]))"


@pytest.mark.distributed
@pytest.mark.parametrize("launcher", ["mpirun", "spawned"])
def test_a_job_on_one_host_listens_on_loopback_alone_and_leaves_no_file(here: Path, launcher: str) -> None:
    (here / "cases.py").write_text(WAITING_CASE)
    (here / "go_on_waiting").touch()
    temporary = here / "temporary"
    temporary.mkdir(mode=0o755)
    mpirun, mark = find_mpirun(), f"listens-{launcher}-{os.getpid()}"
    assert mpirun is not None
    start = [mpirun, "-n", "2", sys.executable] if launcher == "mpirun" else [sys.executable, "-c", SPAWN]
    process = subprocess.Popen(
        [*start, "-m", "sbp.run", "cases.py", "--mesh", "2", "--placement", "x=B", "--level", "quick"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "SBP_TEST_MARK": mark, "TMPDIR": str(temporary)},
    )
    try:
        end = time.monotonic() + 100
        seen: list[tuple[str, set[str]]] = []
        # The workers' store comes last.
        while not any("launch.warm" in line for _, words in seen for line in words):
            assert time.monotonic() < end and process.poll() is None, seen
            time.sleep(0.1)
            open_here = listeners()
            seen = [
                (open_here[inode], words)
                for inode, words in sockets_of(mark).items()
                # mpirun's own socket is inherited by all that it starts; it is no doing of ours.
                if inode in open_here and not any("mpirun" in line.split("-n")[0] for line in words)
            ]
        folders = [path for path in temporary.iterdir() if path.name.startswith("sbp-held-")]
        modes = {stat.S_IMODE(path.stat().st_mode) for path in folders}
    finally:
        (here / "go_on_waiting").unlink()
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    assert [item for item in seen if item[0] not in LOOPBACK] == []
    assert len(folders) == 2 and modes == {0o700}
    # torch's own cache of compiled code, empty here, is for all of a user's runs.
    left = {path.name.partition("_")[0] for path in temporary.iterdir()}
    assert left <= {"torchinductor"}


# -------------------------------------------------------------------------------------- temporary files


def test_a_private_folder_is_private_and_gone_at_the_end(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(here))
    folder = PrivateFolder()
    inside = Path(folder.path)
    assert stat.S_IMODE(inside.stat().st_mode) == 0o700
    (inside / "a" / "b").mkdir(parents=True)
    (inside / "c").write_text("text")
    (here / "kept").write_text("text")
    (inside / "link").symlink_to(here / "kept")
    folder.empty()
    assert list(inside.iterdir()) == [] and (here / "kept").exists()
    folder.close()
    folder.close()
    assert {path.name for path in here.iterdir()} == {"kept"}


HOLDER = "import sys, time; from launch.folder import PrivateFolder; f = PrivateFolder(); print(f.path, flush=True)\n"


def test_what_a_killed_process_leaves_is_removed_and_what_lives_is_not(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(here))
    command = [sys.executable, "-c", HOLDER + "time.sleep(100)"]
    environment = {**os.environ, "TMPDIR": str(here)}
    killed, alive = (
        subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) for _ in range(2)
    )
    try:
        assert killed.stdout and alive.stdout
        left, held = Path(killed.stdout.readline().strip()), Path(alive.stdout.readline().strip())
        (left / "secret").write_text("text")
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        remove_left_behind()
        assert left.exists(), "it might just be about to be locked"
        target = here / "another"
        target.mkdir()
        (here / "sbp-held-link").symlink_to(target)
        for path in (left, held, target):
            os.utime(path, (0, 0))
        remove_left_behind()
        assert not left.exists()
        assert held.exists() and target.exists()
    finally:
        for process in (killed, alive):
            process.kill()
            process.communicate()


def test_a_served_process_and_its_ranks_meet_where_nobody_else_comes(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket over which a process sends pickled cases to its own ranks is in a private folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(here))
    seen: list[int] = []

    def look(*args: Any, **kwargs: Any) -> Any:
        [folder] = here.iterdir()
        assert (folder / "socket").is_socket()
        seen.append(stat.S_IMODE(folder.stat().st_mode))
        raise OSError("not started here")

    monkeypatch.setattr(subprocess, "Popen", look)
    ranks = Ranks(2)
    with pytest.raises(OSError, match="not started here"):
        ranks.define("suite", b"")
    ranks.close()
    assert seen == [0o700] and list(here.iterdir()) == []


KILLED_WITH_A_CHECKPOINT = """\
import os, signal, sys
import launch


def start(context):
    def handle(request):
        path = os.path.join(os.environ["SBP_LAUNCH_FOLDER"], "checkpoint")
        if request["how"] == "leave":
            with open(path, "w") as file:
                file.write("weights")
            os.kill(os.getpid(), signal.SIGKILL)
        return os.listdir(os.path.dirname(path))
    return handle


if __name__ == "__main__":
    job = launch.start(launch.Settings(entry="leaves:start"))
    print([reply.status for reply in job.call({"how": "leave"}, 20)])
    print([reply.value for reply in job.call({"how": "look"}, 20)])
    job.close()
"""


def test_what_a_killed_worker_leaves_is_removed(here: Path) -> None:
    (here / "leaves.py").write_text(KILLED_WITH_A_CHECKPOINT)
    (here / "temporary").mkdir()
    ended = subprocess.run(
        [sys.executable, "leaves.py"],
        env={**os.environ, "TMPDIR": str(here / "temporary"), "PYTHONPATH": f"{here}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.stdout.splitlines() == ["['crash']", "[[]]"], ended
    assert list((here / "temporary").iterdir()) == []
    assert children() is not None
