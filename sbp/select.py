"""Choose cases and trials by name: targets and the ``-k`` expression."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

# Nested deeper, an expression could not be evaluated.
_DEEPEST = 100


class SelectionError(ValueError):
    """A target or expression that selects nothing or cannot be read; says what would."""


def short_name(case: str) -> str:
    """The part of a case's name that names the module or operator: ``Linear`` of ``Linear(8,12):4x8``."""
    end = len(case)
    for mark in "(-:":
        position = case.find(mark)
        if position > 0:
            end = min(end, position)
    return case[:end]


def matches_target(case: str, target: str) -> bool:
    """Whether ``target`` (``Linear``, ``nn.Linear``, ``torch.nn.Linear`` or a whole case name) means the case."""
    return case == target or _without_package(short_name(case)) == _without_package(target)


def _without_package(name: str) -> str:
    for prefix in ("torch.", "nn.", "functional."):
        name = name.removeprefix(prefix)
    return name.lower()


def suggest(target: str, cases: Sequence[str]) -> str:
    """A line that says what could have been meant."""
    names = sorted({short_name(case) for case in cases})
    word = target.removeprefix("torch.").removeprefix("nn.")
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; --list shows what there is"
    return f"no case is called {target!r}{hint}"


def compile_expression(text: str) -> Callable[[str], bool]:
    """Read a ``-k`` expression: words that must occur in an id, with ``and``, ``or``, ``not`` and brackets that
    stand alone or at a word's edge. Case does not matter.

    >>> compile_expression("MSELoss and not target=B")("modules/MSELoss(mean):8x4/4/input=S(0)")
    True

    Raises SelectionError.
    """
    tokens = _tokens(text)
    if tokens.count("(") + tokens.count("not") > _DEEPEST:
        raise SelectionError(f"-k has more than {_DEEPEST} brackets and nots; write a shorter expression")
    if not tokens:
        raise SelectionError("-k needs an expression, such as 'Linear and not input=P'")
    position = 0

    def peek() -> str | None:
        return tokens[position] if position < len(tokens) else None

    def fail() -> SelectionError:
        return SelectionError(f"cannot read -k {text!r}; write words with and, or, not and brackets")

    def take() -> str:
        nonlocal position
        if position >= len(tokens):
            raise fail()
        position += 1
        return tokens[position - 1]

    def either() -> Callable[[str], bool]:
        terms = [both()]
        while peek() == "or":
            take()
            terms.append(both())
        return lambda name: any(term(name) for term in terms)

    def both() -> Callable[[str], bool]:
        terms = [single()]
        while peek() == "and":
            take()
            terms.append(single())
        return lambda name: all(term(name) for term in terms)

    def single() -> Callable[[str], bool]:
        token = take()
        if token == "not":
            inner = single()
            return lambda name: not inner(name)
        if token == "(":
            inner = either()
            if take() != ")":
                raise fail()
            return inner
        if token in (")", "and", "or"):
            raise fail()
        return lambda name: token.lower() in name.lower()

    expression = either()
    if peek() is not None:
        raise fail()
    return expression


def _tokens(text: str) -> list[str]:
    """Words at white space. A bracket belongs to its word (``input=S(0)``, ``(S(0),B)``) unless it is
    unbalanced there."""
    tokens: list[str] = []
    for word in text.split():
        while word.startswith("(") and word.count("(") > word.count(")"):
            tokens.append("(")
            word = word[1:]
        closing = 0
        while word.endswith(")") and word.count(")") > word.count("("):
            word, closing = word[:-1], closing + 1
        if word:
            lowered = word.lower()
            tokens.append(lowered if lowered in ("and", "or", "not") else word)
        tokens += [")"] * closing
    return tokens
