"""``--fix``: what it writes means the same, parses, passes the lint, and is left alone by a second run."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sbp.inplace.lint import command
from sbp.inplace.lint.analyse import lint_source
from sbp.inplace.lint.config import Configuration
from sbp.inplace.lint.fixes import Fixed, fix_bytes

HEAD = """\
import torch
from torch import nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.kept = nn.Parameter(torch.ones(3))

    def other(self, x):
        return x

    def forward(self, x, y):
"""


def fix(body: str, head: str = HEAD) -> tuple[list[str], Fixed]:
    """The lines of a forward() after the fix, without indentation."""
    text = head + textwrap.indent(textwrap.dedent(body).strip("\n"), " " * 8) + "\n"
    outcome = fix_bytes(text.encode(), "a.py", Configuration())
    fixed = outcome.data.decode()
    ast.parse(fixed)
    assert fixed.startswith(head)
    assert [f.kept for f in lint_source(fixed, thorough=True)] == [f.kept for f in outcome.left]
    assert all(f.kept for f in outcome.left)
    assert fix_bytes(outcome.data, "a.py", Configuration()).data == outcome.data
    return textwrap.dedent(fixed[len(head) :]).strip("\n").split("\n"), outcome


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("h += y", "h = h + y"),
        ("h  -=  y", "h  =  h - y"),
        ("h *= y + 1", "h = h * (y + 1)"),
        ("h -= (y + 1)", "h = h - (y + 1)"),
        ("h /= y if y.any() else 1", "h = h / (y if y.any() else 1)"),
        ("h **= -y", "h = h ** (-y)"),
        ("h //= y.sum()", "h = h // y.sum()"),
        ("h %= 2", "h = h % 2"),
        ("h += y  # a comment", "h = h + y  # a comment"),
        ("h += y; h += 1", "h = h + y; h = h + 1"),
        ("h += \\\n    y", "h = \\\n    h + y"),
        ("h += (\n    y\n    # why\n    + 1\n)", "h = h + (\n    y\n    # why\n    + 1\n)"),
        ("h.add_(y)", "h = h.add(y)"),
        ("h.add_(y, alpha=2)  # scaled", "h = h.add(y, alpha=2)  # scaled"),
        ("h.mul_(2).add_(y)", "h = h.mul(2).add(y)"),
        ("h.mul_(\n    2\n).add_(\n    y\n)", "h = h.mul(\n    2\n).add(\n    y\n)"),
        ("h = (\n    torch.relu(h)\n    .mul_(2)\n)", "h = (\n    torch.relu(h)\n    .mul(2)\n)"),
        ("h = h.mul_(2)", "h = h.mul(2)"),
        ("h = torch.relu(h).mul_(2)", "h = torch.relu(h).mul(2)"),
        ("torch.relu_(h)", "h = torch.relu(h)"),
        ("F.relu(h, inplace=True)", "h = F.relu(h)"),
        ("h = F.relu(h, inplace=True)", "h = F.relu(h)"),
        ("h = F.relu(h, True)", "h = F.relu(h)"),
        ("h = F.dropout(\n    h,\n    p=0.5,\n    inplace=True,\n)", "h = F.dropout(\n    h,\n    p=0.5,\n)"),
        ("for _ in range(2):\n    h += y", "for _ in range(2):\n    h = h + y"),
        (
            "total = 0\nfor _ in range(2):\n    total += h.sum()",
            "total = 0\nfor _ in range(2):\n    total = total + h.sum()",
        ),
        ("h = h.view(-1, 3)\nh += 1", "h = h.view(-1, 3)\nh = h + 1"),
        ("h = F.dropout(h)\nh += 1", "h = F.dropout(h)\nh = h + 1"),
        (
            "if y.any():\n    h += y\nelse:\n    h = h * 2\nh += 1",
            "if y.any():\n    h = h + y\nelse:\n    h = h * 2\nh = h + 1",
        ),
    ],
)  # fmt: skip
def test_what_is_turned(before: str, after: str) -> None:
    lines, outcome = fix(f"h = self.fc(x)\n{before}\nreturn h")
    assert lines == f"h = self.fc(x)\n{after}\nreturn h".split("\n")
    assert outcome.fixed and not outcome.left


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("x += y", "may share its memory"),
        ("h = x\nh += y", "may share its memory"),
        ("h = x[0]\nh += y", "may share its memory"),
        ("h = x.view(-1)\nh.add_(1)", "may share its memory"),
        ("h = F.dropout(x)\nh += 1", "may share its memory"),
        ("h = self.fc(x)\ng = h\nh += y\nreturn g", "may share its memory"),
        ("h = self.fc(x)\ng = h.t()\nh += y\nreturn g", "may share its memory"),
        ("h = self.fc(x)\nself.last = h\nh += y", "may share its memory"),
        ("h = self.fc(x)\nself.seen.append(h)\nh += y", "may share its memory"),
        ("h = self.fc(x)\nkeep = [h]\nh += y\nreturn keep", "may share its memory"),
        ("h = self.fc(x)\nkeep = {'h': h}\nh += y\nreturn keep", "may share its memory"),
        ("h = self.fc(x)\ng = self.other(h)\nh += y\nreturn g", "may share its memory"),
        ("h = self.fc(x)\nlater = lambda: h\nh += y\nreturn later", "may share its memory"),
        ("h = self.fc(x)\nfor _ in range(2):\n    h += y\n    g = h", "may share its memory"),
        ("g = self.fc(x)\nh = g if y.any() else self.fc(y)\nh += y\nreturn g", "may share its memory"),
        ("self.kept += y", "is an attribute"),
        ("self.kept.add_(y)", "is an attribute"),
        ("h = self.fc(x)\nh[0] = 1", "assignment to items"),
        ("h = self.fc(x)\nh[0] += 1", "assignment to items"),
        ("h = self.fc(x)\nh.zero_()", "no out-of-place method"),
        ("h = self.fc(x)\nh.copy_(y)", "no out-of-place method"),
        ("h = self.fc(x)\ng = h.add_(y)\nreturn g, h", "lives on"),
        ("h = self.fc(x)\ng = F.relu(h, inplace=True)\nreturn g, h", "lives on"),
        ("h = self.fc(x)\nh = F.relu(h, inplace=True) + h\nreturn h", "more than once"),
        ("h = self.fc(x)\nh.mul_(2).add_(h)\nreturn h", "more than once"),
        ("h = self.fc(x)\nreturn h.mul_(2) + h", "more than once"),
        ("h = self.fc(x)\nh += y.float()", "dtype"),
        ("h = self.fc(x)\ntorch.add(x, y, out=h)", "out="),
        ("h = self.fc(x)\nh.data = y", ".data"),
        ("h = self.fc(x)\nh.data.add_(y)", "attribute"),
        ("h = self.fc(x)\nadd = h.add_\nadd(y)", "no out-of-place form"),
        ("h = self.fc(x)\nh.view(-1).add_(1)\nreturn h", "other references"),
        ("h = self.fc(x)\nif h.add_(1).sum() > 0:\n    pass\nreturn h", "lives on"),
    ],
)  # fmt: skip
def test_what_is_left_and_why(body: str, reason: str) -> None:
    lines, outcome = fix(body)
    assert lines == body.split("\n")
    assert not outcome.fixed
    assert len(outcome.left) == 1
    assert reason in outcome.left[0].kept


MODULE = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        {made}

    def forward(self, x):
        {used}
"""


