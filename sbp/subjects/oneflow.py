"""OneFlow as a subject: global tensors made from pieces, and what each rank then holds of the results.

Runs in the interpreter that has OneFlow (0.9.0 needs Python 3.10), so it imports nothing but numpy and OneFlow. Nothing
is cut or gathered by OneFlow on the harness's behalf: ``to_global`` wraps pieces that placement.py cut, and results are
read as the local piece with the SBP that OneFlow claims for it.
"""

from __future__ import annotations

import inspect
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sbp import placement as sbp_placement
from sbp.placement import Mesh, parse_sbp
from sbp.subjects.foreign import NEIGHBOURS, Missing, Observe, Piece, Task, World, run_recipe
from sbp.verdict.compare import Observed

VALUE, GRADIENT, STATE, WRITE = "value", "gradient", "state", "write"
# How many tensors of known content there are of each size, half of which leave room between them.
_GUARDS = 24
_GUARD_VALUE = 12345.0
_AUGMENTED = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")
# What OneFlow's optimizers call what they keep -> torch's name.
_KEPT_NAMES = {"momentum_buf": "momentum_buffer"}
# What a message says that refuses.
_REFUSED = re.compile(
    r"not support|unsupported|unimplement|not implemented|only supports?\b|can ?not|not allowed|please|"
    r"should be [a-z]+ only|has no rule for|available sbp signature|empty sbp signature after filtering",
    re.IGNORECASE,
)
# How OneFlow says that no signature of an operator takes its inputs as they lie, in protobuf's text format.
_NO_SIGNATURE = re.compile(r"^(\w+?)\d* has no maching sbp .*? with sbp hint (.*)$")
_HINT = re.compile(r'key: "(\w+?)" value \{ (\w+?)_parallel \{ (?:axis: (\d+) )?\}')
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class OneFlowSubject:
    """Runs tasks as OneFlow global tensors on the CPU. One for each world of ranks."""

    balanced = True

    def __init__(self, world: World) -> None:
        self.flow = flow = _import_in_world(world)
        if flow.env.get_world_size() != world.size or flow.env.get_rank() != world.rank:
            raise RuntimeError(
                f"OneFlow believes to be rank {flow.env.get_rank()} of {flow.env.get_world_size()}, "
                f"but this is rank {world.rank} of {world.size}"
            )
        self.world = world
        self._placements: dict[Mesh, Any] = {}
        # Of the task at hand: its mesh, and whether it is to be run without any distribution.
        self._mesh: Mesh | None = None
        self._alone = False

    def barrier(self) -> None:
        self.flow.comm.barrier()

    def explain(self, error: BaseException) -> tuple[str, bool]:
        """OneFlow's messages come with the C++ stack below them, and with the codes of a terminal's colours."""
        text = _COLOURS.sub("", str(error))
        message = " ".join(re.split(r'^\s*File "', text, maxsplit=1, flags=re.MULTILINE)[0].split())
        message = _readable(message) or " ".join(text.split())
        refused = isinstance(error, (Missing, NotImplementedError)) or bool(_REFUSED.search(message))
        return message, refused or "unimplemented_error" in text

    # ------------------------------------------------------------------------------------------- tensors

    def placement(self, mesh: Mesh) -> Any:
        if mesh not in self._placements:
            ranks = np.arange(mesh.size).reshape(mesh.shape).tolist()
            self._placements[mesh] = self.flow.placement("cpu", ranks)
        return self._placements[mesh]

    def to_flow(self, text: str, mesh: Mesh) -> list[Any]:
        """An SBP as OneFlow writes it. Raises Missing for partial placements other than a sum."""
        words = []
        for one in parse_sbp(text, mesh):
            if one.is_split:
                words.append(self.flow.sbp.split(one.dim))
            elif one.is_partial:
                if one.reduction != "sum":
                    raise Missing(f"OneFlow has no {one}, only P (a sum)")
                words.append(self.flow.sbp.partial_sum)
            else:
                words.append(self.flow.sbp.broadcast)
        return words

    def place(self, piece: Piece, mesh: Mesh) -> Any:
        """A global tensor from this rank's piece; a leaf."""
        # numpy and OneFlow may share memory from here on; the piece is the task's own.
        local = self.flow.tensor(piece.local)
        if self._alone:
            return local.requires_grad_() if piece.requires_grad else local
        for axis, one in enumerate(parse_sbp(piece.sbp, mesh)):
            if one.is_split and piece.shape[one.dim] < mesh.shape[axis]:
                raise Missing(f"OneFlow has no empty pieces, as {piece.sbp} of {piece.shape} would have")
        placed = local.to_global(placement=self.placement(mesh), sbp=self.to_flow(piece.sbp, mesh))
        if tuple(placed.shape) != piece.shape:
            raise Missing(
                f"OneFlow makes a tensor of {tuple(placed.shape)} of the pieces of one of {piece.shape}"
            )
        return placed.requires_grad_() if piece.requires_grad else placed

    def redistribute(self, tensor: Any, to: str) -> Any:
        """The same values under another SBP; a copy where there is no distribution."""
        if self._alone or self._mesh is None:
            return tensor.clone()
        return tensor.to_global(sbp=self.to_flow(to, self._mesh))

    def create(self, name: str, args: Sequence[Any], dtype: str, to: str) -> Any:
        """A new global tensor under the SBP ``to``."""
        options = {"dtype": getattr(self.flow, dtype)}
        if not self._alone and self._mesh is not None:
            options |= {"placement": self.placement(self._mesh), "sbp": self.to_flow(to, self._mesh)}
        return getattr(self.flow, name)(*args, **options)

    def observe_tensor(self, name: str, kind: str, tensor: Any) -> Observed:
        """What this rank holds of ``tensor``, and what OneFlow claims about it."""
        if tensor is None:
            return Observed(name, kind)
        tensor = tensor.detach()
        dtype = str(tensor.dtype).replace("oneflow.", "")
        shape = tuple(tensor.shape)
        if not tensor.is_global:
            return Observed(name, kind, None, shape, dtype, _copy(tensor))
        mesh = Mesh(tuple(np.array(tensor.placement.ranks).shape))
        claimed = _claimed(tensor.sbp, shape, mesh)
        other = str(mesh) if mesh != self._mesh else None
        return Observed(name, kind, claimed, shape, dtype, _copy(tensor.to_local()), other)

    # --------------------------------------------------------------------------------------------- running

    def run(self, task: Task, observe: Observe) -> None:
        flow = self.flow
        self._mesh = task.mesh
        self._alone = task.options.get("mode") == "local"
        if task.seed is None:
            flow.seed()
        else:
            flow.manual_seed(task.seed)
        guards = _Guards(flow, task) if _writes(task.recipe) else None
        tensors = {f"in {name}": self.place(piece, task.mesh) for name, piece in task.inputs.items()}
        holder = _Holder(self, task, observe)
        if task.options.get("mode") == "graph":
            self._run_graph(task, holder, tensors, observe)
        elif task.optimizer is None:
            self._forward_and_backward(task, holder, tensors, observe, "", "")
            holder.observe_gradients("")
        else:
            self._train(task, holder, tensors, observe)
        if guards is not None:
            observe(guards.observed())

    def _run_graph(self, task: Task, holder: _Holder, tensors: dict[str, Any], observe: Observe) -> None:
        """Forward through nn.Graph, or whole training steps. Gradients do not come out of a graph; what they did to the
        parameters does."""
        cotangents = list(task.cotangents) if task.optimizer is not None else []
        given = [*tensors.values(), *(self.place(task.cotangent(name), task.mesh) for name in cotangents)]
        optimizer = None
        if task.optimizer is not None:
            optimizer = self._optimizer(task, holder)
        graph = holder.graph(list(tensors), cotangents, optimizer)
        for step in range(1, task.steps + 1 if optimizer is not None else 2):
            during, after = (f" of step {step}", f" after step {step}") if optimizer else ("", "")
            results = graph(*given)
            for name, tensor in zip(graph.outputs, results):
                observe(self.observe_tensor(f"{name}{during}", VALUE, tensor))
            for name, tensor in [*holder.buffers(), *(holder.parameters() if optimizer else [])]:
                observe(self.observe_tensor(f"{name}{after}", STATE, tensor))

    def _optimizer(self, task: Task, holder: _Holder) -> Any:
        assert task.optimizer is not None
        make = getattr(self.flow.optim, task.optimizer["class"], None)
        if make is None:
            raise Missing(f"OneFlow has no optim.{task.optimizer['class']}")
        options = {name: value for name, value in task.optimizer["options"].items() if value is not None}
        taken = inspect.signature(make).parameters
        for name, value in list(options.items()):
            if name not in taken:
                if value:
                    raise Missing(f"OneFlow's {task.optimizer['class']} has no {name}")
                del options[name]
        return make([parameter for _, parameter in holder.parameters()], **options)

    def _train(self, task: Task, holder: _Holder, tensors: dict[str, Any], observe: Observe) -> None:
        optimizer = self._optimizer(task, holder)
        named = holder.parameters()
        for step in range(1, task.steps + 1):
            self._forward_and_backward(
                task, holder, tensors, observe, f" of step {step}", f" after step {step}"
            )
            holder.observe_gradients(f" of step {step}")
            optimizer.step()
            for name, parameter in named:
                observe(self.observe_tensor(f"{name} after step {step}", STATE, parameter))
                for kept, value in self._kept(optimizer, parameter):
                    observe(replace(value, name=f"{kept} of {name} after step {step}"))
            optimizer.zero_grad(set_to_none=True)
            for name in task.inputs:
                tensors[f"in {name}"].grad = None

    def _kept(self, optimizer: Any, parameter: Any) -> list[tuple[str, Observed]]:
        """What an optimizer keeps for a parameter, under torch's names."""
        found = []
        for name, value in sorted(optimizer._state.get(parameter, {}).items()):
            if not hasattr(value, "is_global"):
                continue
            kept = self.observe_tensor(name, STATE, value)
            found.append((_KEPT_NAMES.get(name, name), kept))
        if found and "exp_avg" in dict(found):
            taken = np.array(float(optimizer._state["step"]), np.float32)
            found.append(("step", Observed("step", STATE, None, (), "float32", taken)))
        return found

    def _forward_and_backward(
        self,
        task: Task,
        holder: _Holder,
        inputs: dict[str, Any],
        observe: Observe,
        during: str,
        after: str,
    ) -> None:
        outputs = holder.call(inputs)
        for name, tensor in outputs.items():
            observe(self.observe_tensor(f"{name}{during}", VALUE, tensor))
        for name in task.writes:
            observe(self.observe_tensor(f"{name} afterwards{during}", WRITE, inputs[f"in {name}"]))
        for name, buffer in holder.buffers():
            observe(self.observe_tensor(f"{name}{after}", STATE, buffer))
        roots = {name: tensor for name, tensor in outputs.items() if tensor.requires_grad}
        if roots:
            cotangents = [self.place(task.cotangent(name), task.mesh) for name in roots]
            self.flow.autograd.backward(list(roots.values()), cotangents)
        state = {*task.parameters, *task.buffers}
        for name, piece in task.inputs.items():
            if piece.requires_grad:
                shown = f"input:{name}" if name in state else name
                gradient = inputs[f"in {name}"].grad
                observe(self.observe_tensor(f"{shown}.grad{during}", GRADIENT, gradient))


