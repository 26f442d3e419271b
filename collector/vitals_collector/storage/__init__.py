"""The store: its tables, the two forms rows lie in, and the way from one to the other."""