@pytest.mark.parametrize(
    ("made", "used", "turned"),
    [
        ("self.act = nn.ReLU(inplace=True)", "return self.act(self.fc(x))", True),
        ("self.act = nn.ReLU(True)", "return self.act(self.fc(x))", True),
        ("self.act = nn.Dropout(0.5, inplace=True)", "h = self.fc(x); h = self.act(h); return h", True),
        ("self.act = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))", "return self.act(x)", True),
        ("self.act = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3))", "return self.act(x) + x", False),
        ("self.act = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))", "return self.act(x) + x", False),
        ("self.act = nn.Sequential(nn.ReLU(inplace=True))", "return self.act(self.fc(x))", True),
        ("self.act = nn.ReLU(inplace=True)", "return self.act(x)", False),
        ("self.act = nn.ReLU(inplace=True)", "h = self.fc(x); g = self.act(h); return g + h", False),
        ("self.act = nn.ReLU(inplace=True)", "h = self.fc(x); self.act(h); return h", False),
        ("self.act = nn.ReLU(inplace=True)", "h = self.fc(x); h = self.act(h) + h; return h", False),
        ("self.act = nn.ReLU(inplace=True)", "h = self.act(self.fc(x)); self.act(x); return h", False),
        ("self.act = nn.ReLU(inplace=True)", "return self.fc(x)", False),
    ],
)  # fmt: skip
def test_modules_that_work_in_place(made: str, used: str, turned: bool) -> None:
    text = MODULE.format(made=made, used=used)
    outcome = fix_bytes(text.encode(), "a.py", Configuration())
    made_of = [f for f in (*outcome.fixed, *outcome.left) if f.code == "SBP103"]
    assert len(made_of) == 1
    assert (outcome.data != text.encode()) == turned
    assert bool(outcome.fixed) == turned
    if turned:
        assert b"True" not in outcome.data
        same_results(text, outcome.data.decode())


