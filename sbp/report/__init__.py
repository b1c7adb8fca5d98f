"""What people and CI read. Each format is a pure function of the results file; nothing here imports torch."""
