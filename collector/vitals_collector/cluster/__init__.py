"""Coordination of several collectors on one PostgreSQL."""