class _Holder:
    """The modules of a task, with its parameters and buffers in their places."""

    def __init__(self, subject: OneFlowSubject, task: Task, observe: Observe) -> None:
        self.subject, self.task, self.observe = subject, task, observe
        self.flow = flow = subject.flow
        self._arrays: Mapping[str, Any] = task.constants
        self.root = flow.nn.Module()
        self.modules: dict[str, Any] = {}
        for path, entry in task.recipe["modules"].items():
            make = getattr(flow.nn, entry["class"], None)
            if make is None:
                raise Missing(f"OneFlow has no nn.{entry['class']}")
            args = [self._argument(item) for item in entry["args"]]
            kwargs = {key: self._argument(item) for key, item in entry["kwargs"]["dict"]}
            module = make(*args, **kwargs).train(entry["training"])
            self.modules[path] = module
            if path:
                parent, _, name = path.rpartition(".")
                self._owner(parent).add_module(name, module)
            else:
                self.root = module
        self.tensors: dict[str, Any] = {}
        for name, piece in task.parameters.items():
            placed = subject.place(replace(piece, requires_grad=False), task.mesh)
            self.tensors[name] = flow.nn.Parameter(placed, requires_grad=piece.requires_grad)
        for name, piece in task.buffers.items():
            self.tensors[name] = subject.place(piece, task.mesh)
        for name in (*self.tensors, *task.aliases):
            first = task.aliases.get(name, name)
            parent, _, last = name.rpartition(".")
            owner = self._owner(parent)
            kind = owner._parameters if first in task.parameters else owner._buffers
            if last not in kind and last in owner.__dict__:
                owner.__dict__[last] = self.tensors[first]
            else:
                kind[last] = self.tensors[first]

    def _owner(self, path: str) -> Any:
        """The module at ``path``, made where there is none yet."""
        module = self.root
        for name in path.split(".") if path else ():
            if name not in module._modules:
                module.add_module(name, self.flow.nn.Module())
            module = module._modules[name]
        return module

    def _argument(self, item: Any) -> Any:
        if isinstance(item, dict):
            if "dict" in item:
                return {self._argument(key): self._argument(part) for key, part in item["dict"]}
            return self._convert(item)
        if isinstance(item, tuple):
            return tuple(map(self._argument, item))
        return [self._argument(part) for part in item] if isinstance(item, list) else item

    def _convert(self, item: Mapping[str, Any]) -> Any:
        if "dtype" in item:
            return getattr(self.flow, item["dtype"])
        if "array" in item:
            return self._whole(item["array"])
        if "device" in item:
            return None
        raise Missing(f"OneFlow has nothing for {item}")

    def _whole(self, array: np.ndarray[Any, Any]) -> Any:
        return self.subject.place(Piece(np.array(array), "B", array.shape), self.task.mesh)

    def parameters(self) -> list[tuple[str, Any]]:
        return list(self.root.named_parameters())

    def buffers(self) -> list[tuple[str, Any]]:
        return list(self.root.named_buffers())

    def observe_gradients(self, during: str) -> None:
        for name, parameter in self.parameters():
            if parameter.requires_grad:
                self.observe(self.subject.observe_tensor(f"{name}.grad{during}", GRADIENT, parameter.grad))

    def call(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The recipe's outputs by name."""
        tensors = dict(inputs)
        tensors.update({f"constant {n}": v for n, v in self._constants().items()})
        return run_recipe(
            self.task.recipe, self._with_state(tensors), self._find, self._convert, self.task.reverse
        )

    def _constants(self) -> dict[str, Any]:
        return {name.removeprefix("constant "): self._whole(array) for name, array in self._arrays.items()}

    def _with_state(self, tensors: dict[str, Any]) -> dict[str, Any]:
        tensors.update({f"state {name}": tensor for name, tensor in self.tensors.items()})
        return tensors

    def graph(self, names: Sequence[str], cotangents: Sequence[str], optimizer: Any) -> Any:
        """The recipe as an nn.Graph, with the backward pass and the optimizer's step in it if there is one.

        It is called with the inputs of these ``names`` and the cotangents of these outputs, and returns the outputs.
        """
        holder = self

        class Whole(self.flow.nn.Graph):  # type: ignore[name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.root = holder.root
                if optimizer is not None:
                    self.add_optimizer(optimizer)

            def build(self, *given: Any) -> Any:
                outputs = holder.call(dict(zip(names, given)))
                if optimizer is not None:
                    last = given[len(names) :]
                    parts = [(outputs[name] * grad).sum() for name, grad in zip(cotangents, last)]
                    sum(parts[1:], parts[0]).backward()
                self.outputs = list(outputs)
                return tuple(outputs.values())

        return Whole()

    def _find(self, do: str, name: str) -> Any:
        if do == "module":
            return self.modules[name]
        if name in ("redistribute", "create"):
            return getattr(self.subject, name)
        found = self.flow
        for word in name.split("."):
            found = getattr(found, word, None)
            if found is None:
                raise Missing(f"OneFlow has no {name}")
        return self._made_global(found)

    def _made_global(self, function: Any) -> Any:
        """A function whose new tensors are global ones, with all of the values on every rank."""

        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            given = any(hasattr(item, "is_global") for item in (*args, *kwargs.values()))
            if given or self.subject._alone or not hasattr(result, "is_global") or result.is_global:
                return result
            return self._whole(_copy(result))

        return call


class _Guards:
    """Tensors of known content next to those that are written to: what writes past the end of its own memory is likely
    to hit one.

    For every size of a piece there are many in a row, every other one of which is given back: whatever is made next in
    that size comes to lie between two of them.
    """

    def __init__(self, flow: Any, task: Task) -> None:
        self._tensors: list[Any] = []
        for piece in task.inputs.values():
            row = [flow.tensor(np.full(piece.local.size, _GUARD_VALUE)) for _ in range(_GUARDS)]
            [tensor.numpy() for tensor in row]  # wait until they are really there
            self._tensors += row[::2]

    def observed(self) -> Observed:
        """How many elements of each have changed."""
        changed = np.array([np.count_nonzero(tensor.numpy() != _GUARD_VALUE) for tensor in self._tensors])
        return Observed(NEIGHBOURS, STATE, None, changed.shape, str(changed.dtype), changed)


def _writes(recipe: Mapping[str, Any]) -> bool:
    """Whether a recipe has a step that writes to a tensor."""
    return any(
        (step["do"] == "method" and step["name"].endswith("_"))
        or (step["do"] == "operator" and (step["name"] == "setitem" or step["name"] in _AUGMENTED))
        for step in recipe["steps"]
    )


def _readable(message: str) -> str:
    """OneFlow's longest message, shortened: ``relu has no rule for x_0 in P``."""
    found = _NO_SIGNATURE.match(message)
    if found is None:
        return message
    short = {"partial_sum": "P", "broadcast": "B"}
    words = [f"{name} in {short.get(kind, f'S({axis})')}" for name, kind, axis in _HINT.findall(found[2])]
    return f"{found[1]} has no rule for {', '.join(words)}"


def _copy(tensor: Any) -> np.ndarray[Any, Any]:
    """The values as they are now; numpy() alone is a view of the tensor's memory."""
    return np.array(tensor.numpy())


def _claimed(sbp: Any, shape: tuple[int, ...], mesh: Mesh) -> str:
    """OneFlow's SBP as text. An uneven split makes the first pieces one longer, which is said where it matters."""
    words, sizes = [], list(shape)
    for axis, one in enumerate(sbp):
        placed = sbp_placement.parse(re.sub(r"split\(dim=", "split(", str(one)))
        if placed.is_split and placed.dim < len(sizes):
            uneven = sizes[placed.dim] % mesh.shape[axis] != 0
            sizes[placed.dim] = -(-sizes[placed.dim] // mesh.shape[axis])
            placed = replace(placed, balanced=uneven)
        words.append(placed)
    return sbp_placement.show(words)


# --------------------------------------------------------------------------------------- joining the world


def _import_in_world(world: World) -> Any:
    """Import OneFlow, which joins the other ranks while it is imported."""
    os.environ.update(
        RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(world.local_rank),
        MASTER_ADDR=world.host,
        MASTER_PORT=str(world.port),
        GLOG_minloglevel="2",
        ONEFLOW_TIMEOUT_SECONDS=str(int(world.timeout)),
    )
    if world.rank > 0:
        # A first attempt to connect that fails costs OneFlow 10 to 20 seconds.
        _wait_for(world.host, world.port, 60.0)
    import oneflow

    return oneflow


def _wait_for(host: str, port: int, patience: float) -> None:
    end = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((host, port), 1.0).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def offers() -> dict[str, Any]:
    """The names of what OneFlow has, for the planner. Joins nobody."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        os.environ.pop(name, None)
    os.environ["GLOG_minloglevel"] = "2"  # noqa: SIM112
    import oneflow as flow

    def names(space: Any) -> list[str]:
        return [name for name in dir(space) if not name.startswith("_")]

    functions = [*names(flow), "redistribute", "create"]
    for space in ("nn.functional", "linalg"):
        inner = flow
        for word in space.split("."):
            inner = getattr(inner, word)
        functions += [f"{space}.{name}" for name in names(inner)]
    modules = [
        name
        for name in names(flow.nn)
        if isinstance(getattr(flow.nn, name), type) and issubclass(getattr(flow.nn, name), flow.nn.Module)
    ]
    return {
        "name": f"OneFlow {flow.__version__}",
        "versions": {"oneflow": flow.__version__, "numpy": np.__version__},
        "modules": modules,
        "functions": functions,
        "methods": names(flow.Tensor),
        "modes": ["graph"],
    }
