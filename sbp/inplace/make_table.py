"""Regenerates ``mutations.json`` from the installed torch: ``python -m sbp.inplace.make_table``.

``--check`` writes nothing and exits 1 when the file is not what this torch gives. What mutates comes from the
schemas (``is_mutable`` and the alias marks of the arguments), not from ``Tag.inplace``, which covers less than a
third of them. What functions return comes from torch's own type stubs. What neither says (Python functions,
``.data = ``, collectives) is written down here, and checked against the torch that is installed.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

TABLE = Path(__file__).with_name("mutations.json")

# Operators that torch registers however it was built: a CUDA or MKL build adds others.
NAMESPACES = ("aten", "prims", "quantized", "_c10d_functional", "symm_mem")

# They change what autograd or the allocator knows about a tensor, never its values, shape or strides.
HARMLESS = {"requires_grad_", "detach_", "share_memory_", "retain_grad", "record_stream", "_version"}
# They change shape, strides or names; the values stay.
METADATA = {
    "as_strided_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_",
    "_coalesced_", "sparse_resize_", "_mkldnn_transpose_",
}  # fmt: skip
# They put another storage, or another size of it, under the tensor.
STORAGE = {"set_", "set_data", "resize_", "resize_as_", "resize_as_sparse_", "sparse_resize_and_clear_", "resize",
           "_resize_output_"}  # fmt: skip

# Methods that write and are in no schema.
METHODS_WITHOUT_SCHEMA = ("apply_", "map_", "map2_", "share_memory_")
# The only augmented assignment that Tensor does not define in place is ``@=``: there Python rebinds the name.
AUGMENTED = {
    "+=": "add", "-=": "sub", "*=": "mul", "/=": "div", "//=": "floor_divide", "%=": "remainder", "**=": "pow",
    "<<=": "bitwise_left_shift", ">>=": "bitwise_right_shift", "&=": "bitwise_and", "|=": "bitwise_or",
    "^=": "bitwise_xor",
}  # fmt: skip
AUGMENTED_METHODS = {
    "+=": "__iadd__", "-=": "__isub__", "*=": "__imul__", "/=": "__itruediv__", "//=": "__ifloordiv__",
    "%=": "__imod__", "**=": "__ipow__", "<<=": "__ilshift__", ">>=": "__irshift__", "&=": "__iand__",
    "|=": "__ior__", "^=": "__ixor__",
}  # fmt: skip

# Collectives that write into an argument: the positions of what they write.
COLLECTIVES = {
    "all_reduce": [0], "all_reduce_coalesced": [0], "broadcast": [0], "reduce": [0], "recv": [0], "irecv": [0],
    "all_gather": [0], "all_gather_into_tensor": [0], "all_gather_coalesced": [0], "gather": [1], "scatter": [0],
    "reduce_scatter": [0], "reduce_scatter_tensor": [0], "all_to_all": [0], "all_to_all_single": [0],
}  # fmt: skip
# Functions of torch.nn.utils that write into the tensors they are given (clipping writes the gradients).
UTILITIES = {
    "clip_grad_norm_": ("clip", [0]), "clip_grad_value_": ("clip", [0]), "clip_grads_with_norm_": ("clip", [0]),
    "vector_to_parameters": ("value", [1]),
}  # fmt: skip

# Python functions of torch that no stub describes and that do not return one tensor.
RETURNS_BY_HAND = {
    "tensors": "broadcast_tensors meshgrid split unravel_index lobpcg lu pca_lowrank svd_lowrank "
    "atleast_1d atleast_2d atleast_3d",
    "mixed": "unique unique_consecutive cond while_loop load",
    "tensor": "block_diag cartesian_prod cdist chain_matmul einsum norm stft tensordot from_dlpack",
}
METHOD_RETURNS_BY_HAND = {
    "tensor": "cdouble cfloat norm resize resize_as stft to_sparse_coo share_memory_ __getitem__ requires_grad_ "
    "new new_tensor to_padded_tensor",
    "tensors": "lu",
    "mixed": "unique unique_consecutive",
    "other": "backward const_data_ptr dim_order index is_shared module_load name register_hook "
    "register_post_accumulate_grad_hook reinforce storage untyped_storage numpy __array__ __dlpack__ tolist",
    "number": "is_shared __len__ __bool__ __int__ __float__ __index__ __contains__",
}
FUNCTIONAL_RETURNS_BY_HAND = {"tensors": "multi_head_attention_forward"}


def full_name(schema: Any) -> str:
    """``aten::add_.Tensor``; an overload without a name is ``default``, as in ``str(torch.ops.aten.relu_.default)``."""
    return f"{schema.name}.{schema.overload_name or 'default'}"


def writes_of(schema: Any) -> list[str]:
    """The names of the tensor arguments that the operator writes to."""
    return [
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write and "Tensor" in str(argument.type)
    ]


def signature_key(schema: Any, skip: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """What two overloads must share to compute the same thing: the names and types of their inputs."""
    left_out = set(skip)
    return tuple((a.name, str(a.type)) for a in schema.arguments if a.name not in left_out)


def group_of(name: str) -> str:
    """The kind of write of an operator or method, from its bare name."""
    if name in HARMLESS:
        return "harmless"
    if name in METADATA:
        return "metadata"
    if name in STORAGE:
        return "storage"
    if name.startswith("_foreach_"):
        return "foreach"
    if name.startswith("_fused_"):
        return "fused"
    if name.startswith("_amp_"):
        return "amp"
    return "value"


def operators(schemas: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Every overload that writes to a tensor: what it writes, how, and the overload that does it out of place."""
    pure: dict[str, list[Any]] = defaultdict(list)
    for schema in schemas:
        if not schema.is_mutable:
            pure[schema.name].append(schema)
    table: dict[str, dict[str, Any]] = {}
    for schema in schemas:
        namespace, _, name = schema.name.partition("::")
        writes = writes_of(schema) if schema.is_mutable and namespace in NAMESPACES else []
        if not writes:
            continue
        outs = [a.name for a in schema.arguments if a.is_out]
        kind = "out" if set(writes) <= set(outs) else "both" if set(writes) & set(outs) else "in-place"
        entry: dict[str, Any] = {"kind": kind, "writes": writes, "group": group_of(name)}
        functional = functional_overload(schema, outs, pure)
        if functional is not None:
            entry["functional"] = functional
        table[full_name(schema)] = entry
    return dict(sorted(table.items()))


