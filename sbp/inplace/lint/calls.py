"""Calls: into functions of the file, into torch, on tensors and containers; and the writes that calls are."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sbp.inplace.lint import classes
from sbp.inplace.lint.annotations import annotation_value
from sbp.inplace.lint.containers import container_method
from sbp.inplace.lint.keeping import chain_root, kept_function, kept_method, kept_module, plain_name
from sbp.inplace.lint.knowledge import (
    ALIAS_MODULES,
    CLASS_SOURCES,
    CONTAINER_MODULES,
    ENTRY_METHODS,
    FACTORIES,
    FACTORY_MODULES,
    FULL_METHODS,
    INPLACE_NAMES,
    LOCAL_METHODS,
    METHOD_SOURCES,
    MIXED_LINALG,
    MODULE_SOURCES,
    NUMBER_BUILTINS,
    OPERATOR_FUNCTIONS,
    SHARED_METHODS,
    TENSOR_NAMESPACES,
    TENSOR_SOURCES,
    TEXT_BUILTINS,
    TUPLE_MODULES,
    WRAPPERS,
    last,
    words,
)
from sbp.inplace.lint.scopes import (
    PARAMETERS,
    THROUGHOUT,
    ClassInfo,
    ClassRef,
    Frame,
    FunctionInfo,
    FunctionRef,
    Instance,
    MethodRef,
    NameRef,
    SuperRef,
)
from sbp.inplace.lint.syntax import path_of, source
from sbp.inplace.lint.values import (
    ASSUMED,
    BORROWED,
    CERTAIN,
    FRESH,
    HINTED,
    KNOWN,
    LIKELY,
    LOCAL,
    MAPPING,
    NONE,
    NONE_VALUE,
    NUMBER,
    NUMBER_VALUE,
    OBJECT,
    OBJECT_VALUE,
    PARAMETER,
    PLAIN,
    SEQUENCE,
    SHAPE_VALUE,
    SPLIT_VIEW,
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
from sbp.inplace.lint.writes import (
    AUGMENTED,
    FOREACH,
    INPLACE,
    ITEM,
    LOCAL_WRITE,
    METHOD,
    OUT,
    augmented_hits,
    item_hits,
    method_hits,
    start_of,
)

if TYPE_CHECKING:
    from sbp.inplace.lint.flow import Flow

MAX_DEPTH = 24
MAX_CONTEXTS = 5


class Site(NamedTuple):
    """One call: its node, its evaluated arguments, and the frame that it stands in."""

    node: ast.Call
    arguments: list[Value]
    keywords: dict[str, Value]
    frame: Frame

    def argument(self, position: int, name: str = "") -> Value | None:
        """An argument by position or by name."""
        if position < len(self.arguments):
            return self.arguments[position]
        return self.keywords.get(name) if name else None

    def node_of(self, position: int, name: str = "") -> ast.expr | None:
        """The expression of an argument."""
        if position < len(self.node.args):
            return self.node.args[position]
        for keyword in self.node.keywords:
            if keyword.arg == name:
                return keyword.value
        return None

    def values(self) -> list[Value]:
        """All arguments."""
        return [*self.arguments, *self.keywords.values()] if self.keywords else self.arguments


def call(flow: Flow, node: ast.Call, frame: Frame) -> Value:
    """The value of a call; what it writes to is reported."""
    function = node.func
    base: Value | None = None
    if isinstance(function, ast.Attribute):
        stored = None
        if frame.paths and type(function.value) is ast.Name:
            stored = frame.names.get(f"{function.value.id}.{function.attr}")
        if stored is None:
            base = flow.value(function.value, frame)
        callee = stored
    else:
        callee = flow.value(function, frame)
    arguments = [flow.value(argument, frame) for argument in node.args]
    keywords: dict[str, Value] = {}
    for keyword in node.keywords:
        value = flow.value(keyword.value, frame)
        if keyword.arg is not None:
            keywords[keyword.arg] = value
    site = Site(node, arguments, keywords, frame)
    if "placement" in keywords and "sbp" in keywords and not is_module_value(base):
        keep(flow, site)
        why = Reason("placement=..., sbp=...", node.lineno)
        return Value(TENSOR, CERTAIN, KNOWN, why, split=split_of(keywords["sbp"]))
    if base is not None:
        assert isinstance(function, ast.Attribute)
        return call_method(flow, site, base, function.attr, function.value)
    assert callee is not None
    return call_value(flow, site, callee)


def call_value(flow: Flow, site: Site, callee: Value) -> Value:
    """Call what a value may refer to."""
    result: Value | None = None
    for ref in callee.refs:
        found = call_ref(flow, site, ref, callee)
        result = found if result is None else join(result, found)
    if result is None:
        return unknown_call(flow, site)
    if callee.kinds & UNKNOWN:
        # It may be something else too: a parameter of which only the default is known.
        report_unknown_inplace(flow, site)
    return result


def call_ref(flow: Flow, site: Site, ref: Any, callee: Value) -> Value:
    """Call one thing."""
    if isinstance(ref, NameRef):
        return call_name(flow, site, ref.dotted)
    if isinstance(ref, FunctionRef):
        keep(flow, site)
        if ref.local:
            return call_local(flow, site, ref)
        return call_function(flow, site, ref.info, ref.receiver)
    if isinstance(ref, ClassRef):
        keep(flow, site)
        return instantiate(flow, site, ref.info)
    if isinstance(ref, Instance):
        return call_instance(flow, site, ref, callee)
    if isinstance(ref, MethodRef):
        return call_method(flow, site, ref.receiver, ref.name, None)
    return unknown_call(flow, site)


def call_local(flow: Flow, site: Site, ref: FunctionRef) -> Value:
    """A function under ``local_map``: it is given local pieces, and its results become distributed tensors."""
    inner = site._replace(
        arguments=[local_piece(value) for value in site.arguments],
        keywords={name: local_piece(value) for name, value in site.keywords.items()},
    )
    result = call_function(flow, inner, ref.info, ref.receiver)
    if result.kinds & TENSOR:
        return Value(TENSOR, CERTAIN, KNOWN, Reason("local_map", site.node.lineno))
    return result


def local_piece(value: Value) -> Value:
    """A distributed tensor's local piece; anything else as it is."""
    if value.level == CERTAIN and value.kinds & TENSOR:
        return value.with_marks(add=LOCAL)
    return value


# -------------------------------------------------------------------- what calls keep and return


def keep(flow: Flow, site: Site) -> None:
    """The callee may keep every argument, or return it."""
    frame = site.frame
    for argument, value in zip(site.node.args, site.arguments):
        if type(argument) is not ast.Constant:
            flow.release(argument, frame)
            if value.marks & BORROWED:
                flow.dropped.append("!")
    for keyword in site.node.keywords:
        if type(keyword.value) is not ast.Constant:
            flow.release(keyword.value, frame)


def unknown_call(flow: Flow, site: Site, sure: int = HINTED) -> Value:
    """Call something that is not in the file and not known: given tensors, it may return one."""
    keep(flow, site)
    call_escaped(flow, site)
    report_unknown_inplace(flow, site)
    if sure >= ASSUMED or any(value.kinds & TENSOR for value in site.values()):
        return Value(TENSOR | UNKNOWN, site.frame.context, sure)
    return UNKNOWN_VALUE


def call_escaped(flow: Flow, site: Site) -> None:
    """Functions of the file that are handed to something else (checkpoint, hooks) are called by it."""
    for value in site.values():
        for ref in value.refs:
            if isinstance(ref, FunctionRef) and not ref.info.escaped and site.frame.context >= LIKELY:
                ref.info.escaped = True
                enter(flow, ref.info, ref.receiver, site.frame.context, assumed=True)


