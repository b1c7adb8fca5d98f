"""What a type annotation says about a value."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from sbp.inplace.lint.knowledge import (
    CLASS_SOURCES,
    MAPPING_ANNOTATIONS,
    OBJECT_ANNOTATIONS,
    SCALAR_ANNOTATIONS,
    SEQUENCE_ANNOTATIONS,
    TENSOR_ANNOTATIONS,
    TEXT_ANNOTATIONS,
    last,
)
from sbp.inplace.lint.scopes import ClassRef, Frame, Instance, NameRef
from sbp.inplace.lint.values import (
    ASSUMED,
    CERTAIN,
    KNOWN,
    NONE,
    NONE_VALUE,
    NUMBER_VALUE,
    OBJECT_VALUE,
    PARAMETER,
    SHAPE_VALUE,
    TENSOR,
    TEXT_VALUE,
    UNKNOWN,
    UNKNOWN_VALUE,
    Reason,
    Value,
    join,
    mapping_of,
    sequence,
    sequence_of,
)

if TYPE_CHECKING:
    from sbp.inplace.lint.flow import Flow

# Annotations of jaxtyping, Float[Tensor, "b n"]: a tensor only when it says so inside.
ARRAY_ANNOTATIONS = frozenset({"Float", "Int", "Bool", "Shaped", "Num", "Complex"})


def annotation_value(flow: Flow, node: ast.expr, frame: Frame) -> Value | None:
    """A value of the annotated type, or None when the annotation says nothing that helps."""
    key = (id(node), frame.context)
    try:
        return flow.declared[key]
    except KeyError:
        pass
    found = flow.declared[key] = read_annotation(flow, node, frame)
    return found


def read_annotation(flow: Flow, node: ast.expr, frame: Frame) -> Value | None:
    """The same, from the syntax tree."""
    kind = type(node)
    if kind is ast.Name or kind is ast.Attribute:
        return simple(flow, node, frame)
    if kind is ast.Subscript:
        return generic(flow, node, frame)  # type: ignore[arg-type]
    if kind is ast.BinOp:
        parts = [annotation_value(flow, node.left, frame), annotation_value(flow, node.right, frame)]  # type: ignore[attr-defined]
        return union(parts)
    if kind is ast.Constant:
        value = node.value  # type: ignore[attr-defined]
        if value is None:
            return NONE_VALUE
        if isinstance(value, str):
            try:
                parsed = ast.parse(value, mode="eval").body
            except (SyntaxError, ValueError):
                return None
            # The answers are remembered by the identity of nodes, so these have to live as long.
            flow.parsed.append(parsed)
            return read_annotation(flow, parsed, frame)
    return None


def union(parts: list[Value | None]) -> Value | None:
    """``A | B``: a tensor or something else is only assumed to be a tensor."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    result = known[0]
    for part in known[1:]:
        result = join(result, part)
    if len(known) < len(parts):
        result = join(result, UNKNOWN_VALUE)
    if result.kinds & TENSOR and result.kinds & ~(TENSOR | NONE):
        result = result.replaced(sure=min(result.sure, ASSUMED))
    return result


def simple(flow: Flow, node: ast.expr, frame: Frame) -> Value | None:
    """A plain name: ``int``, ``torch.Tensor``, ``DTensor``, a class of the file."""
    found = flow.value(node, frame)
    name = node.id if isinstance(node, ast.Name) else node.attr  # type: ignore[attr-defined]
    for ref in found.refs:
        if isinstance(ref, ClassRef):
            outside = ref.info.outside()
            if any(last(base) in TENSOR_ANNOTATIONS for base in outside):
                return Value(TENSOR, frame.context, KNOWN)
            return Value(OBJECT_VALUE.kinds, refs=(Instance(ref.info, ref.info.name),))
        if isinstance(ref, NameRef):
            name = last(ref.dotted)
            if ref.dotted.startswith(("numpy.", "jax.")):
                return OBJECT_VALUE
    if name in CLASS_SOURCES:
        return Value(TENSOR, CERTAIN, KNOWN, Reason("annotated as DTensor", node.lineno))
    if name in TENSOR_ANNOTATIONS and name not in ARRAY_ANNOTATIONS:
        marks = PARAMETER if name in ("Parameter", "Buffer") else 0
        return Value(TENSOR, frame.context, KNOWN, marks=marks)
    if name in SCALAR_ANNOTATIONS:
        return NUMBER_VALUE
    if name in TEXT_ANNOTATIONS:
        return TEXT_VALUE
    if name in SEQUENCE_ANNOTATIONS:
        return sequence_of(UNKNOWN_VALUE)
    if name in MAPPING_ANNOTATIONS:
        return mapping_of(UNKNOWN_VALUE)
    if name == "Size":
        return SHAPE_VALUE
    if name in OBJECT_ANNOTATIONS:
        return OBJECT_VALUE
    for ref in found.refs:
        if (
            isinstance(ref, NameRef)
            and name[:1].isupper()
            and not ref.dotted.startswith(("typing", "builtins"))
        ):
            return Value(OBJECT_VALUE.kinds | UNKNOWN, refs=(Instance(None, ref.dotted),))
    return None


def generic(flow: Flow, node: ast.Subscript, frame: Frame) -> Value | None:
    """``Optional[X]``, ``list[X]``, ``tuple[X, Y]``, ``dict[K, V]``, ``Float[Tensor, "b n"]``."""
    name = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
    inner = node.slice
    parts = list(inner.elts) if isinstance(inner, ast.Tuple) else [inner]
    if name == "Optional":
        return union([annotation_value(flow, inner, frame), NONE_VALUE])
    if name == "Union":
        return union([annotation_value(flow, part, frame) for part in parts])
    if name in ("Annotated", "Final", "ClassVar") or name in ARRAY_ANNOTATIONS:
        return annotation_value(flow, parts[0], frame)
    if name in ("tuple", "Tuple"):
        values = [annotation_value(flow, part, frame) or UNKNOWN_VALUE for part in parts]
        if len(parts) == 2 and isinstance(parts[1], ast.Constant) and parts[1].value is ...:
            return sequence_of(values[0])
        return sequence(*values)
    if name in SEQUENCE_ANNOTATIONS:
        return sequence_of(annotation_value(flow, parts[0], frame) or UNKNOWN_VALUE)
    if name in MAPPING_ANNOTATIONS:
        return mapping_of(
            (annotation_value(flow, parts[-1], frame) if len(parts) > 1 else None) or UNKNOWN_VALUE
        )
    if name == "Literal":
        texts = all(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in parts)
        return TEXT_VALUE if texts else NUMBER_VALUE
    if name == "Callable" or name in OBJECT_ANNOTATIONS:
        return OBJECT_VALUE
    return None
