"""Which ranks share a host, and at which address the first rank is reached by all."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"
_ASK_ADDRESS = 0x8915  # SIOCGIFADDR


@dataclass(frozen=True)
class Place:
    """Where the ranks meet, as one rank sees it.

    Attributes:
        address: the first rank's address; loopback where all ranks are on one host.
        interface: this rank's network interface on the way there; empty where there is none to say.
    """

    address: str
    interface: str


def host_identity() -> list[str]:
    """This host's name, and what tells it from another of the same name: the boot and the network namespace (two
    containers of one machine do not share 127.0.0.1)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:
        boot = namespace = ""
    return [socket.gethostname(), f"{boot} {namespace}"]


def distinct_names(identities: Sequence[Sequence[str]]) -> list[str]:
    """A name for each rank's host; equal names where the host is the same, and only there."""
    keys: dict[str, list[str]] = {}
    names = []
    for name, key in identities:
        known = keys.setdefault(name, [])
        if key not in known:
            known.append(key)
        number = known.index(key)
        names.append(name if number == 0 else f"{name}#{number + 1}")
    return names


def interfaces() -> dict[str, str]:
    """This host's IPv4 addresses and the interface of each."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _ASK_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no address
            found[socket.inet_ntoa(answer[20:24])] = name
    return found


def open_everywhere() -> dict[str, socket.socket]:
    """A listener on each address of this host but loopback: address -> listener."""
    listeners = {}
    for address in interfaces():
        if address.startswith("127."):
            continue
        try:
            listeners[address] = socket.create_server((address, 0))
        except OSError:
            continue
    return listeners


def reach(doors: dict[str, int], timeout: float = 2.0) -> dict[str, str]:
    """Those of the addresses (with ports) that can be reached from here, with this host's interface on the way."""
    mine = interfaces()
    found = {}
    for address, port in doors.items():
        try:
            with socket.create_connection((address, port), timeout) as connection:
                found[address] = mine.get(connection.getsockname()[0], "")
        except OSError:
            continue
    return found


def loopback_interface() -> str:
    """The name of the loopback interface; empty where it is not found."""
    return interfaces().get(LOOPBACK, "")
