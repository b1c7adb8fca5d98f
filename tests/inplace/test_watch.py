"""What the watch says of single writes, in a simulated world of four ranks."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from sbp.inplace import Record, Watch, table, watch
from sbp.inplace.operators import WRITE, describe

S0, S1, B, P = Shard(0), Shard(1), Replicate(), Partial()
HERE = __file__


def line() -> int:
    """The number of the line that calls this."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def only(seen: Watch) -> Record:
    """The one record."""
    assert len(seen.records) == 1, seen.report()
    return seen.records[0]


def whole(tensor: DTensor) -> torch.Tensor:
    return tensor.full_tensor().reconcile()


# ------------------------------------------------------------------------------------------------ outcomes


def test_a_safe_write_says_where_it_is_and_what_it_did(place: Callable[..., DTensor]) -> None:
    x, y = place(S0), place(B, seed=5)
    with watch() as seen:
        x += y; expected = line()  # fmt: skip  # noqa: E702
    record = only(seen)
    assert (record.outcome, record.operator, record.compared) == ("safe", "aten.add_.Tensor", True)
    assert (record.file, record.line) == (HERE, expected)
    assert record.source.startswith("x += y")
    assert record.placements == "self: S(0), other: B"
    assert record.function == "test_a_safe_write_says_where_it_is_and_what_it_did"
    assert (record.module, record.family, record.count) == ("", "", 1)


def fill_partial(place: Any, indices: Any) -> None:
    place(P).fill_(3)


def hardswish_partial(place: Any, indices: Any) -> None:
    nn.functional.hardswish(place(P), inplace=True)


def zero_slice(place: Any, indices: Any) -> None:
    x = place(S0)
    x[:2].zero_()


def zero_select(place: Any, indices: Any) -> None:
    x = place(S0)
    x.select(0, 3).zero_()


def zero_slice_of_detached(place: Any, indices: Any) -> None:
    x = place(S0)
    x.detach()[:2].zero_()


def set_rows(place: Any, indices: Any) -> None:
    x, y = place(S0), place(B, (2, 4))
    x[:2] = y


def scatter_add(place: Any, indices: Any) -> None:
    x, index = place(S0), indices(torch.zeros(8, 4, dtype=torch.int64), S0)
    x.scatter_add_(0, index, place(S0))


def add_number_to_partial(place: Any, indices: Any) -> None:
    x = place(P)
    x += 1


def set_data(place: Any, indices: Any) -> None:
    x = place(S0)
    x.data = place(B)


def add_to_data(place: Any, indices: Any) -> None:
    x = place(S0)
    x.data.add_(1)


def write_to_local(place: Any, indices: Any) -> None:
    x = place(S0)
    x.to_local().add_(1)


def set_item_of_other_dim(place: Any, indices: Any) -> None:
    x = place(S0)
    x[:, 1] = place(S0)[:, 0]


def foreach(place: Any, indices: Any) -> None:
    torch._foreach_add_([place(S0), place(B)], [place(S0, seed=4), place(B, seed=5)])


def out(place: Any, indices: Any) -> None:
    torch.add(place(S0), place(S0), out=place(S0))


def through_a_view(place: Any, indices: Any) -> None:
    x = place(S0)
    x.view(32).mul_(2)


def inplace_function(place: Any, indices: Any) -> None:
    nn.functional.relu(place(B), inplace=True)


@pytest.mark.parametrize(
    ("write", "outcome"),
    [
        (fill_partial, "wrong value"),
        (hardswish_partial, "changed placement"),
        (zero_slice, "lost"),
        (zero_select, "lost"),
        (zero_slice_of_detached, "lost"),
        (set_rows, "lost"),
        (scatter_add, "changed placement"),
        (add_number_to_partial, "refused"),
        (set_data, "lost"),
        (add_to_data, "safe"),
        (write_to_local, "bypassed"),
        (set_item_of_other_dim, "safe"),
        (foreach, "safe"),
        (out, "safe"),
        (through_a_view, "safe"),
        (inplace_function, "safe"),
    ],
)
def test_outcome(place: Any, indices: Any, write: Callable[..., None], outcome: str) -> None:
    with watch() as seen:
        try:
            write(place, indices)
        except RuntimeError:
            assert outcome == "refused"
    record = only(seen)
    assert record.outcome == outcome, str(record)
    assert record.file == HERE
    assert record.function == write.__name__
    assert record.is_fault == (outcome in ("lost", "wrong value", "changed placement"))