def tensor_result(
    flow: Flow, frame: Frame, values: Iterable[Value], sure: int = KNOWN, marks: int = FRESH
) -> Value:
    """The result of an operator: distributed if one of its operands is."""
    for value in values:
        found = value if value.level == CERTAIN else distributed_inside(value)
        if found is not None and not found.marks & LOCAL:
            return Value(TENSOR, CERTAIN, KNOWN, found.why, marks)
    return Value(TENSOR, frame.context, sure, None, marks)


def distributed_inside(value: Value) -> Value | None:
    """A distributed tensor among the items of a container, one level deep."""
    if value.items:
        for item in value.items:
            if item.level == CERTAIN:
                return item
    if value.element is not None and value.element.level == CERTAIN:
        return value.element
    return None


def holds_distributed(value: Value) -> bool:
    """Whether a value is, holds, or belongs to something that is distributed."""
    if value.level == CERTAIN or distributed_inside(value) is not None:
        return True
    return any(isinstance(ref, Instance) and ref.parallel for ref in value.refs)


def alias_result(flow: Flow, site: Site, value: Value, node: ast.expr | None, **changes: Any) -> Value:
    """A view of a value, or the value itself: fresh only if nothing else refers to it after the statement."""
    marks = value.marks & ~PARAMETER
    if marks & FRESH and node is not None and flow.release(node, site.frame, for_good=False):
        marks = (marks & ~FRESH) | BORROWED
    return value.replaced(marks=marks, **changes)


def marks_of_alias(flow: Flow, site: Site) -> int:
    """FRESH or BORROWED for the result of a call that may hand back its first argument, or 0."""
    first, node = site.argument(0), site.node_of(0)
    if first is None or node is None:
        return 0
    return alias_result(flow, site, first, node).marks & (FRESH | BORROWED)


# -------------------------------------------------------------------- functions of the file


def parameters_of(info: FunctionInfo) -> tuple[list[ast.arg], list[ast.arg]]:
    """The positional and the keyword-only parameters of a function."""
    arguments = info.node.args
    return arguments.posonlyargs + arguments.args, arguments.kwonlyargs


def call_function(flow: Flow, site: Site, info: FunctionInfo, receiver: Value | None) -> Value:
    """Enter a function of the file with the arguments of a call."""
    context = site.frame.context
    positional, keyword_only = parameters_of(info)
    given: dict[str, Value] = {}
    rest: list[Value] = []
    values = list(site.arguments)
    if receiver is not None and info.kind != "static":
        values.insert(0, receiver)
    bound = len(values) - len(site.arguments)
    star = first_star(site.node.args) + bound
    for position, value in enumerate(values):
        if position < len(positional) and position < star:
            given[positional[position].arg] = value.with_marks(drop=FRESH | BORROWED)
        else:
            rest.append(value.with_marks(drop=FRESH | BORROWED))
    if rest and star < len(values):
        # Where the star puts its items is not known: each parameter left may get any of them.
        joined = Value(SEQUENCE, items=tuple(rest)).elements()
        for parameter in positional[star:]:
            given[parameter.arg] = joined
    names = {parameter.arg for parameter in positional + keyword_only}
    extra: Value | None = None
    for name, value in site.keywords.items():
        value = value.with_marks(drop=FRESH | BORROWED)
        if name in names:
            given[name] = value
        else:
            extra = value if extra is None else join(extra, value)
    return run_function(flow, info, given, rest, extra, context, receiver, assumed=False)


def first_star(arguments: Sequence[ast.expr]) -> int:
    """The position of the first ``*args`` of a call; their number if there is none."""
    for position, argument in enumerate(arguments):
        if type(argument) is ast.Starred:
            return position
    return len(arguments)


def enter(flow: Flow, info: FunctionInfo, receiver: Value | None, context: int, assumed: bool) -> Value:
    """Enter a function without knowing its arguments; ``assumed`` takes those without annotation for tensors."""
    given: dict[str, Value] = {}
    positional, _ = parameters_of(info)
    if receiver is not None and positional and info.kind != "static":
        given[positional[0].arg] = receiver
    return run_function(flow, info, given, [], None, context, receiver, assumed)


def run_function(
    flow: Flow,
    info: FunctionInfo,
    given: dict[str, Value],
    rest: list[Value],
    extra: Value | None,
    context: int,
    receiver: Value | None,
    assumed: bool,
) -> Value:
    """Follow the body of a function, once for each kind of arguments."""
    frame = Frame({}, context, parent=info.home, owner=info.owner, receiver=receiver)
    positional, keyword_only = parameters_of(info)
    for parameter in positional + keyword_only:
        frame.names[parameter.arg] = parameter_value(flow, info, parameter, given, frame, assumed)
    arguments = info.node.args
    if arguments.vararg is not None:
        if rest:
            element = Value(SEQUENCE, items=tuple(rest)).elements()
        else:
            element = Value(TENSOR | UNKNOWN, context, HINTED) if assumed else UNKNOWN_VALUE
        frame.names[arguments.vararg.arg] = sequence_of(element)
    if arguments.kwarg is not None:
        frame.names[arguments.kwarg.arg] = mapping_of(extra or UNKNOWN_VALUE)
    key = (context, assumed, tuple(summary(value) for value in frame.names.values()))
    known = info.results.get(key)
    if known is not None:
        return known
    declared = info.node.returns if not isinstance(info.node, ast.Lambda) else None
    if flow.may_skip(info) and not any(holds_distributed(value) for value in frame.names.values()):
        promised = annotation_value(flow, declared, frame) if declared is not None else None
        if promised is not None or context < LIKELY:
            return promised or UNKNOWN_VALUE
    if key in info.running or flow.depth >= MAX_DEPTH or len(info.results) >= MAX_CONTEXTS:
        if info.results and key not in info.running:
            return next(reversed(info.results.values()))
        fallback = annotation_value(flow, declared, frame) if declared is not None else None
        return fallback or Value(TENSOR | UNKNOWN, context, HINTED)
    info.running.add(key)
    flow.depth += 1
    place, dropped, statement = flow.place, flow.dropped, flow.statement
    flow.place, flow.dropped = place_of(info), []
    try:
        result = follow(flow, info, frame)
    finally:
        flow.place, flow.dropped, flow.statement = place, dropped, statement
        flow.depth -= 1
        info.running.discard(key)
    if declared is not None and not result.kinds & ~(UNKNOWN | NONE | OBJECT) and result.level < CERTAIN:
        result = annotation_value(flow, declared, frame) or result
    info.results[key] = result
    return result


def follow(flow: Flow, info: FunctionInfo, frame: Frame) -> Value:
    """The result of a function's body."""
    if isinstance(info.node, ast.Lambda):
        return flow.value(info.node.body, frame)
    flow.run(info.node.body, frame)
    if frame.yielded is not None:
        return sequence_of(frame.yielded)
    if isinstance(info.node, ast.AsyncFunctionDef):
        return UNKNOWN_VALUE
    return frame.returned or NONE_VALUE


def place_of(info: FunctionInfo) -> str:
    """The name of a function for messages."""
    return f"{info.owner.name}.{info.name}" if info.owner is not None else f"{info.name}()"


