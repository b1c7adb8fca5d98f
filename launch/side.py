"""A side process as a fresh interpreter: ``python -m launch.side SOCKET OUTPUT ENTRY ARGUMENT``."""

from __future__ import annotations

import os
import socket
import sys

from launch.process import die_with_parent
from launch.warm import run_side
from launch.wire import decode


def main() -> None:
    die_with_parent()
    os.setsid()
    sock, output = int(sys.argv[1]), int(sys.argv[2])
    os.dup2(output, 1)
    os.dup2(output, 2)
    run_side(socket.socket(fileno=sock), sys.argv[3], decode(bytes.fromhex(sys.argv[4])))


if __name__ == "__main__":
    main()
