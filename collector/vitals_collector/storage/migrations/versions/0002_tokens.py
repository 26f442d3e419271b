"""Tokens, and what they began."""

from alembic import op
from sqlalchemy import BigInteger, Column, Text, inspect

from vitals_collector.storage.schema import tokens

revision = "v4"
down_revision = "v3"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the tables and columns of tokens to a database of v3; a new one has them."""
    bind = op.get_bind()
    tokens.create(bind, checkfirst=True)
    for table, column in (
        ("runs", Column("owner", Text, nullable=False, server_default="")),
        ("sources", Column("token_id", Text, nullable=False, server_default="")),
        ("streams", Column("last_unix_ns", BigInteger, nullable=False, server_default="0")),
    ):
        if column.name not in {known["name"] for known in inspect(bind).get_columns(table)}:
            op.add_column(table, column)