def parameter_value(
    flow: Flow, info: FunctionInfo, parameter: ast.arg, given: dict[str, Value], frame: Frame, assumed: bool
) -> Value:
    """What a parameter holds: what the call gave, its default, and what its annotation says."""
    name = parameter.arg
    value = given.get(name)
    default = info.defaults.get(name)
    declared = None
    if parameter.annotation is not None:
        declared = annotation_value(flow, parameter.annotation, frame)
    if value is None:
        value = unknown_parameter(info, default, frame, assumed, parameter.annotation is not None)
        if declared is None:
            return value
        if default is not None and default.kinds == NONE:
            return join(declared, NONE_VALUE)
        return declared if value.kinds & UNKNOWN or declared.kinds & TENSOR else value
    if declared is None:
        return value
    if declared.kinds & TENSOR:
        if declared.level == CERTAIN and value.level < CERTAIN:
            return declared
        if value.kinds & TENSOR and declared.kinds & ~NONE == TENSOR and value.sure < KNOWN:
            return value.replaced(kinds=value.kinds & ~UNKNOWN, sure=KNOWN)
    return declared if not value.kinds & ~UNKNOWN and not value.refs else value


def unknown_parameter(
    info: FunctionInfo, default: Value | None, frame: Frame, assumed: bool, annotated: bool
) -> Value:
    """A parameter of which no call is known."""
    if default is not None and default.kinds != NONE:
        return default if default.kinds & (NUMBER | SEQUENCE | MAPPING) else join(default, UNKNOWN_VALUE)
    if assumed and not annotated:
        value = Value(TENSOR | UNKNOWN, frame.context, ASSUMED)
        return value if default is None else value.replaced(kinds=TENSOR | UNKNOWN | NONE)
    return UNKNOWN_VALUE


def summary(value: Value) -> tuple[Any, ...]:
    """What two arguments must share for a function to be followed once for both."""
    refs = value.refs
    return (
        value.kinds,
        value.level,
        value.sure,
        value.marks,
        value.split,
        refs if not refs or not isinstance(refs[0], MethodRef) else (),
        value.const if isinstance(value.const, (bool, int)) else None,
        (value.element.kinds, value.element.level) if value.element is not None else None,
        tuple((item.kinds, item.level) for item in value.items) if value.items is not None else None,
    )


# -------------------------------------------------------------------- objects


def is_module_value(value: Value | None) -> bool:
    """Whether a value is an object whose class is a module, or a class outside the file."""
    if value is None:
        return False
    for ref in value.refs:
        if isinstance(ref, Instance):
            return ref.info is None or classes.is_module(ref.info)
    return False


def instantiate(flow: Flow, site: Site, info: ClassInfo) -> Value:
    """``C(...)`` for a class of the file."""
    outside = info.outside()
    if any(last(base) == "Tensor" for base in outside):
        return tensor_result(flow, site.frame, site.arguments, marks=0)
    if any(base.startswith("torch.optim.") or last(base) == "Optimizer" for base in outside):
        store_parameter_groups(flow, site, info)
    if info.fields and "__init__" not in info.methods:
        for name, value in [*zip(info.fields, site.arguments), *site.keywords.items()]:
            if name in info.fields:
                flow.store_attribute(info, name, value.with_marks(drop=FRESH | BORROWED))
    else:
        init = info.method("__init__")
        if init is not None and not classes.is_module(info):
            call_function(flow, site, init, classes.instance_value(info))
    return classes.instance_value(info)


def store_parameter_groups(flow: Flow, site: Site, info: ClassInfo) -> None:
    """An optimizer of the file is made: its groups hold the parameters that it is given."""
    for value in site.values():
        parameter = value.elements() if value.kinds & SEQUENCE else value
        if parameter.kinds & MAPPING:
            parameter = parameter.elements().elements()
        if parameter.kinds & TENSOR:
            flow.store_attribute(info, "param_groups", classes.parameter_groups(parameter))


def call_instance(flow: Flow, site: Site, ref: Instance, callee: Value) -> Value:
    """``module(x)``."""
    relate_inplace(flow, site, callee, site.argument(0, "input"))
    if ref.info is not None:
        info = ref.info
        if classes.is_module(info):
            method = info.method("forward") or info.method("build")
            if method is not None:
                keep(flow, site)
                inner = Frame({}, LIKELY)
                return call_function(flow, site._replace(frame=inner), method, callee)
            return unknown_call(flow, site, ASSUMED)
        method = info.method("__call__")
        if method is not None:
            keep(flow, site)
            return call_function(flow, site, method, callee)
        return unknown_call(flow, site)
    name = last(ref.dotted)
    if not ref.dotted.startswith("torch.nn."):
        capital = name[:1].isupper() or not name
        return unknown_call(flow, site, ASSUMED if capital and site.frame.context >= LIKELY else HINTED)
    if name in CONTAINER_MODULES:
        keep(flow, site)
        items = callee.items or ()
        if name == "Sequential" and makes_new(items, len(items)):
            return tensor_result(flow, site.frame, ())
        return Value(TENSOR | UNKNOWN, site.frame.context, ASSUMED)
    if name in TUPLE_MODULES:
        return sequence(tensor_result(flow, site.frame, (), marks=0), UNKNOWN_VALUE)
    values: Sequence[Value] = () if ref.parallel == PARAMETERS else site.arguments
    result = tensor_result(flow, site.frame, values, marks=0)
    may_be_inplace = f"torch.nn.{name}" in flow.api.inplace_modules and callee.const is not FRESH_MODULE
    if name in ALIAS_MODULES or may_be_inplace:
        return result.with_marks(add=marks_of_alias(flow, site))
    return result.with_marks(add=FRESH)


# The constant of a module that surely does not hand back its input.
FRESH_MODULE = "fresh"


def relate_inplace(flow: Flow, site: Site, callee: Value, first: Value | None) -> None:
    """A module that was made with ``inplace=True`` is called here on ``first``: name this line in that finding."""
    if isinstance(callee.const, InplaceModule) and first is not None and first.kinds & (TENSOR | UNKNOWN):
        kept = kept_module(flow, site.frame, site.node, first, site.node_of(0, "input"))
        flow.writes.called(callee.const.key, site.node.lineno, kept)
    for position, part in enumerate(callee.items or ()):
        if position == 0 or not isinstance(part.const, InplaceModule):
            relate_inplace(flow, site, part, first)
        else:
            kept = "" if makes_new(callee.items or (), position) else IN_A_ROW
            flow.writes.called(part.const.key, site.node.lineno, kept)
    if callee.element is not None and isinstance(callee.element.const, InplaceModule):
        flow.writes.called(callee.element.const.key, site.node.lineno, IN_A_ROW)


IN_A_ROW = "it may be given what another module in the row still holds"


def makes_new(items: Sequence[Value], position: int) -> bool:
    """Whether one of the modules before a position makes a new tensor, so that nobody else holds it."""
    for item in items[:position]:
        for ref in item.refs:
            if isinstance(ref, Instance) and ref.info is None and ref.dotted.startswith("torch.nn."):
                name = last(ref.dotted)
                if name not in ALIAS_MODULES and f"torch.nn.{name}" not in INPLACE_NAMES:
                    return True
    return False


class InplaceModule(NamedTuple):
    """The mark of a module that works in place: the finding at its constructor."""

    key: tuple[int, int, str]


# -------------------------------------------------------------------- methods


