"""The first version: every table, from ``schema`` as it is now.

So a new database has at once what later versions add; those add it where it is missing.
"""

from alembic import op

from vitals_collector.storage.schema import metadata

revision = "v3"  # v1 and v2 had the rows in tables of their own; before it were 0001 to 0010
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create all tables of the SQL database: the first migration."""
    metadata.create_all(op.get_bind(), checkfirst=False)
