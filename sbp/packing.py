"""How hand-written code keeps several parameters in one: see :func:`sbp.cases.fused`. Works on torch tensors and
numpy arrays alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def fuse(*pieces: Any, dim: int, blocks: Sequence[int] = ()) -> Any:
    """The pieces along ``dim``, one after the other, or interleaved in blocks of so many rows each.

    Raises ValueError where the blocks do not divide the pieces.
    """
    if not blocks:
        return _concatenate(pieces, dim)
    counts = _block_counts([piece.shape for piece in pieces], dim, blocks)
    rows = [
        _slice(piece, dim, turn * block, (turn + 1) * block)
        for turn in range(counts)
        for piece, block in zip(pieces, blocks, strict=True)
    ]
    return _concatenate(rows, dim)


def unfuse(
    whole: Any, shapes: Sequence[tuple[int, ...]], *, dim: int, blocks: Sequence[int] = ()
) -> list[Any]:
    """The inverse of :func:`fuse`; ``shapes`` are those of the pieces."""
    if not blocks:
        parts, start = [], 0
        for shape in shapes:
            parts.append(_slice(whole, dim, start, start + shape[dim]))
            start += shape[dim]
        return parts
    counts = _block_counts(shapes, dim, blocks)
    taken: list[list[Any]] = [[] for _ in shapes]
    start = 0
    for _ in range(counts):
        for index, block in enumerate(blocks):
            taken[index].append(_slice(whole, dim, start, start + block))
            start += block
    return [_concatenate(rows, dim) for rows in taken]


def transpose(tensor: Any, *, dim0: int, dim1: int) -> Any:
    """Two dimensions swapped, as a contiguous copy."""
    swapped = tensor.swapaxes(dim0, dim1)
    return swapped.contiguous() if hasattr(swapped, "contiguous") else swapped.copy()


def transpose_back(whole: Any, shapes: Sequence[tuple[int, ...]], *, dim0: int, dim1: int) -> list[Any]:
    """The inverse of :func:`transpose`, as a packing needs it."""
    return [transpose(whole, dim0=dim0, dim1=dim1)]


def keep(piece: Any) -> Any:
    """The piece as it is."""
    return piece


def keep_back(whole: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """The inverse of :func:`keep`."""
    return [whole]


def pad(tensor: Any, padding: dict[int, int]) -> Any:
    """Zeros appended along each dimension, up to the size given for it. Raises ValueError where it is longer."""
    for dim, size in padding.items():
        missing = size - tensor.shape[dim]
        if missing < 0:
            raise ValueError(f"cannot pad dimension {dim} of {tuple(tensor.shape)} to {size}: it is longer")
        shape = list(tensor.shape)
        shape[dim] = missing
        zeros = (
            tensor.new_zeros(shape) if hasattr(tensor, "new_zeros") else _numpy().zeros(shape, tensor.dtype)
        )
        tensor = _concatenate([tensor, zeros], dim)
    return tensor


def _block_counts(shapes: Sequence[tuple[int, ...]], dim: int, blocks: Sequence[int]) -> int:
    if len(blocks) != len(shapes):
        raise ValueError(f"{len(blocks)} block sizes for {len(shapes)} parts")
    counts = {shape[dim] // block for shape, block in zip(shapes, blocks, strict=True)}
    exact = all(shape[dim] % block == 0 for shape, block in zip(shapes, blocks, strict=True))
    if len(counts) != 1 or not exact:
        sizes = [shape[dim] for shape in shapes]
        raise ValueError(f"blocks of {tuple(blocks)} do not fit pieces of {sizes} rows in equal number")
    return counts.pop()


def _slice(tensor: Any, dim: int, start: int, stop: int) -> Any:
    index = [slice(None)] * tensor.ndim
    index[dim] = slice(start, stop)
    return tensor[tuple(index)]


def _concatenate(tensors: Sequence[Any], dim: int) -> Any:
    if hasattr(tensors[0], "new_zeros"):
        import torch

        return torch.cat(list(tensors), dim)
    return _numpy().concatenate(tensors, dim)


def _numpy() -> Any:
    import numpy

    return numpy