def call_method(flow: Flow, site: Site, base: Value, name: str, receiver: ast.expr | None) -> Value:
    """``base.name(...)``; ``receiver`` is the expression of ``base`` if it stands in the call."""
    if base.refs:
        found = call_method_of_refs(flow, site, base, name)
        if found is not None:
            return found
    if base.kinds & (SEQUENCE | MAPPING) and not base.kinds & TENSOR:
        found = container_method(flow, site, base, name, receiver)
        if found is not None:
            return found
    found = distributed_method(flow, site, base, name)
    if found is not None:
        return found
    api = flow.api
    if name in api.methods or name in api.augmented_methods or name == "__setitem__":
        return writing_method(flow, site, base, name, receiver)
    if name in api.harmless:
        return alias_result(flow, site, base, receiver)
    if name in MODULE_METHODS:
        found = module_method(flow, site, base, name)
        if found is not None:
            return found
    kind = api.method_returns.get(name)
    if kind is not None and base.kinds & (TENSOR | UNKNOWN):
        return tensor_method(flow, site, base, name, kind, receiver)
    keep(flow, site)
    call_escaped(flow, site)
    report_unknown_inplace(flow, site)
    if base.kinds & TENSOR or any(value.kinds & TENSOR for value in site.values()):
        return Value(TENSOR | UNKNOWN, site.frame.context, HINTED)
    return UNKNOWN_VALUE


def call_method_of_refs(flow: Flow, site: Site, base: Value, name: str) -> Value | None:
    """A method of a module, class or object that is known; None if it is not."""
    result: Value | None = None
    for ref in base.refs:
        if isinstance(ref, NameRef):
            found: Value | None = call_name(flow, site, f"{ref.dotted}.{name}")
        elif isinstance(ref, ClassRef) and name == "apply" and classes.is_function_class(ref.info):
            found = apply_function(flow, site, ref.info)
        else:
            foreign = isinstance(ref, Instance) and ref.info is None
            attribute = None
            if not foreign or (name not in MODULE_METHODS and name not in flow.api.methods):
                attribute = classes.attribute_of_ref(flow, ref, base, name, site.frame)
            found = None
            if attribute is not None:
                found = call_value(flow, site, attribute)
                found = assumed_submodule(site, ref, attribute, found)
            elif isinstance(ref, SuperRef):
                if name in ENTRY_METHODS:
                    found = unknown_call(flow, site, ASSUMED)
            elif isinstance(ref, Instance) and ref.info is not None and name not in MODULE_METHODS:
                found = missing_method(flow, site, base, name)
        if found is not None:
            result = found if result is None else join(result, found)
    return result


def assumed_submodule(site: Site, ref: Any, attribute: Value, result: Value) -> Value:
    """``self.sub(x)`` returns a tensor, unless more is known."""
    if (
        isinstance(ref, Instance)
        and ref.info is not None
        and site.frame.context >= LIKELY
        and classes.is_module(ref.info)
        and result.kinds & UNKNOWN
        and result.sure < ASSUMED
        and not any(isinstance(one, FunctionRef) for one in attribute.refs)
    ):
        return Value(TENSOR | UNKNOWN, site.frame.context, ASSUMED)
    return result


def missing_method(flow: Flow, site: Site, base: Value, name: str) -> Value | None:
    """A method that the class does not have in this file: inherited, or a submodule set elsewhere."""
    api = flow.api
    if name in METHOD_SOURCES or name in LOCAL_METHODS or name in api.methods or name in api.method_returns:
        return None
    return unknown_call(flow, site)


def apply_function(flow: Flow, site: Site, info: ClassInfo) -> Value:
    """``F.apply(x)`` of an autograd.Function: its forward, and its backward with tensors."""
    keep(flow, site)
    forward = info.method("forward")
    if forward is None:
        return unknown_call(flow, site, ASSUMED)
    takes_context = info.method("setup_context") is None
    receiver = Value(OBJECT)
    result = call_function(flow, site, forward, None if not takes_context else receiver) if forward.kind != "static" \
        else call_function(flow, site._replace(arguments=[receiver, *site.arguments]), forward, None) if takes_context \
        else call_function(flow, site, forward, None)  # fmt: skip
    backward = info.method("backward")
    if backward is not None and site.frame.context >= LIKELY and not backward.escaped:
        backward.escaped = True
        enter(flow, backward, None, site.frame.context, assumed=True)
    return result


def distributed_method(flow: Flow, site: Site, base: Value, name: str) -> Value | None:
    """Methods that only distributed tensors have, or that make one."""
    line = site.node.lineno
    if name in METHOD_SOURCES and base.kinds & (TENSOR | UNKNOWN | OBJECT):
        if is_module_value(base):
            mark_parallel(flow, site, base, site.node.func.value, THROUGHOUT)  # type: ignore[attr-defined]
            return classes.parallelised(base, THROUGHOUT)
        placements = site.keywords.get("placements") or site.keywords.get("sbp") or site.argument(1)
        return Value(TENSOR, CERTAIN, KNOWN, Reason(f"{name}()", line), split=split_of(placements))
    if name in LOCAL_METHODS and base.kinds & (TENSOR | UNKNOWN):
        why = base.why if base.level == CERTAIN else Reason(f"{name}()", line)
        return Value(TENSOR, CERTAIN, KNOWN, why, LOCAL, split=None)
    if name in FULL_METHODS and base.kinds & (TENSOR | UNKNOWN):
        return Value(TENSOR, PLAIN, KNOWN)
    return None


def writing_method(flow: Flow, site: Site, base: Value, name: str, receiver: ast.expr | None) -> Value:
    """``x.add_(...)``, ``x.__iadd__(...)``, ``x.__setitem__(...)``."""
    frame = site.frame
    if method_hits(base, frame.context):
        code = AUGMENTED if name in flow.api.augmented_methods else ITEM if name == "__setitem__" else METHOD
        target = "" if receiver is None else source(receiver)
        kept = kept_method(flow, frame, base, site.node, receiver)
        what = f"`{target}.{name}(...)`" if target else f"`{name}`"
        root = chain_root(receiver) if receiver is not None else None
        report(flow, site, code, base, f"{what} writes into the tensor in place", kept, root or "")
    if name == "set_":
        base = base.with_marks(drop=FRESH)
    if base.kinds == UNKNOWN and frame.context >= LIKELY:
        base = Value(TENSOR, frame.context, ASSUMED)
    return alias_result(flow, site, base, receiver)


def tensor_method(
    flow: Flow, site: Site, base: Value, name: str, kind: str, receiver: ast.expr | None
) -> Value:
    """A method of a tensor, or one of a value that is not known, whose name tensors have."""
    frame = site.frame
    if kind == "number":
        return NUMBER_VALUE
    if kind == "size":
        return NUMBER_VALUE if site.arguments or "dim" in site.keywords else SHAPE_VALUE
    report_out(flow, site, name)
    if kind == "other":
        return sequence_of(NUMBER_VALUE) if name == "tolist" else OBJECT_VALUE
    if base.kinds & TENSOR:
        sure = base.sure if name in SHARED_METHODS else max(base.sure, ASSUMED)
    elif frame.context < LIKELY:
        sure = HINTED
    else:
        sure = HINTED if name in SHARED_METHODS else ASSUMED
    if name == "type" and not site.arguments:
        return TEXT_VALUE
    many = kind == "tensors" or (kind == "mixed" and returns_several(name, site))
    if name in MAY_COPY and base.level == CERTAIN and base.marks & LOCAL and site.values():
        # On another device or in another dtype it is a copy: then a write to it reaches no distributed tensor.
        return Value(TENSOR, min(frame.context, LIKELY), KNOWN)
    if name in flow.api.views:
        changes: dict[str, Any] = {"split": base.split if name in KEEPS_SPLIT else None, "sure": sure}
        if not base.kinds & TENSOR:
            changes.update(kinds=TENSOR | UNKNOWN, level=frame.context)
        if base.level == CERTAIN and base.split and cuts_dimension(name, site, base.split):
            base = base.with_marks(add=SPLIT_VIEW)
        result = alias_result(flow, site, base, receiver, **changes)
        return sequence_of(result) if many else result
    result = tensor_result(flow, frame, (base, *site.values()), sure)
    if sure < KNOWN and result.level < CERTAIN:
        result = result.replaced(kinds=TENSOR | UNKNOWN)
    if many:
        return sequence_of(result.with_marks(drop=FRESH))
    return result


