"""Configuration: ``[tool.sbp.lint]`` in pyproject.toml, overridden by the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from sbp import toml
from sbp.inplace.lint.findings import UNREADABLE, Finding

LEVELS = ("certain", "likely")
CODE_PREFIX = re.compile(r"SBP[0-9]{0,3}")


class ConfigurationError(ValueError):
    """Bad configuration; one line that says what and where."""


@dataclass(frozen=True)
class Configuration:
    """How to lint.

    ``select`` and ``ignore`` are codes or prefixes of codes; ``level`` is the least sure level that is reported;
    ``exclude`` and the keys of ``per_file_ignores`` are glob patterns, matched against a path as it is written
    and against each of its parts; ``sources`` names further functions whose result is a distributed tensor;
    ``max_bytes`` is the size of the largest file that is read.
    """

    select: tuple[str, ...] = ("SBP",)
    ignore: tuple[str, ...] = ()
    level: str = "likely"
    exclude: tuple[str, ...] = ()
    per_file_ignores: tuple[tuple[str, tuple[str, ...]], ...] = ()
    sources: tuple[str, ...] = ()
    max_bytes: int = 5_000_000
    root: Path = field(default_factory=Path)

    def excludes(self, path: str) -> bool:
        """Whether a path is left out."""
        return any(matches(path, pattern, self.root) for pattern in self.exclude)

    def wants(self, finding: Finding) -> bool:
        """Whether a finding is reported."""
        if finding.level and LEVELS.index(finding.level) > LEVELS.index(self.level):
            return False
        if finding.code != UNREADABLE and not finding.code.startswith(self.select):
            return False
        if finding.code.startswith(self.ignore or ("-",)):
            return False
        return not any(
            finding.code.startswith(codes) and matches(finding.path, pattern, self.root)
            for pattern, codes in self.per_file_ignores
        )


def matches(path: str, pattern: str, root: Path) -> bool:
    """Whether a glob pattern fits a path, its path below the configuration's folder, or one of its parts."""
    if fnmatch(path, pattern):
        return True
    pure = Path(path)
    if "/" not in pattern.rstrip("/"):
        return any(fnmatch(part, pattern.rstrip("/")) for part in pure.parts)
    try:
        below = pure.resolve().relative_to(root.resolve()).as_posix()
    except (ValueError, OSError):
        below = pure.as_posix()
    pattern = pattern.rstrip("/")
    return fnmatch(below, pattern) or fnmatch(below, f"{pattern}/*")


def codes_of(value: Any, where: str) -> tuple[str, ...]:
    """Codes or prefixes of codes, checked."""
    codes = strings_of(value, where)
    for code in codes:
        if not CODE_PREFIX.fullmatch(code):
            raise ConfigurationError(f"{where}: {code!r} is not a code; codes look like SBP101")
    return codes


def strings_of(value: Any, where: str) -> tuple[str, ...]:
    """A list of strings, checked."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigurationError(f"{where} must be a list of strings")
    return tuple(str(item) for item in value)


def from_table(table: Mapping[str, Any], where: str, root: Path) -> Configuration:
    """A configuration from the table of a TOML file. Raises ConfigurationError."""
    configuration = Configuration(root=root)
    changes: dict[str, Any]
    for key, value in table.items():
        place = f"{where}: {key}"
        if key in ("select", "ignore"):
            changes = {key: codes_of(value, place)}
            configuration = replace(configuration, **changes)
        elif key in ("exclude", "sources"):
            changes = {key: strings_of(value, place)}
            configuration = replace(configuration, **changes)
        elif key == "level":
            if value not in LEVELS:
                raise ConfigurationError(f"{place} must be one of {', '.join(LEVELS)}")
            configuration = replace(configuration, level=str(value))
        elif key == "max-bytes":
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{place} must be a whole number of bytes")
            configuration = replace(configuration, max_bytes=int(value))
        elif key == "per-file-ignores":
            if not isinstance(value, Mapping):
                raise ConfigurationError(f"{place} must be a table of patterns and lists of codes")
            ignores = tuple((str(pattern), codes_of(codes, place)) for pattern, codes in value.items())
            configuration = replace(configuration, per_file_ignores=ignores)
        else:
            known = "select, ignore, level, exclude, per-file-ignores, sources, max-bytes"
            raise ConfigurationError(f"{where}: no setting {key!r}; the settings are {known}")
    return configuration


def find(paths: Sequence[str]) -> Path | None:
    """The pyproject.toml nearest above the first path that has a [tool.sbp.lint] table."""
    start = Path(paths[0]) if paths else Path()
    try:
        start = start.resolve()
    except (OSError, RuntimeError, ValueError):  # the last: no name that a file could have
        start = Path().resolve()
    for folder in (start, *start.parents):
        candidate = folder / "pyproject.toml"
        try:
            if candidate.is_file() and "tool.sbp.lint" in candidate.read_text(
                encoding="utf-8", errors="replace"
            ):
                return candidate
        except OSError:
            continue
    return None


def read(path: Path) -> Configuration:
    """The configuration in a TOML file. Raises ConfigurationError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from None
    try:
        data = toml.parse(text, path)
    except toml.TomlError as error:
        raise ConfigurationError(str(error)) from None
    table = data.get("tool", {})
    for name in ("sbp", "lint"):
        table = table.get(name, {}) if isinstance(table, Mapping) else {}
    if not isinstance(table, Mapping):
        raise ConfigurationError(f"{path}: tool.sbp.lint must be a table")
    return from_table(table, f"{path}: tool.sbp.lint", path.parent)
