"""Volumes: how far runs were thinned, and which were removed."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables of what was thinned and of what was forgotten; let runs be pinned."""
    for name in ("pinned_unix_ns", "num_bytes"):
        op.add_column("runs", sa.Column(name, sa.BigInteger(), server_default="0", nullable=False))
    op.create_table(
        "thinned_to",
        _run_id(),
        sa.Column("incarnation", sa.String(length=16), nullable=False),
        sa.Column("stream", sa.String(length=16), nullable=False),
        sa.Column("last_seq", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.run_id"], name=op.f("fk_thinned_to_run_id_runs")
        ),
        sa.PrimaryKeyConstraint("run_id", "incarnation", "stream", name=op.f("pk_thinned_to")),
    )
    op.create_table(
        "thinned",
        _run_id(),
        sa.Column("stream", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=8), nullable=False),
        sa.Column("num_rows", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("to_step", sa.BigInteger(), server_default="-1", nullable=False),
        sa.Column("to_unix_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("updated_unix_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_thinned_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "stream", "reason", name=op.f("pk_thinned")),
    )
    op.create_table(
        "forgotten",
        _run_id(),
        sa.Column("forgotten_unix_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("is_gone", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_forgotten")),
    )


def _run_id() -> sa.Column[str]:
    return sa.Column("run_id", sa.String(length=26), nullable=False)
