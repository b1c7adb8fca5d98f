"""The flake8 plugin: the same findings, under flake8's own ``noqa``, selection and output."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from sbp._version import __version__
from sbp.inplace.lint.config import LEVELS, Configuration
from sbp.inplace.lint.files import lint_text
from sbp.inplace.lint.findings import UNREADABLE
from sbp.inplace.lint.formats import headline


class Plugin:
    """What flake8 makes for each file."""

    name = "sbp"
    version = __version__
    level: ClassVar[str] = "likely"

    def __init__(self, tree: ast.AST, filename: str, lines: Sequence[str]) -> None:
        self.filename = filename
        self.lines = lines

    @classmethod
    def add_options(cls, parser: Any) -> None:
        """Add ``--sbp-level`` to flake8's options."""
        parser.add_option(
            "--sbp-level",
            choices=LEVELS,
            default="likely",
            parse_from_config=True,
            help="the least sure level that sbp reports: certain or likely (default)",
        )

    @classmethod
    def parse_options(cls, options: Any) -> None:
        """Take over flake8's options."""
        cls.level = options.sbp_level

    def run(self) -> Iterator[tuple[int, int, str, type[Plugin]]]:
        """The findings as flake8 wants them; flake8 itself reports files that do not parse."""
        text = "".join(self.lines)
        report = lint_text(text, self.filename, Configuration(level=self.level))
        for finding in report.findings:
            if finding.code != UNREADABLE:
                yield finding.line, finding.column, headline(finding), Plugin
