"""Promises: how far a spool once held each stream, so that a lost end is counted."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; of what is stored nothing is promised."""
    op.add_column(
        "streams",
        sa.Column("promised_seq", sa.BigInteger(), server_default="-1", nullable=False),
    )
