"""A script's source, from a recipe (see sbp.portable) and the tensors that it is run on."""

from __future__ import annotations

import builtins
import keyword
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from sbp.escape import one_line
from sbp.placement import SBP, parse_mesh, parse_sbp
from sbp.repro.failure import Failure, NoScript, Wanted

# Small tensors of whole numbers are mostly indices, whose values matter.
_SMALL = 64
# A script with more numbers than this written out is not one that anybody reads.
MOST_NUMBERS = 4096
_RESULT = re.compile(r"(\d+)(.*)", re.DOTALL)
_RESERVED = {
    *keyword.kwlist, *dir(builtins), "place", "note", "run", "torch", "nn", "dist", "sys", "os", "datetime", "operator",
    "mesh", "cut", "held", "move", "distribute", "place_module", "equal", "differs", "say", "optimizer", "step",
}  # fmt: skip
# Python's own sign for a function of the operator module.
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "matmul": "@",
    "and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>", "eq": "==", "ne": "!=", "lt": "<", "le": "<=",
    "gt": ">", "ge": ">=",
}  # fmt: skip


@dataclass(frozen=True)
class Material:
    """What a script is made of.

    Attributes:
        task: as sbp.material.task_of has it.
        mesh: as text; placements: tensor name -> SBP as text.
        keeps_placement: whether what is written to must keep its placement.
    """

    task: Mapping[str, Any]
    mesh: str
    placements: Mapping[str, str]
    keeps_placement: bool = True


@dataclass(frozen=True)
class Style:
    """How a script gets its values, and with which hash seeds its ranks run.

    Attributes:
        literal: the trial's own values written out; without it they are drawn.
        seeds: for each rank, PYTHONHASHSEED; empty for whatever it is.
    """

    literal: bool = False
    seeds: tuple[str, ...] = ()


def render(
    material: Material,
    failure: Failure,
    style: Style,
    title: str,
    file: str,
) -> str:
    """The source of a script that shows ``failure``. Raises NoScript."""
    mesh = parse_mesh(material.mesh)
    wanted = failure.wanted
    writer = _Writer(material, failure, style)
    body = writer.body()
    placements = {
        name: parse_sbp(text, mesh) for name, text in material.placements.items() if name in writer.placed
    }
    kinds = {placement.reduction for sbp in placements.values() for placement in sbp if placement.is_partial}
    kept = {
        each.label: each.label.removesuffix(" afterwards")
        for each in wanted
        if each.label.endswith(" afterwards") and material.keeps_placement
    }
    return _template().render(
        title=docstring_line(title),
        file=file,
        story=[docstring_line(line) for line in failure.story],
        ranks=mesh.size,
        mesh=repr(tuple(mesh.shape)),
        seeds=list(style.seeds),
        placements=[(quote(name), placements_source(sbp)) for name, sbp in placements.items()],
        values=writer.values,
        body=body,
        compares=bool(wanted),
        modules=writer.uses_modules,
        own_parameters=writer.own_parameters,
        uses_nn=writer.uses_modules or writer.own_parameters or any("nn." in line for line in body),
        uses_operator=any("operator." in line for line in body),
        moves=any("move(" in line for line in body),
        cuts={
            "shard": bool(wanted)
            or any(placement.is_split for sbp in placements.values() for placement in sbp),
            "integers": any(
                placement.is_partial and writer.kinds.get(name) in ("i", "u")
                for name, sbp in placements.items()
                for placement in sbp
            ),
            **{kind: kind in kinds for kind in ("sum", "avg", "max", "min")},
        },
        kept="{" + ", ".join(f"{quote(label)}: {quote(name)}" for label, name in kept.items()) + "}"
        if kept
        else "",
    )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("script.py.j2")


def placements_source(sbp: SBP) -> str:
    """An SBP as DTensor's words: ``[Shard(0), Replicate()]``."""
    words = []
    for placement in sbp:
        if placement.is_split:
            if placement.factor != 1:
                raise NoScript(f"an input lies as {placement}, which scripts do not cut")
            words.append(f"Shard({placement.dim})")
        elif placement.is_partial:
            words.append(
                "Partial()" if placement.reduction == "sum" else f"Partial({quote(placement.reduction)})"
            )
        else:
            words.append("Replicate()")
    return f"[{', '.join(words)}]"


