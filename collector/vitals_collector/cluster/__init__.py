"""Several collectors on one PostgreSQL: which of them does what only one may do."""
