"""Checksums: a bit that flips in a stored body is noticed, and its rows are left out."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_CHECKSUMS = ("head_crc", "body_crc")
_COLUMNS = (
    "batch_id, name, kind, encoding, base, summary, marks, valid, body"  # as they were before
)


def upgrade() -> None:
    """Add the columns; what is stored has no checksum."""
    op.add_column("batches", sa.Column("row_crc", sa.BigInteger(), nullable=True))
    if op.get_bind().dialect.name == "postgresql":
        for name in _CHECKSUMS:
            op.add_column("batch_columns", sa.Column(name, sa.BigInteger(), nullable=True))
        return
    # SQLite reads a row from its beginning: an overview must not go through the body to its sum.
    op.rename_table("batch_columns", "batch_columns_before")
    op.create_table(
        "batch_columns",
        sa.Column("batch_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=True) for name in _CHECKSUMS),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("encoding", sa.String(length=16), nullable=False),
        sa.Column("base", sa.BigInteger(), nullable=False),
        *(
            sa.Column(name, sa.LargeBinary(), nullable=False)
            for name in ("summary", "marks", "valid", "body")
        ),
        sa.ForeignKeyConstraint(
            ["batch_id"],
            ["batches.id"],
            name=op.f("fk_batch_columns_batch_id_batches"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("batch_id", "name", name=op.f("pk_batch_columns")),
    )
    op.execute(
        f"INSERT INTO batch_columns ({_COLUMNS}) SELECT {_COLUMNS} FROM batch_columns_before"
    )
    op.drop_table("batch_columns_before")
