"""Updates that may be held back without a trace, and what cannot be guarded."""
