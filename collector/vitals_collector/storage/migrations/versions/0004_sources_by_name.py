"""Sources by name: what an agent says of a rank's process finds the rank without reading all."""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the index."""
    op.create_index("ix_sources_source", "sources", ["run_id", "source"])
