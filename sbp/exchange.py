"""How ranks that torchrun or Slurm started find each other: through the store whose address they were given."""

from __future__ import annotations

import datetime
import socket
from typing import Any

from torch.distributed import PrefixStore, TCPStore

_KEY = "channel"


def share(argument: dict[str, Any], connection: Any) -> None:
    """What launch runs on each rank; see ``exchange`` of launch.Settings. Ends when the connection is closed."""
    patience = datetime.timedelta(seconds=100)
    first, address, port = argument["rank"] == 0, argument["address"], argument["port"]
    holds = first and not argument["served"]
    options: dict[str, Any] = {}
    if holds:
        # Else the store would listen on all of the host's addresses.
        listener = socket.create_server((socket.gethostbyname(address), port))
        options["master_listen_fd"] = listener.detach()
    store = TCPStore(address, port, is_master=holds, wait_for_workers=False, timeout=patience, **options)
    shared = PrefixStore("sbp/launch", store)
    if first:
        shared.set(_KEY, argument["text"])
        connection.send("told")
    else:
        connection.send(shared.get(_KEY).decode())
    connection.receive()  # the first rank's holds the store until all have come
