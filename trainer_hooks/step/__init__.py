"""One guarded step: the order of its parts, its features, and the actions that follow."""
