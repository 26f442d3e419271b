"""Removals: up to which batch a removed run's rows go, so that they can go little by little."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; of runs whose removal was begun before, the next one begins anew."""
    op.add_column(
        "forgotten", sa.Column("last_batch", sa.BigInteger(), server_default="0", nullable=False)
    )