def run_net(text: str, flag: bool = True) -> Any:
    """The results of a module's forward, its input afterwards, and what it kept."""
    space: dict[str, Any] = {}
    exec(compile(text, "net", "exec"), space)
    torch.manual_seed(0)
    net = space["Net"]()
    x = torch.arange(9.0).reshape(3, 3) - 4
    y = torch.linspace(-1, 1, 9).reshape(3, 3)
    torch.manual_seed(1)
    arguments = (x, y, flag) if "flag" in text else (x,)
    with torch.no_grad():
        result = net(*arguments)
    kept = getattr(net, "bag", None)
    return [flat(result), x, y, flat(kept)]


def flat(value: Any) -> Any:
    """Tensors as lists, so that they can be compared, and NaN equals NaN."""
    if isinstance(value, torch.Tensor):
        return torch.nan_to_num(value, 7.25, 8.5, -8.5)
    if isinstance(value, (list, tuple)):
        return [flat(item) for item in value]
    return value


def same_results(one: str, other: str, flag: bool = True) -> None:
    torch.testing.assert_close(run_net(one, flag), run_net(other, flag), rtol=0, atol=0)


NAMES = st.sampled_from(["a", "b", "c"])
READ = st.sampled_from(["a", "b", "c", "p", "q"])


def simple() -> st.SearchStrategy[str]:
    """One statement that reads, writes or shares tensors."""
    templates = [
        "{n} = {r} + {s}", "{n} = {r} * 0.5", "{n} = {r}", "{n} = {r}.t()", "{n} = {r}.view(3, 3)", "{n} = {n}.t()",
        "{n} = {r}.clone()", "{n} = F.dropout({r}, 0.5, False)", "{n} = helper({r}, {s})", "{n} = self.fc({r})",
        "{n} = self.same({r})", "{n} = self.drop({r})", "{n} = {r} if flag else {s}", "{n}, {m} = {m}, {n}",
        "{n}, {m} = {r}, {s} + 1", "{n} = torch.stack([{r}, {s}]).sum(0)", "{n} = bag[-1] if bag else {r}",
        "bag.append({r})", "self.bag = [{r}]", "{n} = max({r}, key=lambda t: t) if False else {s} * 2",
        "{n} += {r}", "{n} -= {r} - {s}", "{n} *= 2", "{n} /= {r}.abs() + 1", "{n}.add_({r})",
        "{n}.mul_(0.5).add_({r})",
        "{n}.sub_({r}).clamp_(-2, 2)",
        "{n}.view(-1).mul_(2)", "{n}[0] = 1", "{n}[:, 1] += {r}[:, 1]", "{n}.zero_()",
        "torch.relu_({n})", "F.relu({n}, inplace=True)", "{n} = F.relu({r}, inplace=True)", "{n} = {r}.add_({s})",
        "{n} = self.act({r})", "{n} = self.row({r})", "{n} = ({r} + 1).mul_({s})", "{n} = {n}.neg_() + {r}",
        "later = lambda: {r}", "{n} = later() if later else {r}", "{n} += (lambda: {r})()", "{n} = [{r}, {s}][0]",
        "{n} = (z := {r})", "{n}.copy_({r})", "{n} = {r}.detach()", "{n} = {r}.float()", "{n} = {r}.to({s})",
        "{n} = {r}[[0, 1, 2]]", "{n} = {r}[:3]", "{n} = torch.squeeze({r})", "{n} += {n}", "{n}.mul_({n})",
        "[bag.append(t) for t in [{r}]]", "{n}, *rest = [{r}, {s}]", "bag += [{r}]", "for t in [{r}, {s}]:\n    t += 1",
        "{n} = torch.where({r} > 0, {r}, {s})", "{n} = getattr(self, 'same')({r})", "{n} = dict(k={r})['k']",
        "{n} = next(iter([{r}]))", "{n} = sum([{r}, {s}])", "{n} = copy.copy({r})", "{n} = copy.deepcopy({r})",
        "{n} = torch.add({r}, 1)", "{n} = torch.Tensor.add({r}, 1)", "{n} = {r}.contiguous()", "{n} = {r}.data",
        "{n} = {r}.expand(3, 3)", "{n} = {r}.T", "{n} = torch.einsum('ij->ij', {r})", "{n} = torch.cat([{r}])",
        "{n} = {r}.chunk(1)[0]",
        "{n}, = {r}.split(3)", "{n} = nested({r})", "{n} = stored({r})", "{n} = cached()",
        "{n} = {r} @ {s}", "{n} = {r} or 0 if False else {s}", "{n} = {n}.clamp_(-1, 1).t()",
        "{n}.data.add_(1)", "{n} = torch.as_tensor({r})", "{n} = {r}.reshape(9).reshape(3, 3)",
        "{n} = (lambda t: t)({r})",
    ]  # fmt: skip
    return st.builds(
        lambda template, n, m, r, s: template.format(n=n, m=m, r=r, s=s),
        st.sampled_from(templates), NAMES, NAMES, READ, READ,
    )  # fmt: skip


