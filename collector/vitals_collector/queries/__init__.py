"""Queries: runs, curves, steps, decisions, and explanations; read from the store."""
