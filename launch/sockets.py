"""The channel between the ranks' supervisors where there is no MPI: TCP connections to the first rank.

A rank is let in when it knows the job's token. Nothing is listened to on more than one address, loopback where all
ranks are on one host.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import struct
import time
from typing import Any

from launch.network import distinct_names, host_identity
from launch.wire import Connection, ConnectionClosed, WireError

_LENGTH = struct.Struct("<Q")
# A first message longer than this is no rank's.
_LONGEST_HELLO = 4096


class ChannelLost(RuntimeError):
    """Another rank's supervisor is gone, so the job cannot go on."""


class SocketChannel:
    """Messages over TCP. The first rank has a connection to every other rank; these have one to it."""

    def __init__(self, rank: int, hosts: list[str], peers: dict[int, Connection], launcher: str) -> None:
        self.rank = rank
        self.size = len(hosts)
        self.launcher = launcher
        self._hosts = hosts
        self._peers = peers
        self._ranks = {connection.fileno(): other for other, connection in peers.items()}
        self._waiting = {other: bytearray() for other in peers}
        for connection in peers.values():
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.socket.setblocking(False)

    def send(self, rank: int, data: bytes) -> None:
        # Kept where the other end does not take it yet: two ends that wait for each other to read would do so for ever.
        self._waiting[rank] += _LENGTH.pack(len(data)) + data
        self._push(rank)

    def _push(self, rank: int) -> None:
        waiting = self._waiting[rank]
        try:
            while waiting:
                del waiting[: self._peers[rank].socket.send(waiting[: 1 << 20])]
        except BlockingIOError:
            return
        except OSError as error:
            raise self._lost(rank) from error

    def _lost(self, rank: int) -> ChannelLost:
        return ChannelLost(f"the process of rank {rank} on {self._hosts[rank]} is gone")

    def receive(self) -> tuple[int, bytes] | None:
        for rank, waiting in self._waiting.items():
            if waiting:
                self._push(rank)
        for rank, connection in self._peers.items():  # what came together with an earlier message
            data = connection.take()
            if data is not None:
                return rank, data
        readable, _, _ = select.select(list(self._ranks), [], [], 0)
        for file in readable:
            rank = self._ranks[file]
            try:
                data = self._peers[rank].receive_bytes(0)
            except ConnectionClosed as error:
                raise self._lost(rank) from error
            if data is not None:
                return rank, data
        return None

    def all_hosts(self) -> list[str]:
        return list(self._hosts)

    def abort(self) -> None:
        # The others notice that this end is closed, and end as well.
        os._exit(1)

    def finish(self, patience: float = 2.0) -> None:
        """Give messages that are on their way a moment."""
        end = time.monotonic() + patience
        while any(self._waiting.values()) and time.monotonic() < end:
            try:
                for rank in self._waiting:
                    self._push(rank)
            except ChannelLost:
                return
            time.sleep(0.001)


def new_token() -> str:
    """A secret that the ranks of one job share."""
    return secrets.token_hex(32)


def gather(listener: socket.socket, size: int, token: str, launcher: str, patience: float) -> SocketChannel:
    """On the first rank: wait for the other ranks. Raises ChannelLost where some do not come."""
    end = time.monotonic() + patience
    peers: dict[int, Connection] = {}
    identities: dict[int, list[str]] = {0: host_identity()}
    while len(peers) < size - 1:
        listener.settimeout(max(0.01, end - time.monotonic()))
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            missing = [rank for rank in range(1, size) if rank not in peers]
            raise ChannelLost(
                f"ranks {', '.join(map(str, missing))} did not come within {patience:.0f} s"
            ) from None
        sock.setblocking(True)
        connection = Connection(sock, _LONGEST_HELLO)
        hello = _hello(connection, token, size)
        if hello is None or hello["rank"] in peers:
            connection.close()
            continue
        connection.longest = None
        peers[hello["rank"]] = connection
        identities[hello["rank"]] = hello["host"]
    listener.close()
    hosts = distinct_names([identities[rank] for rank in range(size)])
    for connection in peers.values():
        connection.send({"hosts": hosts})
    return SocketChannel(0, hosts, dict(sorted(peers.items())), launcher)


def _hello(connection: Connection, token: str, size: int) -> dict[str, Any] | None:
    """A rank's first message, None where it is not one of this job."""
    try:
        hello = connection.receive(2.0)
    except (ConnectionClosed, WireError):
        return None
    well = (
        isinstance(hello, dict)
        and isinstance(hello.get("token"), str)
        and hmac.compare_digest(hello["token"].encode(), token.encode())
        and isinstance(hello.get("rank"), int)
        and 0 < hello["rank"] < size
    )
    return hello if well else None


def join(
    address: str, port: int, rank: int, size: int, token: str, launcher: str, patience: float
) -> SocketChannel:
    """On the other ranks: connect to the first. Raises ChannelLost."""
    end = time.monotonic() + patience
    while True:
        try:
            connection = Connection(socket.create_connection((address, port), 10.0))
            break
        except OSError as error:
            if time.monotonic() > end:
                raise ChannelLost(f"rank {rank} cannot reach rank 0 at {address}:{port}: {error}") from error
            time.sleep(0.05)
    connection.socket.setblocking(True)
    try:
        connection.send({"rank": rank, "token": token, "host": host_identity()})
        welcome = connection.receive(max(1.0, end - time.monotonic()))
    except ConnectionClosed:
        welcome = None
    if welcome is None:
        raise ChannelLost(f"rank 0 at {address}:{port} does not let rank {rank} in")
    return SocketChannel(rank, welcome["hosts"], {0: connection}, launcher)
