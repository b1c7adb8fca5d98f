"""launch: ranks as processes. Finds or starts them, keeps a worker alive for each, notices hangs and deaths."""
