"""``python -m sbp.speed``: what each rank of ``sbp speed`` is started as."""

import sys

from sbp.speed.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