def block() -> st.SearchStrategy[str]:
    """A statement, or a branch or loop around a few."""
    inner = st.lists(simple(), min_size=1, max_size=4).map("\n".join)
    return st.one_of(
        simple(),
        simple(),
        inner.map(lambda body: "if flag:\n" + textwrap.indent(body, "    ")),
        st.tuples(inner, inner).map(
            lambda two: f"if flag:\n{textwrap.indent(two[0], '    ')}\nelse:\n{textwrap.indent(two[1], '    ')}"
        ),
        inner.map(lambda body: "for _ in range(3):\n" + textwrap.indent(body, "    ")),
        inner.map(lambda body: "while len(bag) < 4:\n" + textwrap.indent(body + "\nbag.append(a)", "    ")),
        inner.map(lambda body: "try:\n" + textwrap.indent(body, "    ") + "\nexcept ZeroDivisionError:\n    a = b"),
        inner.map(lambda body: "with torch.no_grad():\n" + textwrap.indent(body, "    ")),
    )  # fmt: skip


PROGRAM = """\
import copy
import torch
from torch import nn
import torch.nn.functional as F


def helper(x, y):
    x = x * 1
    x += y
    return x


STORE = {{}}


def stored(x):
    STORE["x"] = x
    return x * 2


def cached():
    if "y" not in STORE:
        STORE["y"] = torch.ones(3, 3)
    return STORE["y"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.same = nn.Identity()
        self.drop = nn.Dropout(0.0)
        self.act = nn.ReLU(inplace=True)
        self.row = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
        self.bag = []

    def forward(self, p, q, flag):
        bag = []
        later = None

        def nested(x):
            x.mul_(0.5)
            return x

        a = p + 1
        b = q * 2
        c = p - q
{body}
        return a, b, c, bag, later() if later else None, list(STORE.values())
"""


@settings(max_examples=60, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(st.lists(block(), min_size=2, max_size=9).map("\n".join), st.booleans())
def test_random_programs_compute_the_same_after_the_fix(body: str, flag: bool) -> None:
    text = PROGRAM.format(body=textwrap.indent(body, " " * 8))
    outcome = fix_bytes(text.encode(), "a.py", Configuration())
    fixed = outcome.data.decode()
    assert all(finding.kept for finding in outcome.left)
    assert fix_bytes(outcome.data, "a.py", Configuration()).data == outcome.data
    try:
        run_net(text, flag)
    except RuntimeError:
        return
    same_results(text, fixed, flag)


def test_random_programs_are_fixed_at_all() -> None:
    body = "        a += b\n        b.mul_(2)"
    outcome = fix_bytes(PROGRAM.format(body=body).encode(), "a.py", Configuration())
    assert len(outcome.fixed) >= 2


def test_formatting_encoding_and_line_ends_stay() -> None:
    text = HEAD + "        h = self.fc(x)\n        h += y  # caf\u00e9\n        return h\n"
    for prefix, ending in (("", "\n"), ("", "\r\n"), ("\ufeff", "\n")):
        data = (prefix + text).replace("\n", ending).encode()
        fixed = fix_bytes(data, "a.py", Configuration()).data
        assert fixed == data.replace(b"h += y", b"h = h + y")
    latin = ("# -*- coding: latin-1 -*-\n" + text).encode("latin-1")
    assert fix_bytes(latin, "a.py", Configuration()).data == latin.replace(b"h += y", b"h = h + y")


def test_noqa_and_configuration_keep_code_from_being_fixed() -> None:
    text = HEAD + "        h = self.fc(x)\n        h += y  # noqa: SBP101\n        return h\n"
    assert fix_bytes(text.encode(), "a.py", Configuration()).data == text.encode()
    text = text.replace("  # noqa: SBP101", "")
    assert fix_bytes(text.encode(), "a.py", Configuration(ignore=("SBP101",))).data == text.encode()


def test_command_fixes_files_and_says_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = tmp_path / "good.py"
    good.write_text(HEAD + "        h = self.fc(x)\n        h += y\n        return h\n")
    good.chmod(0o640)
    bad = tmp_path / "bad.py"
    bad.write_text(HEAD + "        x += y\n        return x\n")
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:\n")
    before = good.read_text()

    assert command.main(["--diff", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "+        h = h + y" in printed and "would be fixed" in printed
    assert good.read_text() == before

    assert command.main(["--fix", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "left alone: `x` may share its memory" in printed
    assert "broken.py:1" in printed and "does not parse" in printed
    assert "1 finding fixed in 1 file, 2 left" in printed
    assert "h = h + y" in good.read_text()
    assert good.stat().st_mode & 0o777 == 0o640

    assert command.main(["--fix", str(good)]) == 0
    assert "0 findings fixed" in capsys.readouterr().out
    assert command.main([str(good)]) == 0
