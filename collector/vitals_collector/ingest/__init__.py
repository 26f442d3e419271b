"""Ingest of batches over HTTP and from directories: checked, placed once, committed together."""
