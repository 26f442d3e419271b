"""Start, files and end of a guarded loop."""
