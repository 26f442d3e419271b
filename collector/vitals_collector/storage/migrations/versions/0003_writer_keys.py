"""Hashes of the keys that writers send with their batches."""

from alembic import op
from sqlalchemy import Column, Text, inspect

revision = "v5"
down_revision = "v4"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column of writer keys to a database of v4; a new one has it."""
    if "writer_key_hash" not in {
        known["name"] for known in inspect(op.get_bind()).get_columns("sources")
    }:
        op.add_column("sources", Column("writer_key_hash", Text, nullable=False, server_default=""))
