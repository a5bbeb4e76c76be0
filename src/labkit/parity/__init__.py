"""Is the port right; if not, where and why."""
