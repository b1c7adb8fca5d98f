"""Where a failed trial goes wrong first: it is run again with every step recorded on both sides."""
