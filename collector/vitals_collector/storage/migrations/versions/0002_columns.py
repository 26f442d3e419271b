"""Columns: what compaction makes of batches."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table of columns; keep PostgreSQL from compressing what is dense already."""
    op.create_table(
        "batch_columns",
        sa.Column("batch_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("encoding", sa.String(length=16), nullable=False),
        sa.Column("base", sa.BigInteger(), nullable=False),
        sa.Column("summary", sa.LargeBinary(), nullable=False),
        sa.Column("marks", sa.LargeBinary(), nullable=False),
        sa.Column("valid", sa.LargeBinary(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["batch_id"],
            ["batches.id"],
            name=op.f("fk_batch_columns_batch_id_batches"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("batch_id", "name", name=op.f("pk_batch_columns")),
    )
    if op.get_bind().dialect.name == "postgresql":
        for table, column in (("batch_columns", "body"), ("batches", "row_bytes")):
            op.execute(f"ALTER TABLE {table} ALTER COLUMN {column} SET STORAGE EXTERNAL")
