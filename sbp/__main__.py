"""``python -m sbp``: the same as the console script."""

import sys

from sbp.cli import main

sys.exit(main())