@dataclass
class _Writer:
    material: Material
    failure: Failure
    style: Style
    lines: list[str] = field(default_factory=list)
    # The names of tensors that are placed, and the kinds of their dtypes.
    placed: set[str] = field(default_factory=set)
    kinds: dict[str, str] = field(default_factory=dict)
    uses_modules: bool = False
    own_parameters: bool = False

    def __post_init__(self) -> None:
        self.task = self.material.task
        self.recipe = self.task["recipe"]
        self.values: list[tuple[str, str]] = []
        self._names: dict[str, str] = {}
        self._taken = set(_RESERVED)
        self._numbers = 0

    # ---------------------------------------------------------------------------------------------- the parts

    def body(self) -> list[str]:
        """The statements of ``run``."""
        used = set(_references(self.recipe["steps"], self.recipe["outputs"]))
        used |= {f"in {name}" for name in self.task["writes"]}
        for name, tensor in self.task["inputs"].items():
            if f"in {name}" in used or self._is_wanted(name):
                self._input(name, tensor)
        self._state()
        for name in self.recipe["constants"]:
            if name in used:
                self._let(name, self._literal(self.recipe["constants"][name]))
        outputs = {name: reference["ref"] for name, reference in self.recipe["outputs"].items()}
        roots = [name for name in self.task["cotangents"] if name in outputs] if self.failure.backward else []
        for name in roots:
            self._tensor(f"grad_{name}", f"grad_{name}", self.task["cotangents"][name], False)
        if self.failure.steps:
            return self._training(outputs, roots)
        self._forward(outputs)
        self._backward(outputs, roots)
        for each in self.failure.wanted:
            if each.is_gradient:
                self._note(each, f"{self._owner(each.label.removesuffix('.grad'))}.grad")
        return self.lines

    def _is_wanted(self, name: str) -> bool:
        return any(each.label.removesuffix(".grad") == name for each in self.failure.wanted)

    def _forward(self, outputs: Mapping[str, str]) -> None:
        for index, step in enumerate(self.recipe["steps"]):
            self._step(index, step)
        for each in self.failure.wanted:
            label = each.label
            if each.is_gradient or each.is_after_a_step:
                continue
            if label in outputs:
                self._note(each, self.value({"ref": outputs[label]}))
            elif label.endswith(" afterwards"):
                self._note(each, self._names[f"in {label.removesuffix(' afterwards')}"])
            else:
                self._note(each, self._owner(label))

    def _backward(self, outputs: Mapping[str, str], roots: Sequence[str]) -> None:
        if len(roots) == 1:
            self.lines.append(
                f"{self.value({'ref': outputs[roots[0]]})}.backward({self._names[f'grad_{roots[0]}']})"
            )
        elif roots:
            tensors = ", ".join(self.value({"ref": outputs[name]}) for name in roots)
            cotangents = ", ".join(self._names[f"grad_{name}"] for name in roots)
            self.lines.append(f"torch.autograd.backward([{tensors}], [{cotangents}])")

    def _training(self, outputs: Mapping[str, str], roots: Sequence[str]) -> list[str]:
        if self.task["optimizer"] is None:
            raise NoScript("it takes an optimizer, and it is not known which")
        optimizer = self.task["optimizer"]
        options = "".join(f", {name}={self.value(value)}" for name, value in optimizer["options"].items())
        parameters = ", ".join(
            self._state_source(name)
            for name, tensor in self.task["parameters"].items()
            if tensor["requires_grad"]
        )
        self.lines.append(f"optimizer = torch.optim.{optimizer['class']}([{parameters}]{options})")
        self.lines.append(f"for step in range(1, {self.failure.steps + 1}):")
        before, self.lines = self.lines, []
        self._forward(outputs)
        self._backward(outputs, roots)
        self.lines.append("optimizer.step()")
        for each in self.failure.wanted:
            self._note_of_step(each)
        self.lines.append("optimizer.zero_grad()")
        self.lines = before + [f"    {line}" for line in self.lines]
        return self.lines

    def _note_of_step(self, each: Wanted) -> None:
        label, _, number = each.label.rpartition(" after step ")
        if not label or not number.isdecimal():
            raise NoScript(f"{each.name} is not looked at by scripts of several steps")
        key, _, name = label.rpartition(" of ")
        source = self._state_source(name if key and name in self.task["parameters"] else label)
        if key:
            source = f"optimizer.state[{source}][{quote(key)}]"
        self.lines.append(f"if step == {number}:")
        self.lines.append(f"    note({quote(each.label)}, {source})")

    def _note(self, each: Wanted, source: str) -> None:
        self.lines.append(f"note({quote(each.label)}, {source})")

    def _owner(self, name: str) -> str:
        """The source for an input, parameter or buffer by the name that it has among the quantities."""
        bare = name.removeprefix("input:")
        is_input = name.startswith("input:") or f"state {name}" not in self._names
        if is_input and f"in {bare}" in self._names:
            return self._names[f"in {bare}"]
        return self._state_source(name)

    def _state_source(self, name: str) -> str:
        if f"state {name}" not in self._names:
            raise NoScript(f"{name} is not in what was recorded of the run")
        return self._names[f"state {name}"]

    # ------------------------------------------------------------------------------------------------ tensors

    def _input(self, name: str, tensor: Mapping[str, Any]) -> None:
        self._tensor(f"in {name}", self._placed_name(name), tensor["value"], tensor["requires_grad"])

    def _placed_name(self, name: str) -> str:
        return f"input:{name}" if name in {**self.task["parameters"], **self.task["buffers"]} else name

    def _tensor(self, key: str, name: str, value: np.ndarray[Any, Any], requires_grad: bool) -> None:
        source = self._draw(value, requires_grad and self.failure.backward)
        self.placed.add(name)
        self.kinds[name] = value.dtype.kind
        words = key.removeprefix("in ").removeprefix("state ")
        self._let(key, f"place({quote(name)}, {source})", words)

    def _draw(self, value: np.ndarray[Any, Any], requires_grad: bool) -> str:
        """What makes a tensor like ``value``: drawn at random, or written out."""
        shape = ", ".join(map(str, value.shape)) if value.ndim else "()"
        kind = value.dtype.kind
        if self.style.literal or (kind in "biu" and value.size <= _SMALL):
            source = self._literal(value)
        elif kind == "b":
            source = f"torch.rand({shape}) < {float(value.mean()):.2g}"
        elif kind in "iu":
            dtype = "" if value.dtype == np.int64 else f", dtype=torch.{value.dtype}"
            source = f"torch.randint({value.min()}, {value.max() + 1}, ({shape},){dtype})"
        elif kind == "c" or value.size == 0 or value.min() < 0:
            dtype = "" if value.dtype == np.float64 else f", dtype=torch.{value.dtype}"
            source = f"torch.randn({shape}{dtype})"
        else:
            low, high = float(value.min()), float(value.max())
            dtype = "" if value.dtype == np.float64 else f", dtype=torch.{value.dtype}"
            source = f"torch.rand({shape}{dtype})"
            if high > 1:
                source = f"({low:.3g} + {high - low:.3g} * {source})"
        if not requires_grad:
            return source
        end = ".requires_grad_()"
        return (
            source + end if source.startswith(("torch.", "(")) and " < " not in source else f"({source}){end}"
        )

    def _literal(self, value: np.ndarray[Any, Any]) -> str:
        self._numbers += value.size
        if self._numbers > MOST_NUMBERS:
            raise NoScript(f"it takes more than {MOST_NUMBERS} numbers written out")
        dtype = (
            ""
            if value.dtype in (np.float64, np.int64, np.bool_) and value.size
            else f", dtype=torch.{value.dtype}"
        )
        if value.size == 0:
            return f"torch.empty({value.shape}{dtype or ', dtype=torch.' + str(value.dtype)})"
        return f"torch.tensor({_numbers(value.tolist())}{dtype})"

    def _state(self) -> None:
        """The modules, and the parameters and buffers that lie outside of them."""
        state = {**self.task["parameters"], **self.task["buffers"]}
        inside: set[str] = set()
        for path, module in self.recipe["modules"].items():
            args = [self.value(item) for item in module["args"]]
            options = [
                (name, self.value(item))
                for name, item in module["kwargs"]["dict"]
                if _says_something(name, item)
            ]
            args += [f"{name}={source}" for name, source in options]
            mode = "" if module["training"] else ".eval()"
            made = f"nn.{module['class']}({', '.join(args)}){mode}"
            prefix = f"{path}." if path else ""
            if any(name.startswith(prefix) for name in [*state, *self.task["aliases"]]):
                self.uses_modules = True
                made = f"place_module({quote(path)}, {made}, place)"
            self._let(f"module {path}", made, path or "module")
            variable = self._names[f"module {path}"]
            for name in [*state, *self.task["aliases"]]:
                if name.startswith(prefix) and name not in inside:
                    inside.add(name)
                    self._names[f"state {name}"] = _attribute(
                        variable, name.removeprefix(prefix), name in self.task["parameters"]
                    )
                    self.placed.add(name)
        self._names |= {
            f"state {alias}": self._names[f"state {alias}"]
            for alias in self.task["aliases"]
            if alias in inside
        }
        for alias, first in self.task["aliases"].items():
            if alias in inside or first in inside:
                raise NoScript(f"{alias} and {first} are one tensor in two modules")
        if self.style.literal:
            self.values = [
                (quote(name), self._literal(tensor["value"]))
                for name, tensor in state.items()
                if name in inside
            ]
        for name, tensor in state.items():
            if name in inside:
                continue
            source = self._draw(tensor["value"], False)
            self.placed.add(name)
            if name in self.task["parameters"]:
                self.own_parameters = True
                more = "" if tensor["requires_grad"] else ", requires_grad=False"
                source = f"nn.Parameter({source}{more})"
            self._let(f"state {name}", f"place({quote(name)}, {source})", name)

    # -------------------------------------------------------------------------------------------------- steps

    def _step(self, index: int, step: Mapping[str, Any]) -> None:
        """One call."""
        call = self._call(step)
        into = step["into"]
        if isinstance(into, dict) and not into.get("same"):
            self._let(into["ref"], call, self._words_for(into["ref"]))
        elif isinstance(into, list) and any(_references_in(into)):
            variable = self._free(f"t{index}")
            self.lines.append(f"{variable} = {call}")
            self._names[f"results {index}"] = variable
        else:
            self.lines.append(call)

    def _words_for(self, reference: str) -> str:
        for name, output in self.recipe["outputs"].items():
            if output["ref"] == reference:
                return name
        return f"t{reference}"

    def _call(self, step: Mapping[str, Any]) -> str:
        do, name = step["do"], step["name"]
        args = [self.value(item) for item in step["args"]]
        kwargs = [f"{key}={self.value(item)}" for key, item in step["kwargs"]]
        every = ", ".join([*args, *kwargs])
        if do == "module":
            return f"{self._names[f'module {name}']}({every})"
        if do == "operator":
            return _operation(name, args)
        if do == "method":
            return f"{args[0]}.{name}({', '.join([*args[1:], *kwargs])})"
        if do == "get":
            return f"{args[0]}.{name}"
        if do == "set":
            return f"{args[0]}.{name} = {args[1]}"
        if name == "redistribute":
            to = parse_sbp(step["args"][1], parse_mesh(self.material.mesh))
            return f"move({args[0]}, {placements_source(to)})"
        if name == "create":
            raise NoScript("tensors that are made as global ones are not written into scripts")
        return f"{name if name.startswith('nn.functional.') else 'torch.' + name}({every})"

    # -------------------------------------------------------------------------------------------------- words

    def value(self, item: Any) -> str:
        """An argument of a recipe as source."""
        if isinstance(item, dict):
            if "ref" in item:
                return self._reference(item["ref"])
            if "dtype" in item:
                return f"torch.{item['dtype']}"
            if "ellipsis" in item:
                return "..."
            if "slice" in item:
                return f"slice({', '.join(map(self.value, item['slice']))})"
            if "dict" in item:
                return (
                    "{"
                    + ", ".join(f"{self.value(key)}: {self.value(part)}" for key, part in item["dict"])
                    + "}"
                )
            if "array" in item:
                return self._literal(item["array"])
            if "device" in item:
                return repr(item["device"])
            raise NoScript(f"an argument is {item}")
        if isinstance(item, tuple):
            return f"({', '.join(map(self.value, item))}{',' if len(item) == 1 else ''})"
        if isinstance(item, list):
            return f"[{', '.join(map(self.value, item))}]"
        if isinstance(item, float) and not np.isfinite(item):
            return f'float("{item}")'
        return quote(item) if isinstance(item, str) else repr(item)

    def _reference(self, reference: str) -> str:
        if reference in self._names:
            return self._names[reference]
        found = _RESULT.fullmatch(reference)
        if found and f"results {found[1]}" in self._names:
            # A part of several results: [0], .values.
            return f"{self._names[f'results {found[1]}']}{found[2]}"
        raise NoScript(f"{reference} is not in what was recorded of the run")

    def _let(self, key: str, source: str, words: str | None = None) -> None:
        variable = self._free(words if words is not None else key)
        self._names[key] = variable
        self.lines.append(f"{variable} = {source}")

    def _free(self, words: str) -> str:
        """A variable's name that is not taken yet."""
        base = re.sub(r"\W+", "_", words).strip("_") or "value"
        base = f"t{base}" if base[0].isdigit() else base
        name, number = base, 1
        # ``input`` is a builtin, but what everybody calls a module's input.
        while name in self._taken and not (
            name == "input" and number == 1 and "input" not in self._names.values()
        ):
            number += 1
            name = f"{base}_{number}"
        self._taken.add(name)
        return name


