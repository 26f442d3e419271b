"""The first version: every table, from ``schema``.

The next one appends what changes, and this one then spells out what it made until then.
"""

from alembic import op

from vitals_collector.storage.schema import metadata

revision = "v1"  # not 0001 to 0010: stores of before the baseline have those
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create all tables; keep PostgreSQL from compressing what is dense already."""
    connection = op.get_bind()
    metadata.create_all(connection, checkfirst=False)
    if connection.dialect.name == "postgresql":
        for table, column in (("batch_columns", "body"), ("batches", "row_bytes")):
            op.execute(f"ALTER TABLE {table} ALTER COLUMN {column} SET STORAGE EXTERNAL")
