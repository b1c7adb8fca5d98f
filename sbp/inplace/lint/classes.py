"""Objects: what their attributes and items are, which classes are modules, which parameters are distributed."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from sbp.inplace.lint.knowledge import last
from sbp.inplace.lint.scopes import (
    ClassInfo,
    ClassRef,
    Frame,
    FunctionInfo,
    FunctionRef,
    Instance,
    NameRef,
    SuperRef,
)
from sbp.inplace.lint.values import (
    CERTAIN,
    KNOWN,
    OBJECT_VALUE,
    PARAMETER,
    PLAIN,
    TENSOR,
    UNKNOWN,
    UNKNOWN_VALUE,
    Reason,
    Value,
    join,
    mapping_of,
    sequence_of,
)

if TYPE_CHECKING:
    from sbp.inplace.lint.flow import Flow

PARALLEL_WHY = Reason("a parameter of a parallelised module", 0)


def is_module(info: ClassInfo) -> bool:
    """Whether a class is an nn.Module: it derives from one, or has a forward() and a base that we cannot see."""
    if info.module is None:
        outside = info.outside()
        names = [last(base) for base in outside]
        if "Function" in names or "InplaceFunction" in names:
            info.module = False
        elif any(base.startswith("torch.nn.") or base == "torch.nn" for base in outside) or "Module" in names:
            info.module = True
        else:
            forward = info.method("forward") or info.method("build")
            info.module = bool(
                forward is not None
                and outside
                and forward.kind == "function"
                and isinstance(forward.node, ast.FunctionDef)
                and forward.node.args.args
                and forward.node.args.args[0].arg == "self"
                and not any(base in ("builtins.object", "abc.ABC", "typing.Protocol") for base in outside)
            )
    return info.module


def is_function_class(info: ClassInfo) -> bool:
    """Whether a class is a torch.autograd.Function."""
    return any(last(base) in ("Function", "InplaceFunction") for base in info.outside())


def instance_value(info: ClassInfo, parallel: int = 0) -> Value:
    """The value of an object of a class of the file."""
    return Value(OBJECT_VALUE.kinds, refs=(Instance(info, info.name, parallel),))


def prepare(flow: Flow, info: ClassInfo) -> None:
    """Learn the attributes that ``__init__`` sets, once."""
    if info.prepared:
        return
    info.prepared = True
    for base in info.ancestors()[1:]:
        prepare(flow, base)
    init = info.methods.get("__init__")
    if init is not None:
        from sbp.inplace.lint import calls

        flow.preparing += 1
        calls.enter(flow, init, instance_value(info), PLAIN, assumed=False)
        flow.preparing -= 1


def find_attribute(info: ClassInfo, name: str) -> Value | None:
    """An attribute of a class or of one that it derives from."""
    for ancestor in info.ancestors():
        found = ancestor.attributes.get(name)
        if found is not None:
            return found
    return None


def attribute_of_ref(flow: Flow, ref: Any, base: Value, name: str, frame: Frame) -> Value | None:
    """An attribute of an object or class; None when nothing is known of it."""
    if isinstance(ref, Instance):
        if ref.info is not None:
            return attribute_of_instance(flow, ref, ref.info, base, name, frame)
        return attribute_of_foreign(ref, name, frame)
    if isinstance(ref, ClassRef):
        method = ref.info.method(name)
        if method is not None:
            return Value(
                OBJECT_VALUE.kinds, refs=(FunctionRef(method, base if method.kind == "class" else None),)
            )
        return find_attribute(ref.info, name)
    if isinstance(ref, SuperRef):
        method = ref.info.method(name, after=ref.info)
        if method is not None:
            return bound(method, ref.receiver)
    return None


def attribute_of_instance(
    flow: Flow, ref: Instance, info: ClassInfo, base: Value, name: str, frame: Frame
) -> Value | None:
    """An attribute of an object of a class of the file."""
    method = info.method(name)
    if method is not None:
        if method.kind == "property":
            from sbp.inplace.lint import calls

            return calls.enter(flow, method, base, frame.context, assumed=False)
        return bound(method, base)
    prepare(flow, info)
    found = find_attribute(info, name)
    if found is None:
        if ref.parallel and name in ("weight", "bias"):
            return distributed_parameter()
        return None
    if ref.parallel:
        found = parallelised_part(found, ref.parallel)
    return found


def attribute_of_foreign(ref: Instance, name: str, frame: Frame) -> Value | None:
    """An attribute of an object whose class is not in the file."""
    if name in ("weight", "bias"):
        if ref.parallel:
            return distributed_parameter()
        if ref.dotted.startswith("torch.nn."):
            return Value(TENSOR, frame.context, KNOWN, marks=PARAMETER)
    if ref.dotted.startswith("torch.optim") and name == "param_groups":
        parameter = (
            distributed_parameter() if ref.parallel else Value(TENSOR, frame.context, KNOWN, marks=PARAMETER)
        )
        return parameter_groups(parameter)
    if ref.parallel and not ref.dotted.startswith("torch.optim"):
        return Value(UNKNOWN, refs=(Instance(None, "", ref.parallel),))
    return None


def parameter_groups(parameter: Value) -> Value:
    """``optimizer.param_groups`` of an optimizer of such parameters."""
    return sequence_of(mapping_of(join(sequence_of(parameter), UNKNOWN_VALUE)))


def distributed_parameter() -> Value:
    """A parameter of a parallelised module."""
    return Value(TENSOR, CERTAIN, KNOWN, PARALLEL_WHY, PARAMETER)


def parallelised_part(value: Value, how: int) -> Value:
    """An attribute of a parallelised module: its parameters are distributed, and those of its submodules."""
    if value.kinds & TENSOR and value.marks & PARAMETER:
        return value.replaced(level=CERTAIN, why=PARALLEL_WHY)
    return parallelised(value, how) if any(isinstance(ref, Instance) for ref in value.refs) else value


def own_parameter(flow: Flow, info: ClassInfo, depth: int = 3) -> Value | None:
    """A parameter that a module of the file makes as a distributed tensor, itself or in a submodule."""
    prepare(flow, info)
    for ancestor in info.ancestors():
        for value in ancestor.attributes.values():
            if value.level == CERTAIN and value.marks & PARAMETER:
                return value
            for ref in value.refs if depth else ():
                if isinstance(ref, Instance) and ref.info is not None and ref.info is not info:
                    found = own_parameter(flow, ref.info, depth - 1)
                    if found is not None:
                        return found
    return None


def parallelised(value: Value, how: int) -> Value:
    """A module after parallelize_module and the like; ``how`` is PARAMETERS or THROUGHOUT."""
    refs = tuple(ref._replace(parallel=how) if isinstance(ref, Instance) else ref for ref in value.refs)
    if not any(isinstance(ref, Instance) for ref in refs):
        refs = (*(ref for ref in refs if not isinstance(ref, NameRef)), Instance(None, "", how))
    element = parallelised_part(value.element, how) if value.element is not None else None
    items = tuple(parallelised_part(item, how) for item in value.items) if value.items is not None else None
    return value.replaced(refs=refs, element=element, items=items)


def bound(method: FunctionInfo, receiver: Value) -> Value:
    """A method bound to an object."""
    if method.kind == "static":
        return Value(OBJECT_VALUE.kinds, refs=(FunctionRef(method),))
    return Value(OBJECT_VALUE.kinds, refs=(FunctionRef(method, receiver),))


def item_of_object(base: Value, position: Any) -> Value | None:
    """``layers[i]`` of a ModuleList, or what a loop over it gives."""
    if base.items is not None or base.element is not None:
        if (
            base.items is not None
            and type(position) is int
            and -len(base.items) <= position < len(base.items)
        ):
            return base.items[position]
        return base.elements()
    for ref in base.refs:
        if isinstance(ref, Instance) and ref.parallel and ref.info is None:
            return base
    return None
