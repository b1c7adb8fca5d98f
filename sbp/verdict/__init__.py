"""From what the ranks held to a verdict. Needs numpy alone: it also runs where there is no torch."""
