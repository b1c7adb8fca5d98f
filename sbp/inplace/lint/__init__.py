"""``sbp lint``: in-place operations on distributed tensors, from the source alone."""
