"""How a guarded loop begins, where its files are, and how it ends."""
