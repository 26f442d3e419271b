"""A bad step kept in a file, and played again: ``vitals repro``."""
