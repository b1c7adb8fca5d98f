"""TOML as a person wrote it, read with the one error that says what is wrong with it.

The standard library's reader from Python 3.11 on, tomlkit before that and wherever a file is to be edited.
Neither keeps to one kind of error, and both take integers of any length, of which TOML promises 64 bits and which
Python cannot even print when they are long; here these are errors too (https://toml.io/en/v1.0.0#integer).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tomlkit

# What tomlkit lets through beside its own errors, which are ValueErrors.
_ERRORS = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError)
_LONGEST = range(-(1 << 63), 1 << 63)


class TomlError(ValueError):
    """A text that is no TOML; its message is one line that says where."""


def parse(text: str, where: object) -> Mapping[str, Any]:
    """The content of a TOML text as plain dictionaries and lists.

    Args:
        text: the whole file.
        where: what an error calls it, such as its path.

    Raises TomlError.
    """
    if sys.version_info < (3, 11):
        return content_of(document(text, where), where)
    import tomllib

    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise _error(where, error) from error
    return _checked(content, where)


def document(text: str, where: object) -> tomlkit.TOMLDocument:
    """The text for editing: comments and layout are kept. Raises TomlError."""
    import tomlkit

    try:
        return tomlkit.parse(text)
    except _ERRORS as error:
        raise _error(where, error) from error


def content_of(document: tomlkit.TOMLDocument, where: object) -> Mapping[str, Any]:
    """What :func:`parse` gives, of a text that is open for editing. Raises TomlError."""
    try:
        content = document.unwrap()
    except _ERRORS as error:
        raise _error(where, error) from error
    return _checked(content, where)


def _checked(content: Mapping[str, Any], where: object) -> Mapping[str, Any]:
    left: list[Any] = [content]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            left += value.values()
        elif isinstance(value, list):
            left += value
        elif isinstance(value, int) and value not in _LONGEST:
            raise TomlError(f"{where} is not valid TOML: it has an integer of more than 64 bits")
    return content


def _error(where: object, error: Exception) -> TomlError:
    what = " ".join(str(error).split()) or type(error).__name__
    return TomlError(f"{where} is not valid TOML: {what}")