def functional_overload(schema: Any, outs: Sequence[str], pure: Mapping[str, Sequence[Any]]) -> str | None:
    """The overload with the same inputs that writes nothing, as ``aten::add.Tensor``; None if there is none."""
    namespace, _, bare = schema.name.partition("::")
    if bare.startswith("__i"):
        bare = "__" + bare.removeprefix("__i")
    else:
        bare = bare.removesuffix("_").removesuffix("_out")
    names = (f"{namespace}::{bare}", f"{namespace}::{bare}_functional")
    wanted = signature_key(schema, outs)
    for name in names:
        for candidate in pure.get(name, ()):
            if signature_key(candidate, ()) == wanted:
                return full_name(candidate)
    return None


def stub_returns(path: Path, class_name: str | None = None) -> dict[str, str]:
    """What each function of a type stub returns: ``tensor``, ``tensors``, ``number``, ``size``, ``other``, or
    ``mixed`` where the overloads differ."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    if class_name is not None:
        (found,) = [node for node in body if isinstance(node, ast.ClassDef) and node.name == class_name]
        body = found.body
    kinds: dict[str, set[str]] = defaultdict(set)
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.returns is not None:
            kinds[node.name].add(return_kind(ast.unparse(node.returns)))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            kinds["." + node.target.id].add(return_kind(ast.unparse(node.annotation)))
    merged = {}
    for name, found_kinds in kinds.items():
        if found_kinds == {"size", "number"}:
            merged[name] = "size"
        else:
            merged[name] = found_kinds.pop() if len(found_kinds) == 1 else "mixed"
    return merged


def return_kind(annotation: str) -> str:
    """The kind of one return annotation of torch's stubs."""
    if annotation in ("Tensor", "Tensor | None", "Self", "S"):
        return "tensor"
    if annotation.startswith(("tuple[Tensor", "Sequence[Tensor", "list[Tensor", "torch.return_types")):
        return "tensors"
    if annotation in ("_bool", "_int", "_float", "_complex", "Number", "_int | SymInt"):
        return "number"
    if annotation in ("Size", "tuple[_int, ...]"):
        return "size"
    if annotation == "Any":
        return "mixed"
    return "other"