def test_a_refusal_is_raised_as_it_is_without_the_watch(place: Any) -> None:
    x = place(P)
    with pytest.raises(RuntimeError) as plain:
        x += 1
    with watch(), pytest.raises(RuntimeError) as watched:
        x += 1
    assert str(plain.value) == str(watched.value)


def test_an_error_from_deep_inside_is_no_refusal(place: Any, indices: Any) -> None:
    x, index = place(S1), indices(torch.full((2, 4), 99), S1)
    with watch() as seen, pytest.raises(RuntimeError, match="out of bounds"):
        x.scatter_(0, index, 1.0)
    assert only(seen).outcome == "error"


def test_lists_show_the_placements_that_occur(place: Any) -> None:
    with watch() as seen:
        torch._foreach_mul_([place(S0), place(S0), place(B)], 2.0)
    assert only(seen).placements == "self: [2 x S(0), 1 x B]"


def test_changed_placements_are_shown(place: Any) -> None:
    with watch() as seen:
        hardswish_partial(place, None)
    assert only(seen).placements == "self: P -> B"


def test_writes_are_counted_by_line(place: Any) -> None:
    x = place(S0)
    with watch() as seen:
        for _ in range(5):
            x.add_(1)
        x.add_(1)
    assert sorted(record.count for record in seen.records) == [1, 5]
    assert seen.summary() == {"writes": 6, "outcomes": {"safe": 6}, "families": {}, "wrong lines": 0}


def test_a_fault_is_found_every_time(place: Any) -> None:
    with watch() as seen:
        for _ in range(4):
            x = place(P)
            x.fill_(3)
    record = only(seen)
    assert (record.outcome, record.count) == ("wrong value", 4)


def test_reading_is_not_recorded(place: Any) -> None:
    x, y = place(S0), place(B)
    with watch() as seen:
        z = (x @ y.t()).relu().sum()
        z.redistribute(placements=[B])
        x.t().contiguous().detach()
        x.requires_grad_()
    assert seen.records == []
    assert seen.report() == "no write to a distributed tensor"


def test_plain_tensors_are_nobodys_business(place: Any, world: Any) -> None:
    with world.disable():
        x = torch.ones(3)
        with watch() as seen:
            x.add_(1)
            x[0] = 5
            x.data = torch.zeros(3)
    assert seen.records == []


# ------------------------------------------------------------------------------------------------- views


def test_a_view_nobody_can_compare_with_its_base_is_safe(place: Any) -> None:
    x = place(S0)
    with watch() as seen:
        part = (x + 1)[:2]
        part.zero_()
    assert only(seen).outcome == "safe"


def test_a_base_that_is_still_there_loses_the_write(place: Any) -> None:
    x = place(S0)
    with watch() as seen:
        y = x + 1
        part = y[:2]; made = line()  # fmt: skip  # noqa: E702
        part.zero_()
    record = only(seen)
    assert record.outcome == "lost"
    assert f"test_watch.py:{made}" in record.message and "S(0)" in record.message
    assert whole(y)[:2].abs().min() > 0


def test_another_view_shows_the_lost_write(place: Any) -> None:
    with watch() as seen:
        y = place(S0) + 1
        one, other = y[:3], y[2:5]
        del y
        one.zero_()
    assert only(seen).outcome == "lost"
    assert whole(other)[0].abs().min() > 0


def test_views_that_lie_in_one_copy_see_each_other(place: Any) -> None:
    with watch() as seen:
        one, other = (place(S0) + 1).split([4, 4])
        one.zero_()
    assert only(seen).outcome == "safe"
    assert other is not None