MAY_COPY = frozenset({"to", "cpu", "cuda"})
KEEPS_SPLIT = frozenset(
    {"detach", "contiguous", "alias", "to", "float", "double", "half", "bfloat16", "requires_grad_"}
)


def returns_several(name: str, site: Site) -> bool:
    """Whether a method whose result depends on its arguments returns several tensors here."""
    if name in ("max", "min", "median", "nanmedian", "mode"):
        first = site.argument(0, "dim")
        return "dim" in site.keywords or (first is not None and first.kinds == NUMBER)
    if name == "nonzero":
        return "as_tuple" in site.keywords
    return bool(site.keywords)


MODULE_METHODS = words(
    """parameters named_parameters buffers named_buffers modules children named_modules named_children state_dict
    get_parameter get_buffer get_submodule register_buffer register_parameter add_module register_module to cuda cpu
    half float double bfloat16 train eval requires_grad_ apply register_forward_hook register_forward_pre_hook
    register_full_backward_hook register_full_backward_pre_hook register_hook to_empty compile"""
)


def module_method(flow: Flow, site: Site, base: Value, name: str) -> Value | None:
    """Methods of nn.Module."""
    context = site.frame.context
    parallel = max((ref.parallel for ref in base.refs if isinstance(ref, Instance)), default=0)
    parameter = (
        classes.distributed_parameter() if parallel else Value(TENSOR, context, KNOWN, marks=PARAMETER)
    )
    for ref in base.refs:
        if not parallel and isinstance(ref, Instance) and ref.info is not None:
            parameter = classes.own_parameter(flow, ref.info) or parameter
    instance = Value(OBJECT | UNKNOWN, refs=(Instance(None, "", parallel),))
    if name == "parameters":
        return sequence_of(parameter)
    if name == "named_parameters":
        return sequence_of(sequence(TEXT_VALUE, parameter))
    if name == "state_dict":
        return mapping_of(parameter)
    if name == "get_parameter":
        return parameter
    if name in ("buffers", "named_buffers", "get_buffer"):
        buffer = Value(TENSOR, context, KNOWN)
        if name == "buffers":
            return sequence_of(buffer)
        return buffer if name == "get_buffer" else sequence_of(sequence(TEXT_VALUE, buffer))
    if name in ("modules", "children"):
        return sequence_of(instance)
    if name in ("named_modules", "named_children"):
        return sequence_of(sequence(TEXT_VALUE, instance))
    if name in ("register_buffer", "register_parameter", "add_module", "register_module"):
        keep(flow, site)
        register(flow, site, base, name)
        return NONE_VALUE
    if name in HOOK_METHODS:
        keep(flow, site)
        call_hooks(flow, site)
        return OBJECT_VALUE
    if is_module_value(base):
        keep(flow, site)
        return base
    return None


HOOK_METHODS = words(
    """register_forward_hook register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook
    register_hook"""
)


def call_hooks(flow: Flow, site: Site) -> None:
    """A hook is called by the module's forward, or with a gradient."""
    for value in site.values():
        for ref in value.refs:
            if isinstance(ref, FunctionRef) and not ref.info.escaped:
                ref.info.escaped = True
                enter(flow, ref.info, ref.receiver, LIKELY, assumed=True)


def register(flow: Flow, site: Site, base: Value, name: str) -> None:
    """``self.register_buffer("name", tensor)``."""
    key, value = site.argument(0, "name"), site.argument(1, "tensor") or site.argument(1, "param")
    if key is None or value is None or not isinstance(key.const, str):
        return
    value = value.with_marks(drop=FRESH | BORROWED)
    if name == "register_buffer" and value.kinds & (UNKNOWN | TENSOR):
        value = Value(TENSOR, PLAIN, KNOWN) if value.level < CERTAIN else value
    if name == "register_parameter":
        value = value.with_marks(add=PARAMETER)
    for ref in base.refs:
        if isinstance(ref, Instance) and ref.info is not None:
            flow.store_attribute(ref.info, key.const, value)


# -------------------------------------------------------------------- functions by name


def call_name(flow: Flow, site: Site, dotted: str) -> Value:
    """Call something imported or built in."""
    if dotted.startswith("builtins."):
        return builtin(flow, site, dotted[9:])
    name = last(dotted)
    found = source_call(flow, site, dotted, name)
    if found is not None:
        return found
    if name == "checkpoint" and site.arguments:
        return checkpointed(flow, site)
    if name == "local_map" and site.arguments:
        keep(flow, site)
        return mapped_locally(site.arguments[0])
    if dotted.startswith("torch."):
        return torch_call(flow, site, dotted, name)
    if dotted in WRAPPERS:
        return wrapper(flow, site, dotted)
    if dotted.startswith(("numpy.", "jax.", "math.", "random.", "os.", "time.", "logging.")):
        keep(flow, site)
        return NUMBER_VALUE if dotted.startswith(("math.", "time.", "random.")) else OBJECT_VALUE
    if dotted.startswith("operator.") and name in OPERATOR_FUNCTIONS and len(site.arguments) == 2:
        return operator_function(flow, site, name)
    if dotted == "operator.setitem" and len(site.arguments) == 3:
        value, index = site.arguments[0], site.node.args[1]
        if item_hits(value, index, site.arguments[1], site.frame.context):
            report(
                flow,
                site,
                ITEM,
                value,
                f"`{name}(...)` writes into its first argument",
                "it has no other form",
            )
        return NONE_VALUE
    if dotted.startswith("einops."):
        first = site.argument(0)
        if first is not None and first.kinds & TENSOR:
            return alias_result(flow, site, first, site.node_of(0), split=None, items=None, element=None)
        return Value(TENSOR, site.frame.context, KNOWN) if site.frame.context >= LIKELY else UNKNOWN_VALUE
    if dotted.startswith("collections."):
        keep(flow, site)
        return mapping_of(None) if name in ("OrderedDict", "defaultdict") else sequence_of(UNKNOWN_VALUE)
    if name[:1].isupper() and not name.isupper():
        keep(flow, site)
        call_escaped(flow, site)
        report_unknown_inplace(flow, site)
        return Value(OBJECT | UNKNOWN, refs=(Instance(None, dotted),))
    return unknown_call(flow, site)


