"""``sbp speed``: forward and backward of some models on one device against each parallel plan, in one run."""
