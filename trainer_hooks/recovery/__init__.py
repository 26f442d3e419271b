"""States for rollbacks, in memory and on disk, and their restore."""