def source_call(flow: Flow, site: Site, dotted: str, name: str) -> Value | None:
    """The calls that make distributed tensors or parallelise modules; None for any other."""
    line = site.node.lineno
    if name in TENSOR_SOURCES or (flow.sources and (name in flow.sources or dotted in flow.sources)):
        marks = marks_of_alias(flow, site)
        placements = site.argument(2, "placements")
        return Value(TENSOR, CERTAIN, KNOWN, Reason(name, line), marks, split=split_of(placements))
    if name in CLASS_SOURCES:
        keep(flow, site)
        return Value(TENSOR, CERTAIN, KNOWN, Reason(name, line))
    if name == "from_local" and last(dotted.rpartition(".")[0]) in CLASS_SOURCES:
        marks = marks_of_alias(flow, site)
        placements = site.argument(2, "placements")
        why = Reason("DTensor.from_local", line)
        return Value(TENSOR, CERTAIN, KNOWN, why, marks, split=split_of(placements))
    if name in MODULE_SOURCES:
        keep(flow, site)
        module = site.argument(0, "module")
        node = site.node_of(0, "module")
        if module is None:
            return UNKNOWN_VALUE
        how = THROUGHOUT if name == "distribute_module" and "output_fn" not in site.keywords else PARAMETERS
        if module.kinds & SEQUENCE:
            return sequence_of(classes.parallelised(module.elements(), how))
        if node is not None:
            mark_parallel(flow, site, module, node, how)
        return classes.parallelised(module, how)
    if name in FACTORIES and dotted.startswith(FACTORY_MODULES):
        keep(flow, site)
        why = Reason(f"distributed.tensor.{name}", line)
        return Value(TENSOR, CERTAIN, KNOWN, why, split=split_of(site.keywords.get("placements")))
    if name in ("Shard", "Replicate", "Partial", "_StridedShard", "split", "broadcast", "partial_sum") and (
        name[0] in "SRP_" or ".sbp." in dotted
    ):
        dim = site.argument(0, "dim")
        if name in ("Shard", "_StridedShard", "split"):
            number = dim.const if dim is not None and type(dim.const) is int else None
            return Value(OBJECT, const=("S", number))
        return Value(OBJECT, const=("B", None))
    return None


def mark_parallel(flow: Flow, site: Site, module: Value, node: ast.expr, how: int) -> None:
    """The module that was parallelised is one from here on, under the name that it has."""
    key = path_of(node)
    if key is not None:
        site.frame.bind_path(key, classes.parallelised(module, how))
        if isinstance(node, ast.Attribute):
            base = flow.value(node.value, site.frame)
            for ref in base.refs:
                if isinstance(ref, Instance) and ref.info is not None:
                    flow.store_attribute(ref.info, node.attr, classes.parallelised(module, how))


def split_of(placements: Value | None) -> frozenset[int] | None:
    """The dimensions that placements split, when all of them are written out; None when they are not known."""
    if placements is None:
        return None
    parts = placements.items if placements.items is not None else (placements,)
    found = set()
    for part in parts:
        if not isinstance(part.const, tuple):
            return None
        kind, dimension = part.const
        if kind == "S":
            if dimension is None:
                return None
            found.add(dimension)
    return frozenset(found)


def torch_call(flow: Flow, site: Site, dotted: str, name: str) -> Value:
    """A function or class of torch."""
    api = flow.api
    report_out(flow, site, name)
    if dotted in WRAPPERS:
        return wrapper(flow, site, dotted)
    entry = api.functions.get(dotted)
    if entry is not None:
        return writing_function(flow, site, dotted, name, entry)
    if dotted.startswith("torch.nn."):
        found = torch_nn_call(flow, site, dotted, name)
        if found is not None:
            return found
    owner, _, _ = dotted.rpartition(".")
    if owner == "torch":
        return torch_function(flow, site, name, api.torch_returns.get(name))
    if owner in ("torch.Tensor", "torch._C.TensorBase"):
        if site.arguments:
            first = site.arguments[0]
            inner = site._replace(arguments=site.arguments[1:])
            return call_method(flow, inner, first, name, site.node.args[0])
        return UNKNOWN_VALUE
    if dotted.startswith("torch.ops."):
        return operator_call(flow, site, dotted, name)
    if dotted.startswith(TENSOR_NAMESPACES):
        if dotted.startswith("torch.linalg.") and name in MIXED_LINALG:
            return sequence_of(tensor_result(flow, site.frame, site.values(), marks=0))
        return tensor_result(flow, site.frame, site.values())
    if dotted in api.collectives:
        return collective(flow, site, name, api.collectives[dotted])
    if dotted.startswith("torch.optim.") and name[:1].isupper():
        parallel = any(is_distributed_group(value) for value in site.values())
        return Value(OBJECT, refs=(Instance(None, dotted, PARAMETERS if parallel else 0),))
    if name[:1].isupper():
        keep(flow, site)
        return Value(OBJECT | UNKNOWN, refs=(Instance(None, dotted),))
    keep(flow, site)
    call_escaped(flow, site)
    if any(value.kinds & TENSOR for value in site.values()):
        return Value(TENSOR | UNKNOWN, site.frame.context, HINTED)
    return UNKNOWN_VALUE


def is_distributed_group(value: Value) -> bool:
    """Whether an argument of an optimizer holds distributed parameters."""
    inside = value.elements() if value.kinds & SEQUENCE else value
    return inside.level == CERTAIN or (
        inside.element is not None and inside.element.elements().level == CERTAIN
    )


def torch_function(flow: Flow, site: Site, name: str, kind: str | None) -> Value:
    """``torch.name(...)``."""
    frame = site.frame
    if kind is None:
        if name.endswith("Tensor") or name == "Tensor":
            return tensor_result(flow, frame, site.values(), marks=0)
        if name == "Size":
            return SHAPE_VALUE
        if name.startswith(("is_", "get_", "set_", "use_", "sym_", "are_", "manual_", "initial_")):
            return NUMBER_VALUE
        keep(flow, site)
        call_escaped(flow, site)
        return OBJECT_VALUE
    if kind == "number":
        return NUMBER_VALUE
    if kind == "size":
        return SHAPE_VALUE
    if kind == "other":
        return OBJECT_VALUE
    if kind == "mixed" and name in ("max", "min", "median", "nanmedian", "mode"):
        second = site.argument(1, "dim")
        kind = "tensors" if second is not None and second.kinds == NUMBER else "tensor"
    elif kind == "mixed":
        if name == "load":
            return UNKNOWN_VALUE
        if name in ("cond", "while_loop"):
            return unknown_call(flow, site)
        kind = "tensors" if len(site.keywords) > 0 and name.startswith("unique") else "tensor"
    if name == "where" and len(site.arguments) == 1:
        kind = "tensors"
    marks = FRESH
    if name in flow.api.views:
        marks = 0
        first = site.argument(0, "input")
        if kind == "tensor" and first is not None and first.kinds & TENSOR:
            result = alias_result(flow, site, first, site.node_of(0, "input"), split=None)
            if first.level == CERTAIN and first.split and cuts_dimension(name, site, first.split, shift=1):
                result = result.with_marks(add=SPLIT_VIEW)
            return result.replaced(sure=KNOWN, kinds=TENSOR, items=None, element=None)
        keep(flow, site)
    result = tensor_result(flow, frame, site.values(), marks=marks)
    return sequence_of(result.with_marks(drop=FRESH)) if kind == "tensors" else result


def torch_nn_call(flow: Flow, site: Site, dotted: str, name: str) -> Value | None:
    """torch.nn: modules, parameters, functions."""
    api = flow.api
    if dotted.startswith("torch.nn.functional."):
        position = api.inplace_functions.get(dotted)
        if position is not None and is_inplace(site, position):
            report_inplace_function(flow, site, name)
            first = site.argument(0, "input")
            return (
                alias_result(flow, site, first, site.node_of(0, "input"))
                if first is not None
                else UNKNOWN_VALUE
            )
        return torch_function(flow, site, name, api.functional_returns.get(name, "tensor"))
    if name in ("Parameter", "Buffer", "UninitializedParameter"):
        keep(flow, site)
        result = tensor_result(flow, site.frame, site.arguments[:1], marks=0)
        return result.with_marks(add=PARAMETER if name != "Buffer" else 0)
    if dotted.startswith(("torch.nn.init.", "torch.nn.utils.")):
        if name in ("pad_sequence", "parameters_to_vector"):
            return tensor_result(flow, site.frame, site.values(), marks=0)
        keep(flow, site)
        first = site.argument(0)
        return first if first is not None and first.refs else unknown_call(flow, site)
    if not name[:1].isupper():
        return None
    keep(flow, site)
    items = None
    element = None
    if name in CONTAINER_MODULES:
        items, element = container_items(site)
        if name == "Sequential":
            for place, item in enumerate(items or ()):
                if isinstance(item.const, InplaceModule) and makes_new(items or (), place):
                    flow.writes.placed(item.const.key)
    const: Any = FRESH_MODULE
    position = api.inplace_modules.get(f"torch.nn.{name}")
    if position is not None and is_inplace(site, position):
        const = report_inplace_module(flow, site, name)
    elif position is not None and not is_surely_out_of_place(site, position):
        const = None
    return Value(OBJECT, refs=(Instance(None, dotted),), items=items, element=element, const=const)