def test_a_view_made_before_the_watch(place: Any) -> None:
    x = place(S0)
    part = x[:2]
    with watch() as seen:
        part.zero_()
    assert only(seen).outcome == "lost"


def test_inference_mode(place: Any) -> None:
    with torch.inference_mode(), watch() as seen:
        x = place(S0) + 1
        part = x[:2]
        part.zero_()
        x.add_(1)
    assert [record.outcome for record in seen.records] == ["lost", "safe"]


def test_a_view_that_does_not_see_the_write(place: Any) -> None:
    x = place(S0)
    with watch() as seen:
        part = x[:2]
        x.zero_(); written = line()  # fmt: skip  # noqa: E702
        used = part + 1
    record = only(seen)
    assert (record.outcome, record.line) == ("lost", written)
    assert whole(used).sum() != 8


def test_a_view_that_is_not_used_again_does_no_harm(place: Any) -> None:
    x = place(S0)
    with watch() as seen:
        part = x[:2]
        part.sum()
        x.zero_()
    assert only(seen).outcome == "safe"


def test_a_view_taken_after_the_write_is_right(place: Any) -> None:
    x = place(S0)
    with watch() as seen:
        x[:2]
        x.zero_()
        x[:2].sum()
    assert only(seen).outcome == "safe"


# ------------------------------------------------------------------------------------------- local pieces


def test_local_pieces_of_tensors_from_before(place: Any) -> None:
    x = place(S0)
    with torch.no_grad():
        x.to_local().add_(1)
    with watch() as seen:
        x._local_tensor.add_(1); expected = line()  # fmt: skip  # noqa: E702
        x.sum()
    record = only(seen)
    assert (record.outcome, record.line, record.count) == ("bypassed", expected, 1)


def test_a_local_piece_that_the_watch_did_not_know(place: Any) -> None:
    with watch() as seen:
        x = place(S0) + 1
        x._local_tensor.add_(1); expected = line()  # fmt: skip  # noqa: E702
        x.sum()
        x.sum()
    record = only(seen)
    assert (record.outcome, record.line, record.operator) == ("bypassed", expected, "aten.add_.Tensor")


def test_a_write_that_no_mode_sees_shows_in_the_version(place: Any) -> None:
    x = place(S0)
    with watch() as seen:
        with torch.utils._python_dispatch._disable_current_modes():
            x._local_tensor.add_(1)
        x.sum(); noticed = line()  # fmt: skip  # noqa: E702
    record = only(seen)
    assert (record.outcome, record.line) == ("bypassed", noticed)
    assert "noticed when it was used" in record.message


def test_a_write_that_no_mode_sees_shows_at_the_end(place: Any) -> None:
    x = place(S0)
    with watch(x) as seen, torch.utils._python_dispatch._disable_current_modes():
        x._local_tensor.add_(1)
    record = only(seen)
    assert (record.outcome, record.file) == ("bypassed", "")
    assert "by the end of the watch" in record.message


def test_what_was_written_before_is_not_told(place: Any) -> None:
    x = place(S0)
    x._local_tensor.add_(1)
    x.to_local().add_(1)
    with watch() as seen:
        x.sum()
        local = place(B).to_local()
        local.mul_(2)  # a tensor that is gone
    assert seen.records == []


def test_reading_a_local_piece_is_fine(place: Any) -> None:
    x = place(S0, requires_grad=True)
    with watch() as seen:
        (x.to_local() * 2).sum()
        x.to_local().clone().add_(1)
    assert seen.records == []


def test_a_tensor_made_from_a_local_one_is_written_with_it(place: Any, mesh: Any) -> None:
    local = place(B).to_local().clone()
    with watch() as seen:
        local.add_(1)  # before it is made
        x = DTensor.from_local(local, mesh, [B], run_check=False)
        x.sum()
        local.add_(1); expected = line()  # fmt: skip  # noqa: E702
        x.sum()
    record = only(seen)
    assert (record.outcome, record.line) == ("bypassed", expected)


def test_a_collective_into_the_local_piece(place: Any) -> None:
    x = place(B)
    with watch() as seen:
        dist.all_reduce(x.to_local()); expected = line()  # fmt: skip  # noqa: E702
    record = only(seen)
    assert (record.outcome, record.operator, record.line) == ("bypassed", "c10d.allreduce_.default", expected)