def by_kind(kinds: Mapping[str, str], *by_hand: Mapping[str, str]) -> dict[str, list[str]]:
    """Names grouped by what they return; what is written by hand wins."""
    merged = dict(kinds)
    for table in by_hand:
        for kind, names in table.items():
            merged.update(dict.fromkeys(names.split(), kind))
    groups: dict[str, list[str]] = defaultdict(list)
    for name, kind in merged.items():
        groups[kind].append(name)
    return {kind: sorted(names) for kind, names in sorted(groups.items())}


def views(schemas: Sequence[Any]) -> list[str]:
    """Names of the operators whose result may share the storage of their first argument."""
    found = set()
    for schema in schemas:
        namespace, _, name = schema.name.partition("::")
        if namespace != "aten" or not schema.arguments or schema.is_mutable:
            continue
        first = schema.arguments[0]
        if "Tensor" in str(first.type) and first.alias_info is not None and not first.alias_info.is_write:
            found.add(name)
    return sorted(found)


def trailing_underscore(owner: Any) -> list[str]:
    """Public names of a module or class that end in one underscore and can be called."""
    return [
        name
        for name in dir(owner)
        if name.endswith("_") and not name.endswith("__") and callable(getattr(owner, name))
    ]


def methods(tensor: type) -> dict[str, dict[str, Any]]:
    """Tensor methods that write to the tensor itself, and the method that does it out of place."""
    table: dict[str, dict[str, Any]] = {}
    for name in [n for n in trailing_underscore(tensor) if not n.startswith("_")]:
        entry: dict[str, Any] = {"group": group_of(name)}
        functional = name.removesuffix("_")
        # `resize` exists, but is not what resize_ is out of place.
        if hasattr(tensor, functional) and entry["group"] in ("value", "metadata"):
            entry["functional"] = functional
        if name in METHODS_WITHOUT_SCHEMA:
            entry["schema"] = False
        table[name] = entry
    missing = [name for name in METHODS_WITHOUT_SCHEMA if name not in table]
    if missing:
        raise RuntimeError(f"torch.Tensor no longer has {missing}; change METHODS_WITHOUT_SCHEMA")
    return dict(sorted(table.items()))


def functions(modules: Mapping[str, ModuleType]) -> dict[str, dict[str, Any]]:
    """Functions with a trailing underscore, by dotted name, that write to the arguments at ``writes``."""
    table: dict[str, dict[str, Any]] = {}
    for prefix, module in modules.items():
        for name in trailing_underscore(module):
            group = "init" if prefix == "torch.nn.init" else group_of(name)
            entry: dict[str, Any] = {"group": group, "writes": [0]}
            if name == "_amp_foreach_non_finite_check_and_unscale_":
                entry["writes"] = [0, 1]
            if group == "fused":
                entry["writes"] = [0, 1, 2, 3, 4, 5] if "adam" in name else [0, 1, 2]
            if hasattr(module, name.removesuffix("_")) and group == "value":
                entry["functional"] = name.removesuffix("_")
            table[f"{prefix}.{name}"] = entry
    return table


def with_inplace(owner: ModuleType) -> dict[str, int]:
    """Functions or classes of a module that take ``inplace``: the position of that argument, without self."""
    found = {}
    for name in dir(owner):
        value = getattr(owner, name)
        if name.startswith("__") or not callable(value):
            continue
        signature = signature_of(value)
        if signature is not None and "inplace" in signature:
            found[name] = signature.index("inplace")
    return found