def container_items(site: Site) -> tuple[tuple[Value, ...] | None, Value | None]:
    """What an nn.Sequential or nn.ModuleList holds."""
    if len(site.arguments) == 1 and site.arguments[0].kinds & (SEQUENCE | MAPPING):
        first = site.arguments[0]
        return first.items, first.element
    if any(type(argument) is ast.Starred for argument in site.node.args):
        return None, Value(SEQUENCE, items=tuple(site.arguments)).elements()
    return tuple(site.arguments), None


def is_inplace(site: Site, position: int) -> bool:
    """Whether a call says ``inplace=True``."""
    value = site.argument(position, "inplace")
    return value is not None and value.const is True


def is_surely_out_of_place(site: Site, position: int) -> bool:
    """Whether a call leaves ``inplace`` at its default, or says False."""
    value = site.argument(position, "inplace")
    return value is None or value.const is False


def writing_function(flow: Flow, site: Site, dotted: str, name: str, entry: dict[str, Any]) -> Value:
    """A function of torch with a trailing underscore."""
    group = entry["group"]
    if group in ("init", "clip", "harmless"):
        # Initialisation and clipping write by design, and are known to keep placements.
        first = site.argument(0)
        return first if first is not None else UNKNOWN_VALUE
    for position in entry["writes"]:
        value = site.argument(position)
        if value is None:
            continue
        if group in ("foreach", "fused", "amp"):
            inside = value.elements() if value.kinds & (SEQUENCE | MAPPING) else value
            if method_hits(inside, site.frame.context):
                report(
                    flow, site, FOREACH, inside, f"`{name}` writes into every tensor of the list",
                    "a list of tensors is written, which others may hold",
                )  # fmt: skip
                break
        elif method_hits(value, site.frame.context):
            written = site.node_of(0, "input")
            kept = f"there is no out-of-place function for `{name}`"
            if "functional" in entry and isinstance(site.node.func, ast.Attribute):
                kept = kept_function(flow, site.frame, site.node, value, written)
            message = f"`{name}(...)` writes into its first argument in place"
            report(flow, site, METHOD, value, message, kept, plain_name(written))
    first = site.argument(0)
    return alias_result(flow, site, first, site.node_of(0)) if first is not None else UNKNOWN_VALUE


def report(flow: Flow, site: Site, code: str, value: Value, message: str, kept: str, name: str = "") -> None:
    """Report the write that a call is; ``name`` is the plain name that it writes to."""
    flow.writes.add(site.node, code, value, site.frame.context, message, kept, flow.place, name=name)


def report_inplace_function(flow: Flow, site: Site, name: str) -> None:
    """``F.relu(x, inplace=True)``."""
    first = site.argument(0, "input")
    if first is not None and method_hits(first, site.frame.context):
        written = site.node_of(0, "input")
        kept = kept_function(flow, site.frame, site.node, first, written)
        message = f"`{name}(..., inplace=True)` writes into its input"
        report(flow, site, INPLACE, first, message, kept, plain_name(written))


def report_inplace_module(flow: Flow, site: Site, name: str) -> InplaceModule:
    """``nn.ReLU(inplace=True)``: wherever it is made, it will write into what it is given."""
    value = Value(TENSOR, LIKELY, KNOWN)
    message = f"`{name}(inplace=True)` writes into its input whenever it is called"
    flow.writes.add(site.node, INPLACE, value, LIKELY, message, "", flow.place, placed=False)
    return InplaceModule((*start_of(site.node), INPLACE))


def report_unknown_inplace(flow: Flow, site: Site) -> None:
    """``inplace=True`` given to something unknown, in a module: an activation that was passed in."""
    value = site.keywords.get("inplace")
    if value is None or value.const is not True:
        return
    if site.arguments and not site.arguments[0].kinds & TENSOR:
        return  # it works on something else in place, such as a module whose parts are to be fused
    owner = site.frame.owner
    if owner is not None and classes.is_module(owner):
        message = "a module made with `inplace=True` writes into its input whenever it is called"
        kept = "what it makes is not known here"
        flow.writes.add(site.node, INPLACE, Value(TENSOR, LIKELY, KNOWN), LIKELY, message, kept, flow.place)


def report_out(flow: Flow, site: Site, name: str) -> None:
    """``torch.add(a, b, out=c)``."""
    out = site.keywords.get("out")
    if out is None:
        return
    parts = out.items if out.items is not None else (out,)
    for part in parts:
        if method_hits(part, site.frame.context):
            message = f"`{name}(..., out=...)` writes its result into a tensor that is there already"
            report(flow, site, OUT, part, message, "`out=` names the tensor that others read the result from")
            return


def operator_function(flow: Flow, site: Site, name: str) -> Value:
    """``operator.iadd(x, y)``."""
    first, second = site.arguments
    if augmented_hits(first, second, site.frame.context):
        kept = "`operator` functions have no out-of-place form here"
        report(
            flow, site, AUGMENTED, first, f"`operator.{name}` writes into its first argument in place", kept
        )
    return alias_result(flow, site, first, site.node.args[0]) if first.kinds & TENSOR else UNKNOWN_VALUE


def operator_call(flow: Flow, site: Site, dotted: str, name: str) -> Value:
    """``torch.ops.aten.add_.Tensor(x, y)``."""
    parts = dotted.split(".")
    if len(parts) < 4:
        return UNKNOWN_VALUE
    operator = parts[3]
    first = site.argument(0)
    if operator in flow.api.methods and first is not None and parts[2] == "aten":
        if method_hits(first, site.frame.context):
            message = f"`{operator}` writes into its first argument in place"
            report(flow, site, METHOD, first, message, "operators are called by name here")
        return alias_result(flow, site, first, site.node_of(0))
    sure = KNOWN if parts[2] == "aten" else HINTED
    keep(flow, site)
    return tensor_result(flow, site.frame, site.values(), sure, marks=0)


def collective(flow: Flow, site: Site, name: str, positions: Sequence[int]) -> Value:
    """A collective that writes into what it is given: reported on the local piece of a distributed tensor."""
    keep(flow, site)
    for position in positions:
        value = site.argument(position)
        if value is None:
            continue
        inside = value.elements() if value.kinds & SEQUENCE else value
        if inside.level == CERTAIN and inside.marks & LOCAL:
            message = f"`{name}` writes into the local piece of a distributed tensor"
            report(flow, site, LOCAL_WRITE, inside, message, "a collective has no out-of-place form here")
    return OBJECT_VALUE


