"""Messages come back as they were, and nothing else is taken for one."""

from __future__ import annotations

import enum
import math
import socket
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from launch.wire import Connection, ConnectionClosed, WireError, decode, encode

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_characters="\x00"))
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(st.characters(exclude_characters="\x00")), inner)
    ),
    max_leaves=12,
)
dtypes = st.sampled_from(["?", "<i4", "<u1", "<i8", "<f2", "<f4", "<f8", "<c8", "<c16"])
arrays = dtypes.flatmap(
    lambda dtype: st_numpy.arrays(np.dtype(dtype), st_numpy.array_shapes(min_dims=0, min_side=0, max_side=3))
)


@given(plain)
@settings(max_examples=200, deadline=None)
def test_plain_data(value: Any) -> None:
    assert decode(encode(value)) == value


@given(st.dictionaries(st.text(st.characters(exclude_characters="\x00")), arrays, max_size=3))
@settings(max_examples=100, deadline=None)
def test_arrays(value: dict[str, np.ndarray]) -> None:
    back = decode(encode(value))
    assert list(back) == list(value)
    for name, array in value.items():
        assert back[name].dtype == array.dtype and back[name].shape == array.shape
        assert back[name].tobytes() == array.tobytes()


def test_numbers_that_json_lacks() -> None:
    back = decode(encode([math.inf, -math.inf, math.nan, np.float64(2.5), np.int32(3), np.bool_(True)]))
    assert back[:2] == [math.inf, -math.inf] and math.isnan(back[2]) and back[3:] == [2.5, 3, True]


def test_arrays_are_writable_and_contiguous_copies() -> None:
    array = np.arange(6).reshape(2, 3).T
    back = decode(encode(array))
    assert np.array_equal(back, array)
    back[0, 0] = 7
    assert array[0, 0] == 0
    assert np.array_equal(decode(encode(np.arange(3, dtype=">i4"))), np.arange(3))


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize("value", [object(), {1: 2}, {"\x00": 1}, np.array([object()]), {1, 2}, 1j])
def test_what_is_no_plain_data_is_refused(value: Any) -> None:
    with pytest.raises(WireError):
        encode(value)


def test_subclasses_of_numbers_and_text_are_sent_as_what_they_are() -> None:
    assert decode(encode(Colour.RED)) == 1


@given(st.binary(max_size=60))
@settings(max_examples=200, deadline=None)
def test_noise_is_no_message(data: bytes) -> None:
    try:
        decode(data)
    except WireError:
        pass


def test_a_connection_frames_messages_and_sees_the_end() -> None:
    left, right = (Connection(sock) for sock in socket.socketpair())
    assert right.receive(0.01) is None
    left.send({"a": np.ones(3)})
    left.send("second")
    assert right.receive(1)["a"].sum() == 3
    assert right.receive(1) == "second"
    left.close()
    with pytest.raises(ConnectionClosed):
        right.receive(1)