def signature_of(value: Callable[..., Any]) -> list[str] | None:
    """The names of the parameters, or None where Python cannot tell."""
    try:
        return list(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return None


def check_collectives(distributed: ModuleType) -> None:
    """Raise RuntimeError if a collective that is written down here is not in this torch."""
    for name, positions in COLLECTIVES.items():
        parameters = signature_of(getattr(distributed, name))
        if parameters is None or len(parameters) <= max(positions):
            raise RuntimeError(f"torch.distributed.{name} has changed: {parameters}; change COLLECTIVES")


def make_table() -> dict[str, Any]:
    """The whole table, from the torch that is installed."""
    import torch
    import torch.distributed
    import torch.nn.functional
    import torch.nn.init
    import torch.nn.utils

    # TorchScript's own list and dict operators (aten::append.t) are not operators on tensors.
    dispatched = set(torch._C._dispatch_get_all_op_names())
    schemas = [
        s for s in torch._C._jit_get_all_schemas() if full_name(s).removesuffix(".default") in dispatched
    ]
    root = Path(inspect.getfile(torch)).parent
    check_collectives(torch.distributed)
    method_kinds = stub_returns(root / "_C" / "__init__.pyi", "TensorBase")
    attributes = {name[1:]: kind for name, kind in method_kinds.items() if name.startswith(".")}
    for symbol, method in AUGMENTED_METHODS.items():
        if not hasattr(torch.Tensor, method):
            raise RuntimeError(f"torch.Tensor has no {method}; change AUGMENTED ({symbol})")
    named = functions(
        {"torch": torch, "torch.nn.functional": torch.nn.functional, "torch.nn.init": torch.nn.init}
    )
    for name, (group, writes) in UTILITIES.items():
        if not hasattr(torch.nn.utils, name):
            raise RuntimeError(f"torch.nn.utils has no {name}; change UTILITIES")
        named[f"torch.nn.utils.{name}"] = {"group": group, "writes": writes}
    module_classes = sorted(
        name
        for name in dir(torch.nn)
        if isinstance(getattr(torch.nn, name), type) and issubclass(getattr(torch.nn, name), torch.nn.Module)
    )
    return {
        "torch": torch.__version__.partition("+")[0],
        "augmented": {
            symbol: {"method": AUGMENTED_METHODS[symbol], "functional": name} for symbol, name in AUGMENTED.items()
        },
        "assignments": {
            "data": "storage", "__setitem__": "value", "_local_tensor": "storage", "@=": "rebinds the name",
        },
        "methods": methods(torch.Tensor),
        "functions": dict(sorted(named.items())),
        "inplace_functions": {
            **{f"torch.nn.functional.{n}": p for n, p in with_inplace(torch.nn.functional).items()},
        },
        "inplace_modules": {f"torch.nn.{n}": p for n, p in with_inplace(torch.nn).items()},
        "collectives": {f"torch.distributed.{n}": p for n, p in sorted(COLLECTIVES.items())},
        "views": views(schemas),
        "modules": module_classes,
        "returns": {
            "torch": by_kind(stub_returns(root / "_C" / "_VariableFunctions.pyi"), RETURNS_BY_HAND),
            "torch.nn.functional": by_kind(
                stub_returns(root / "nn" / "functional.pyi"), FUNCTIONAL_RETURNS_BY_HAND
            ),
            "method": by_kind(
                {n: k for n, k in method_kinds.items() if not n.startswith(".")}, METHOD_RETURNS_BY_HAND
            ),
            "attribute": by_kind(attributes),
        },
        "operators": operators(schemas),
    }  # fmt: skip


def render(table: Mapping[str, Any]) -> str:
    """The table as JSON with one entry a line, so that a change of torch is a readable diff."""
    sections = []
    for section, content in table.items():
        if isinstance(content, dict):
            rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
            sections.append(f" {json.dumps(section)}: {{\n{rows}\n }}")
        else:
            sections.append(f" {json.dumps(section)}: {json.dumps(content)}")
    return "{\n" + ",\n".join(sections) + "\n}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the table, or with ``--check`` say whether it is current; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m sbp.inplace.make_table", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if the file is out of date"
    )
    arguments = parser.parse_args(argv)
    text = render(make_table())
    current = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
    if arguments.check:
        if text == current:
            return 0
        print(f"{TABLE.name} is out of date: run python -m sbp.inplace.make_table", file=sys.stderr)
        return 1
    TABLE.write_text(text, encoding="utf-8")
    print(f"wrote {TABLE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
