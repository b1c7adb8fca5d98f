"""Sees every write to a distributed tensor while a program runs, and says whether it did what it says.

    from sbp.inplace import watch

    with watch(model) as seen:
        train(model)
    print(seen.report())
    seen.assert_clean()

Three things are looked at: operators, by a dispatch mode that sits above the distributed tensor's own dispatch, so
that what happens inside of an operator is not seen a second time; ``.data =``, which no mode sees; and writes to the
local piece, which are recognised by the memory that they go to or, later, by the piece's version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sbp.inplace import compare, tensors
from sbp.inplace.agree import Agreement, Meeting
from sbp.inplace.log import Entry, Log, Tally, show_each
from sbp.inplace.operators import (
    VIEW,
    WRITE,
    Argument,
    Operator,
    any_distributed,
    describe,
    tensor_arguments,
    written_tensors,
)
from sbp.inplace.pieces import LocalPieces
from sbp.inplace.records import (
    CHANGED,
    ERROR,
    FAULTS,
    LOST,
    REFUSED,
    SAFE,
    WRONG,
    Record,
    in_order,
    report,
    summarise,
)
from sbp.inplace.stack import here
from sbp.inplace.views import Copies

__all__ = ["Record", "Watch", "watch"]


class Watch:
    """What was seen. Made by :func:`watch`; a context manager, which may be entered again after it was left."""

    def __init__(
        self, roots: Sequence[Any], do_compare: bool, patience: float, largest: int, search: bool
    ) -> None:
        self._mode = _Mode(roots, do_compare, patience, largest, search)

    def __enter__(self) -> Watch:
        self._mode.open()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._mode.close(*exception)

    @property
    def records(self) -> list[Record]:
        """Every write, the gravest first; those that differ in their count alone are one record."""
        return in_order(self._mode.log.records())

    @property
    def faults(self) -> list[Record]:
        """The writes that were lost, changed the placement or gave a wrong value."""
        return [record for record in self.records if record.is_fault]

    def summary(self) -> dict[str, Any]:
        """Numbers of writes: in all, by outcome, and by the known part of torch that made them."""
        return summarise(self.records)

    def report(self) -> str:
        """All of it in words."""
        return report(self.records)

    __str__ = report

    def assert_clean(self, also: Sequence[str] = ()) -> None:
        """Raise AssertionError, naming the lines, if a write was lost, changed a placement or gave a wrong value.

        Args:
            also: further outcomes that are not wanted, such as ``bypassed``.
        """
        unwanted = [record for record in self.records if record.outcome in (*FAULTS, *also)]
        if unwanted:
            raise AssertionError(
                f"{len(unwanted)} kinds of wrong writes to distributed tensors:\n"
                + "\n".join(map(str, unwanted))
            )


def watch(
    *roots: torch.nn.Module | torch.Tensor,
    compare: bool = True,
    patience: float = 10.0,
    largest: int = 2**26,
    search: bool = True,
) -> Watch:
    """Watch the writes to distributed tensors in a ``with`` block.

    Every rank should watch the same part of the program. The first time that a line writes with these placements and
    shapes, the operator's out-of-place form is run as well and the results are compared; ranks do so together or
    not at all.

    Args:
        roots: modules and tensors whose local pieces are looked after from the start, and whose names are told.
        compare: run the out-of-place forms.
        patience: how many seconds a rank waits, before a comparison, for the others to come to the same write. A
            program in which only some ranks write is held up by this, for one second from the second time on.
        largest: operators whose tensors have more elements together are not compared.
        search: without roots, search the process for distributed tensors whose pieces are to be looked after. That
            takes about a second for each few million objects.

    Returns: the context manager, which holds what was seen.
    """
    return Watch(roots, compare, patience, largest, search and not roots)


class _Mode(TorchDispatchMode):
    """The dispatch mode behind a watch."""

    supports_higher_order_operators = True

    def __init__(
        self, roots: Sequence[Any], do_compare: bool, patience: float, largest: int, search: bool
    ) -> None:
        super().__init__()
        self.log = Log()
        self._roots = roots
        self._search = search
        self._compare, self._largest = do_compare, largest
        self._agreement = Agreement(patience)
        self._pieces = LocalPieces(self.log)
        self._copies = Copies()
        self._taps = tensors.Taps(self._pieces.accept, self._pieces.know, self._set_data)

    def open(self) -> None:
        for root in self._roots:
            if isinstance(root, torch.nn.Module):
                self.log.paths.learn(root)
        self._pieces.complete = self._search
        for tensor in tensors.alive() if self._search else tensors.members(self._roots):
            self._pieces.know(tensor)
            self._pieces.accept(tensor, tensors.version_of(tensors.local(tensor)))
        self._taps.open()
        self.__enter__()

    def close(self, *exception: Any) -> None:
        self.__exit__(*exception)
        self._taps.close()
        for tensor in tensors.alive() if self._search else self._pieces.known():
            version = tensors.version_of(tensors.local(tensor))
            if version > 0:
                self._pieces.check(tensor, version, ending=True)

    # ----------------------------------------------------------------------------------------- operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operator = describe(func)
        kind = operator.kind
        if not types or not any_distributed(types):
            if kind is WRITE:
                arguments, found = tensor_arguments(operator, args, kwargs or {})
                written = written_tensors(arguments, found)
                self._pieces.plain_write(written, operator.name, operator.group == "harmless")
            return func(*args, **kwargs) if kwargs else func(*args)
        for argument in args:
            if type(argument) is tensors.DISTRIBUTED:
                # Nearly all pieces have version 0: their own operators do not count.
                version = tensors.version_of(tensors.local(argument))
                if version > 0:
                    self._pieces.check(argument, version)
                if self._copies.stale:
                    self._copies.check_stale(argument)
        if kind is WRITE and operator.group != "harmless":
            return self._write(func, operator, args, kwargs or {})
        result = func(*args, **kwargs) if kwargs else func(*args)
        if kind is VIEW:
            self._copies.note(args[0], result)
        return result

    def _write(self, func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments, found = tensor_arguments(operator, args, kwargs)
        written = [one for one in written_tensors(arguments, found) if isinstance(one, tensors.DISTRIBUTED)]
        if not written:
            return func(*args, **kwargs)
        entry = self.log.entry(here(2), operator.name, arguments, found)
        before = [tensors.placements(tensor) for tensor in written]
        meeting = None
        if entry.usual is None:
            meeting = self._meet(entry, operator, written[0], found)
        expected = compare.Expected(None)
        if meeting is not None:
            inputs = {name: value for name, value in kwargs.items() if name not in operator.outs}
            expected = compare.run_functional(operator.functional, operator.writes, args, inputs, meeting)
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if meeting is not None:
                compare.give_up(meeting)
            self._count_error(entry, error, arguments, found)
            raise
        if meeting is not None:
            self.log.opinions[entry.what] = compare.judge(expected, _values(arguments, found), meeting)
        if entry.usual is not None and not self._copies.copies and _is_usual(entry, found, written):
            entry.times += 1
        else:
            self._conclude(entry, operator, arguments, found, written, before)
        return result

    def _conclude(
        self,
        entry: Entry,
        operator: Operator,
        arguments: Sequence[Argument],
        found: Sequence[Any],
        written: Sequence[Any],
        before: Sequence[Any],
    ) -> None:
        """Say what became of a write that went through, and count it."""
        after = show_each(arguments, found)
        if operator.group not in ("metadata", "storage"):
            lost = next(filter(None, map(self._copies.why_lost, written)), "")
            if lost:
                entry.count(LOST, after, lost)
                return
        changed = [one for one, old in zip(written, before, strict=True) if tensors.placements(one) != old]
        opinion = self.log.opinions.get(entry.what, compare.Opinion(None))
        if changed and operator.group != "metadata":
            entry.count(CHANGED, after, _describe_change(changed[0]))
            return
        compared = opinion.right is not None
        tally = Tally(WRONG if opinion.right is False else SAFE, after, opinion.message, compared)
        if not changed and _is_usual(entry, found, written):
            entry.usual = tally
            entry.times += 1
        else:
            entry.tally[tally] += 1
        self._copies.mark_stale(entry, tally, written)

    def _meet(self, entry: Entry, operator: Operator, written: Any, found: Sequence[Any]) -> Meeting | None:
        """Have the ranks agree to compare this write, unless it has been done or makes no sense. What a rank decides
        alone depends on the program and the tensors' claims only, which all ranks share."""
        if not self._compare or entry.what in self.log.opinions or not tensors.can_compare(written):
            return None
        if operator.random:
            why = "it draws random numbers: its values are not compared"
        elif operator.functional is None or operator.group == "storage":
            why = "there is no out-of-place form to compare with"
        elif sum(tensor.numel() for tensor in found) > self._largest:
            why = "its tensors are too large to be compared"
        else:
            alone = tensors.is_simulated(written)
            meeting = self._agreement.meet(entry.what, tensors.mesh_ranks(written), alone)
            # Set before the comparison, which is made of operators itself.
            self.log.opinions[entry.what] = compare.Opinion(None)
            if meeting is not None:
                return meeting
            why = "not compared: only some ranks came to this write"
        self.log.opinions[entry.what] = compare.Opinion(None, why)
        return None

    def _count_error(
        self, entry: Entry, error: Exception, arguments: Sequence[Argument], found: Sequence[Any]
    ) -> None:
        outcome = REFUSED if tensors.is_refusal(error) else ERROR
        entry.count(outcome, show_each(arguments, found), _line(error))

    # -------------------------------------------------------------------------------------------- .data =

    def _set_data(self, tensor: Any, value: Any, assign: Callable[[], None]) -> None:
        """``tensor.data = value``."""
        arguments, found = [Argument("self", 1, True)], [tensor]
        if isinstance(value, torch.Tensor):
            arguments.append(Argument("value", 1, False))
            found.append(value)
        entry = self.log.entry(here(2), ".data =", arguments, found)
        before = tensors.placements(tensor)
        try:
            assign()
        except Exception as error:
            self._count_error(entry, error, arguments, found)
            raise
        after = show_each(arguments, found)
        memory = tensors.storage_of(tensors.local(tensor))
        if not tensors.is_distributed(value) or memory != tensors.storage_of(tensors.local(value)):
            why = "only what the tensor says of its shape follows; its local piece and placement are the old ones"
            entry.count(LOST, after, why)
        else:
            entry.count(CHANGED if tensors.placements(tensor) != before else SAFE, after)


def _is_usual(entry: Entry, found: Sequence[Any], written: Sequence[Any]) -> bool:
    """Whether all tensors still claim what they did, and those that were written are views of nothing."""
    for tensor, claim in zip(found, entry.claims, strict=True):
        if claim is not None and tensors.claim(tensor) is not claim:
            return False
    return all(tensor._base is None for tensor in written)


def _values(arguments: Sequence[Argument], found: Sequence[Any]) -> list[list[Any]]:
    """The tensors of each written argument."""
    values = []
    start = 0
    for argument in arguments:
        if argument.written:
            values.append(list(found[start : start + argument.size]))
        start += argument.size
    return values


def _describe_change(tensor: Any) -> str:
    return (
        f"the tensor of shape {tuple(tensor.shape)} now says {tensors.placement_text(tensor)}, "
        f"with a local piece of shape {tuple(tensors.pieces(tensor)[0].shape)}"
    )


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