def wrapper(flow: Flow, site: Site, dotted: str) -> Value:
    """Calls that give back their first argument or a function like it."""
    keep(flow, site)
    first = site.argument(0)
    if first is None:
        return OBJECT_VALUE
    if dotted == "typing.cast":
        declared = annotation_value(flow, site.node.args[0], site.frame) if site.node.args else None
        value = site.argument(1) or UNKNOWN_VALUE
        return declared if declared is not None and not value.kinds & TENSOR else value
    if dotted == "copy.deepcopy":
        return first.with_marks(add=FRESH if first.kinds & TENSOR else 0, drop=LOCAL | SPLIT_VIEW | BORROWED)
    if dotted == "copy.copy":
        # The copy of a tensor shares its memory.
        return first.with_marks(drop=FRESH | BORROWED)
    inplace = site.keywords.get("inplace")
    if dotted == "functools.partial" and inplace is not None and inplace.const is True:
        for ref in first.refs:
            if isinstance(ref, NameRef) and ref.dotted in flow.api.inplace_modules:
                report_inplace_module(flow, site, last(ref.dotted))
    if any(isinstance(ref, (FunctionRef, ClassRef, Instance)) for ref in first.refs):
        return first
    return UNKNOWN_VALUE


def checkpointed(flow: Flow, site: Site) -> Value:
    """``checkpoint(f, x)``: f is called with the rest."""
    arguments = site.node.args
    if len(arguments) < 2 or any(type(argument) is ast.Starred for argument in arguments):
        return unknown_call(flow, site)
    node = ast.copy_location(ast.Call(arguments[0], arguments[1:], []), site.node)
    return call_value(flow, Site(node, site.arguments[1:], {}, site.frame), site.arguments[0])


def mapped_locally(first: Value) -> Value:
    """``local_map(f, ...)``."""
    refs = tuple(ref._replace(local=True) if isinstance(ref, FunctionRef) else ref for ref in first.refs)
    return first.replaced(refs=refs)


# -------------------------------------------------------------------- Python's own functions


def builtin(flow: Flow, site: Site, name: str) -> Value:
    """A built-in function."""
    first = site.argument(0)
    if name in NUMBER_BUILTINS:
        return NUMBER_VALUE
    if name in TEXT_BUILTINS:
        return TEXT_VALUE
    if name == "super":
        owner, receiver = method_owner(site.frame)
        if owner is not None and receiver is not None:
            return Value(OBJECT, refs=(SuperRef(owner, receiver),))
        return UNKNOWN_VALUE
    if first is None:
        if name in ("list", "tuple", "set", "frozenset"):
            return sequence()
        return mapping_of(None) if name == "dict" else UNKNOWN_VALUE
    if name == "range":
        return sequence_of(NUMBER_VALUE)
    if name in ("list", "tuple", "set", "frozenset", "sorted", "reversed", "iter"):
        keep(flow, site)
        if first.kinds & SEQUENCE and first.items is not None and name in ("list", "tuple"):
            return Value(SEQUENCE, items=first.items)
        return sequence_of(flow.iteration(first))
    if name == "enumerate":
        keep(flow, site)
        return sequence_of(sequence(NUMBER_VALUE, flow.iteration(first)))
    if name == "zip":
        keep(flow, site)
        return sequence_of(sequence(*(flow.iteration(value) for value in site.arguments)))
    if name == "dict":
        keep(flow, site)
        return first if first.kinds & MAPPING else mapping_of(UNKNOWN_VALUE)
    if name == "map":
        return mapped(flow, site)
    if name == "filter":
        keep(flow, site)
        return sequence_of(flow.iteration(site.arguments[1])) if len(site.arguments) > 1 else UNKNOWN_VALUE
    if name == "next":
        return flow.iteration(first) if first.kinds & SEQUENCE else UNKNOWN_VALUE
    if name in ("sum", "max", "min", "abs", "pow", "divmod"):
        return reduced(flow, site, first, name)
    if name == "getattr":
        key = site.argument(1)
        if key is not None and isinstance(key.const, str):
            keep(flow, site)
            found = flow.attribute_of(first, key.const, site.frame, site.node.lineno)
            default = site.argument(2)
            return found if default is None else join(found, default)
        return UNKNOWN_VALUE
    if name == "setattr":
        set_attribute(flow, site, first)
        return NONE_VALUE
    if name == "print":
        return NONE_VALUE
    keep(flow, site)
    return UNKNOWN_VALUE


def method_owner(frame: Frame) -> tuple[ClassInfo | None, Value | None]:
    """The class and the object of the method that a frame belongs to, through nested functions."""
    above: Frame | None = frame
    while above is not None:
        if above.owner is not None and above.receiver is not None:
            return above.owner, above.receiver
        above = above.parent
    return None, None


def mapped(flow: Flow, site: Site) -> Value:
    """``map(f, xs)``."""
    if len(site.arguments) < 2:
        return UNKNOWN_VALUE
    items = [flow.iteration(value) for value in site.arguments[1:]]
    inner = Site(site.node, items, {}, site.frame)
    keep(flow, site)
    return sequence_of(call_value(flow, inner, site.arguments[0]).with_marks(drop=FRESH | BORROWED))


def reduced(flow: Flow, site: Site, first: Value, name: str) -> Value:
    """``sum(xs)``, ``max(a, b)`` and their like: a tensor if what they are given holds one."""
    parts = site.arguments
    if name == "sum" or (len(parts) == 1 and first.kinds & SEQUENCE):
        parts = [flow.iteration(first)]
    if any(value.kinds & TENSOR for value in parts):
        sure = min(value.sure for value in parts if value.kinds & TENSOR)
        return tensor_result(flow, site.frame, parts, sure, marks=FRESH if name == "sum" else 0)
    if all(value.kinds == NUMBER for value in parts):
        return NUMBER_VALUE
    return UNKNOWN_VALUE


def set_attribute(flow: Flow, site: Site, base: Value) -> None:
    """``setattr(x, "data", t)``."""
    key, value = site.argument(1), site.argument(2) or UNKNOWN_VALUE
    keep(flow, site)
    if key is None or not isinstance(key.const, str):
        return
    if key.const == "data" and base.kinds & TENSOR:
        report(
            flow, site, "SBP106", base, '`setattr(..., "data", ...)` puts other memory under the tensor',
            "`.data =` changes the tensor for everybody who holds it",
        )  # fmt: skip
        return
    for ref in base.refs:
        if isinstance(ref, Instance) and ref.info is not None:
            flow.store_attribute(ref.info, key.const, value.with_marks(drop=FRESH | BORROWED))


# -------------------------------------------------------------------- views of a split dimension


def cuts_split_dimension(flow: Flow, base: Value, index: ast.expr, frame: Frame) -> bool:
    """Whether ``base[index]`` selects along a dimension that is split over ranks."""
    split = base.split
    if not split:
        return False
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    dimension = 0
    for part in parts:
        if isinstance(part, ast.Constant) and part.value is None:
            continue
        if isinstance(part, ast.Constant) and part.value is ...:
            return False
        whole = (
            isinstance(part, ast.Slice) and part.lower is None and part.upper is None and part.step is None
        )
        if not whole and dimension in split:
            return True
        dimension += 1
    return False


# Methods that make views by cutting a dimension: the position of the dimension among their arguments.
CUTTING = {
    "select": 0,
    "narrow": 0,
    "unbind": 0,
    "chunk": 1,
    "split": 1,
    "tensor_split": 1,
    "unsafe_split": 1,
}


def cuts_dimension(name: str, site: Site, split: frozenset[int], shift: int = 0) -> bool:
    """Whether a view method cuts a dimension that is split; ``shift`` is 1 for ``torch.select(x, dim, ...)``."""
    position = CUTTING.get(name)
    if position is None:
        return False
    dimension = site.argument(position + shift, "dim")
    if dimension is None:
        return 0 in split and name not in ("select", "narrow")
    return dimension.const in split if type(dimension.const) is int else False