# --------------------------------------------------------------------------------- modules and the stack


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.activate = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        x += 1
        return self.activate(x)


class Model(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


@pytest.mark.parametrize("recompute", [False, True])
def test_module_paths(place: Any, recompute: bool) -> None:
    model = Model(recompute)
    with watch() as seen:
        loss = model(place(S0, requires_grad=True)).sum()
        before = {(record.module, record.source): record.count for record in seen.records}
        loss.backward()
    wanted = {
        ("layers.0", "x += 1"),
        ("layers.0.activate", "return self.activate(x)"),
        ("layers.1", "x += 1"),
        ("layers.1.activate", "return self.activate(x)"),
    }
    assert set(before) == wanted
    after = {(record.module, record.source): record.count for record in seen.records if not record.family}
    # The last layer's recomputation ends when all that is needed is there, so not every write happens again.
    assert set(after) == wanted
    assert (after != before) == recompute
    assert all(record.outcome == "safe" for record in seen.records)


def test_parts_of_torch_that_write_by_nature_are_summed_up(place: Any) -> None:
    weight = nn.Parameter(place(S0))
    model = nn.ParameterList([weight])
    with watch(model) as seen:
        nn.init.normal_(weight, std=0.1)
        nn.init.zeros_(weight)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(2):
            (weight + 1).pow(2).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        model.load_state_dict(model.state_dict())
    families = seen.summary()["families"]
    assert set(families) == {"nn.init", "backward pass", "gradient clipping", "optimizer", "load_state_dict"}
    assert families["nn.init"] == 2 and families["backward pass"] == 1
    assert all(record.family and record.outcome == "safe" for record in seen.records), seen.report()
    assert "test_watch.py" not in seen.report()


def test_somebodys_own_optimizer_is_one(place: Any) -> None:
    class Plain(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"])

    weight = nn.Parameter(place(S0))
    with watch() as seen:
        weight.sum().backward()
        Plain([weight], {"lr": 0.1}).step()
    record = next(record for record in seen.records if record.source.startswith("parameter.data.add_"))
    assert (record.family, record.outcome) == ("optimizer", "safe")


def test_faults_in_an_optimizer_are_listed(place: Any) -> None:
    weight = nn.Parameter(place(P))
    with watch() as seen:
        nn.init.constant_(weight, 3.0)
    record = only(seen)
    assert (record.family, record.outcome) == ("nn.init", "wrong value")
    assert "test_watch.py" in seen.report()


def test_a_write_in_a_backward_function(place: Any) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            gradient *= 2
            return gradient

    x = place(S0, requires_grad=True)
    with watch() as seen:
        Double.apply(x).sum().backward()
    record = only(seen)
    assert (record.source, record.function, record.family) == ("gradient *= 2", "backward", "")
    assert torch.equal(whole(x.grad), torch.full((8, 4), 2.0))


# ------------------------------------------------------------------------------------- leaves no trace


def train(place: Any) -> list[torch.Tensor]:
    torch.manual_seed(3)
    weight = nn.Parameter(place(S1, (8, 8)))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    draws = []
    for seed in range(3):
        x = place(B, (4, 8), seed)
        hidden = nn.functional.dropout(x @ weight, 0.5, inplace=True)
        hidden += x @ weight
        nn.functional.relu(hidden, inplace=True)
        hidden.pow(2).mean().backward()
        nn.utils.clip_grad_norm_([weight], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        draws.append(torch.rand(3))
    return [whole(weight).detach(), *draws]


def test_nothing_is_computed_differently(place: Any, world: Any) -> None:
    plain = train(place)
    with watch() as seen:
        watched = train(place)
    assert seen.summary()["writes"] > 20
    with world.disable():
        for one, other in zip(plain, watched, strict=True):
            assert torch.equal(*(getattr(t, "_local_tensors", {0: t})[0] for t in (one, other)))


def test_everything_is_put_back(place: Any) -> None:
    before = DTensor.__init__, DTensor.to_local, DTensor.__dict__.get("data")
    with pytest.raises(ZeroDivisionError), watch():
        raise ZeroDivisionError
    with watch(), watch():
        assert DTensor.to_local is not before[1]
    assert (DTensor.__init__, DTensor.to_local, DTensor.__dict__.get("data")) == before


def test_watches_may_be_nested_and_entered_again(place: Any) -> None:
    x, seen = place(S0), watch()
    with watch() as outer:
        with seen:
            x.add_(1)
            x.to_local().add_(1)
        x.mul_(2)
        with seen:
            x.mul_(3)
    assert seen.summary()["writes"] == 3
    assert outer.summary()["writes"] == 4
    assert all(watch.summary()["outcomes"]["bypassed"] == 1 for watch in (seen, outer))


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inside", [True, False])
def test_other_modes_work_beside_it(place: Any, inside: bool) -> None:
    x, counting, seen = place(S0), Counting(), watch()
    first, second = (seen, counting) if inside else (counting, seen)
    with first, second:
        x.add_(1)
    assert only(seen).outcome == "safe"
    assert "aten.add_.Tensor" in counting.names


# ------------------------------------------------------------------------------------------------ settings


def test_without_comparison(place: Any) -> None:
    with watch(compare=False) as seen:
        x = place(P)
        x.fill_(3)
    record = only(seen)
    assert (record.outcome, record.compared) == ("safe", False)


def test_large_tensors_are_not_compared(place: Any) -> None:
    with watch(largest=40) as seen:
        x = place(S0)
        x.add_(1)
        x.add_(place(B))
    small, large = sorted(seen.records, key=lambda record: record.line)
    assert small.compared and not large.compared
    assert "too large" in large.message


def test_random_writes_are_not_compared(place: Any) -> None:
    with watch() as seen:
        place(S0).uniform_()
    record = only(seen)
    assert (record.outcome, record.compared) == ("safe", False)
    assert "random" in record.message


def test_many_different_claims_are_counted_together(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbp.inplace.log._MOST_ENTRIES", 3)
    with watch(compare=False) as seen:
        for _ in range(10):
            x = place(S0)
            x.add_(1)
    assert only(seen).count == 10


def test_assert_clean_names_the_lines(place: Any) -> None:
    with watch() as seen:
        x = place(S0)
        x[:2].zero_(); lost = line()  # fmt: skip  # noqa: E702
        x.to_local().add_(1)
    with pytest.raises(AssertionError, match=rf"lost: x\[:2\].zero_\(\).*\n.*test_watch.py:{lost}"):
        seen.assert_clean()
    with pytest.raises(AssertionError, match="2 kinds of wrong writes"):
        seen.assert_clean(also=["bypassed"])
    with watch() as seen:
        x.add_(1)
    seen.assert_clean(also=["bypassed", "refused", "error"])


def test_records_are_data_that_the_reports_read(place: Any, tmp_path: Path) -> None:
    from sbp.report.results import read

    with watch() as seen:
        x = place(S0)
        x[:2].zero_()
        x += place(B)
    lines = [{"kind": "run", "format": 1}, *(record.to_dict() for record in seen.records)]
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read(path).inplace
    assert [(one.outcome, one.source, one.placements) for one in found] == [
        ("lost", "x[:2].zero_()", "self: B"),
        ("safe", "x += place(B)", "self: S(0), other: B"),
    ]
    assert [one.raw for one in found] == lines[1:]


# ----------------------------------------------------------------------------------------- all operators


def test_every_operator_of_the_table_is_seen_as_a_write() -> None:
    """What the watch reads from the schemas is what the table says, for all overloads."""
    checked = 0
    for name, entry in table.operators().items():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
        if found is None:
            continue  # an operator of another build of torch
        operator = describe(found)
        assert operator.kind == WRITE
        assert tuple(argument.name for _, argument in operator.places if argument.written) == entry.writes
        assert (operator.functional is None) == (entry.functional is None or entry.kind == "both")
        checked += 1
    assert checked > 1400
