"""Messages between processes: plain data and numpy arrays, without pickle.

A message is a JSON header followed by the raw bytes of its arrays and byte strings, so reading one runs no code
and works across interpreters and numpy versions.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from typing import Any

import numpy as np

_LENGTH = struct.Struct("<Q")
_HEAD = struct.Struct("<I")
_MARK = "\x00"  # key of a replaced value; no message uses it for anything else
MOST_BYTES = 1 << 31


class WireError(ValueError):
    """A value that cannot be sent, or bytes that are no message."""


class ConnectionClosed(ConnectionError):
    """The process at the other end is gone."""


def encode(value: Any) -> bytes:
    """Plain data (None, bool, int, float, str, bytes, list, tuple, dict with text keys, numpy arrays and numpy
    numbers) as bytes. Tuples come back as tuples. Raises WireError for anything else."""
    buffers: list[bytes] = []

    def plain(item: Any) -> Any:
        if item is None or item is True or item is False:
            return item
        kind = type(item)
        if kind is str or kind is int or kind is float:
            return item
        if kind is list:
            return [plain(part) for part in item]
        if kind is dict:
            if not all(type(key) is str and key != _MARK for key in item):
                raise WireError("a dictionary in a message needs text keys")
            return {key: plain(part) for key, part in item.items()}
        if kind is tuple:
            return {_MARK: "t", "v": [plain(part) for part in item]}
        if isinstance(item, (bytes, bytearray, memoryview)):
            buffers.append(bytes(item))
            return {_MARK: "b", "n": len(buffers[-1])}
        if isinstance(item, np.ndarray):
            if item.dtype.hasobject or item.dtype.names is not None:
                raise WireError(f"an array of dtype {item.dtype} cannot be sent")
            native = item.dtype.newbyteorder("<") if item.dtype.byteorder == ">" else item.dtype
            buffers.append(np.asarray(item, dtype=native).tobytes())
            return {_MARK: "a", "d": native.str, "s": list(item.shape), "n": len(buffers[-1])}
        if isinstance(item, np.generic):
            return plain(item.item())
        for base in (int, float, str):  # subclasses, such as enumerations
            if isinstance(item, base):
                return base(item)
        raise WireError(f"a {kind.__name__} cannot be sent; only plain data and numpy arrays can")

    header = json.dumps(plain(value), separators=(",", ":")).encode("utf-8", "surrogatepass")
    return b"".join([_HEAD.pack(len(header)), header, *buffers])


def decode(data: bytes) -> Any:
    """The value of :func:`encode`. Arrays are writable. Raises WireError."""
    try:
        (length,) = _HEAD.unpack_from(data)
        tree = json.loads(data[_HEAD.size : _HEAD.size + length].decode("utf-8", "surrogatepass"))
        position = _HEAD.size + length

        def take(count: int) -> bytes:
            nonlocal position
            part = data[position : position + count]
            if len(part) != count:
                raise WireError("the message ends early")
            position += count
            return part

        def restore(item: Any) -> Any:
            if isinstance(item, list):
                return [restore(part) for part in item]
            if isinstance(item, dict):
                kind = item.get(_MARK)
                if kind is None:
                    return {key: restore(part) for key, part in item.items()}
                if kind == "t":
                    return tuple(restore(part) for part in item["v"])
                raw = take(item["n"])
                if kind == "b":
                    return raw
                return np.frombuffer(bytearray(raw), dtype=np.dtype(item["d"])).reshape(item["s"])
            return item

        return restore(tree)
    except WireError:
        raise
    except (ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise WireError(f"not a message: {error}") from error


class Connection:
    """Framed messages over a connected stream socket. Messages longer than ``longest`` bytes are not accepted."""

    def __init__(self, sock: socket.socket, longest: int | None = None) -> None:
        self.socket = sock
        self.longest = longest
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, value: Any) -> None:
        self.send_bytes(encode(value))

    def send_bytes(self, data: bytes) -> None:
        """Send an encoded message. Raises ConnectionClosed."""
        try:
            self.socket.sendall(_LENGTH.pack(len(data)) + data)
        except (BrokenPipeError, ConnectionResetError, OSError) as error:
            raise ConnectionClosed(str(error)) from error

    def receive(self, timeout: float | None = None) -> Any:
        """The next message; None after ``timeout`` seconds without one. Raises ConnectionClosed."""
        data = self.receive_bytes(timeout)
        return None if data is None else decode(data)

    def receive_bytes(self, timeout: float | None = None) -> bytes | None:
        """The next message, still encoded; None after ``timeout`` seconds without one. Raises ConnectionClosed."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            whole = self.take()
            if whole is not None:
                return whole
            left = None if end is None else max(0.0, end - time.monotonic())
            readable, _, _ = select.select([self.socket], [], [], left)
            if not readable:
                return None
            try:
                part = self.socket.recv(1 << 20)
            except BlockingIOError:
                continue
            except OSError as error:
                raise ConnectionClosed(str(error)) from error
            if not part:
                raise ConnectionClosed("the other end closed the connection")
            self._buffer += part

    def take(self) -> bytes | None:
        """A message that was received whole together with an earlier one, still encoded; else None."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > (self.longest or MOST_BYTES):
            raise ConnectionClosed(f"a message of {length} bytes is more than can be right")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        data = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return data

    def close(self) -> None:
        self.socket.close()
