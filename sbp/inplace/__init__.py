"""In-place operations on distributed tensors: the table of what mutates, the watch, the lint."""
