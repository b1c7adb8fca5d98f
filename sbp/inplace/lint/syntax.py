"""Small questions about the syntax tree."""

from __future__ import annotations

import ast


def path_of(node: ast.expr) -> str | None:
    """``a.b`` for an attribute of a name, the key under which a frame remembers it; None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and type(node.value) is ast.Name:
        return f"{node.value.id}.{node.attr}"
    return None


def source(node: ast.expr) -> str:
    """A short text of an expression for messages."""
    text = ast.unparse(node)
    return text if len(text) <= 60 else text[:57] + "..."


def decorator_name(node: ast.expr) -> str:
    """The dotted name of a decorator, without its arguments."""
    if isinstance(node, ast.Call):
        node = node.func
    try:
        return ast.unparse(node)
    except (ValueError, RecursionError):
        return ""


def is_tensor_index(index: ast.expr) -> bool:
    """Whether an index is one that lists and dictionaries do not take."""
    if isinstance(index, ast.Tuple):
        return any(
            isinstance(part, ast.Slice) or (isinstance(part, ast.Constant) and part.value in (..., None))
            for part in index.elts
        )
    return isinstance(index, ast.Constant) and (index.value is ... or index.value is None)
