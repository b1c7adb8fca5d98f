"""The adapter around torch's private operator database: a change there is to be seen here first."""

from __future__ import annotations

import pytest
import torch

from sbp.suites.operator_database import find_operator, operator_names


def test_the_database_has_what_it_had_in_torch_2_13() -> None:
    names = operator_names()
    assert len(set(names)) == len(names)
    assert len(names) >= 690
    for name in ("matmul", "nn.functional.layer_norm", "index_select", "norm.fro", "cat"):
        assert name in names


def test_variants_differ_in_size_and_values_only() -> None:
    kinds = find_operator("add").variants(4)
    assert len(kinds) == 4
    for even, uneven, again, _ in kinds:
        shapes = [
            [tuple(t.shape) for t in one.args if isinstance(t, torch.Tensor)] for one in (even, uneven, again)
        ]
        assert [len(shape) for shape in shapes[0]] == [len(shape) for shape in shapes[1]]
        assert shapes[0] == shapes[2]
        assert not torch.equal(even.args[0], again.args[0])
    sizes = [size for row in kinds for t in row[0].args if isinstance(t, torch.Tensor) for size in t.shape]
    assert all(size == 1 or size % 2 == 0 for size in sizes)


def test_the_same_samples_every_time() -> None:
    one, two = (find_operator("matmul").variants(3) for _ in range(2))
    for row, other in zip(one, two, strict=True):
        for a, b in zip(row, other, strict=True):
            assert torch.equal(a.args[0], b.args[0]) and torch.equal(a.args[1], b.args[1])


def test_an_operator_that_does_not_exist() -> None:
    with pytest.raises(KeyError):
        find_operator("nothing of the kind")