def _references(*trees: Any) -> Iterable[str]:
    for tree in trees:
        yield from _references_in(tree)


def _references_in(tree: Any) -> Iterable[str]:
    if isinstance(tree, Mapping):
        if "ref" in tree:
            yield tree["ref"]
        for part in tree.values():
            yield from _references_in(part)
    elif isinstance(tree, (list, tuple)):
        for part in tree:
            yield from _references_in(part)


def _attribute(variable: str, name: str, is_parameter: bool) -> str:
    if all(word.isidentifier() and not keyword.iskeyword(word) for word in name.split(".")):
        return f"{variable}.{name}"
    return f"{variable}.get_{'parameter' if is_parameter else 'buffer'}({quote(name)})"


def _says_something(name: str, item: Any) -> bool:
    """Whether a constructor's argument is not what it would be without."""
    default = (None, "cpu", {"device": "cpu"}) if name == "device" else (None, {"dtype": "float64"})
    return name not in ("device", "dtype") or item not in default


def _operation(name: str, args: Sequence[str]) -> str:
    if name in _INFIX and len(args) == 2:
        return f"{args[0]} {_INFIX[name]} {args[1]}"
    if name == "getitem":
        return f"{args[0]}[{args[1]}]"
    if name == "setitem":
        return f"{args[0]}[{args[1]}] = {args[2]}"
    if name == "neg":
        return f"-{args[0]}"
    return f"operator.{name if hasattr(operator, name) else f'{name}_'}({', '.join(args)})"


def docstring_line(text: str) -> str:
    """Text for a line of a docstring. It comes from a results file, and must not end the docstring."""
    return one_line(text).replace("\\", "\\\\").replace('"', "'")


def quote(text: str) -> str:
    """A string as source, in double quotes where these can stand around it."""
    return f'"{text}"' if text.isprintable() and not set(text) & {'"', "\\"} else repr(text)


def _numbers(value: Any) -> str:
    """Nested lists of numbers as source; infinities and NaN can be read back."""
    if isinstance(value, list):
        return f"[{', '.join(map(_numbers, value))}]"
    if isinstance(value, float) and not np.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, complex):
        return f"complex({_numbers(value.real)}, {_numbers(value.imag)})"
    return repr(value)
