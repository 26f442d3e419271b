"""The first version: every table.

A migration says what it made at the time, so it does not read ``schema``; a test compares the two.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create all tables, those that others refer to first."""
    _create_audit()
    _create_engine_state()
    _create_positions()
    _create_row_schemas()
    _create_runs()
    _create_silences()
    _create_alerts()
    _create_attempts()
    _create_batches()
    _create_checkpoints()
    _create_commands()
    _create_decisions()
    _create_events()
    _create_findings()
    _create_measured_columns()
    _create_names()
    _create_sources()
    _create_streams()


def _create_audit() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("time_unix_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("actor", sa.Text(), server_default="", nullable=False),
        sa.Column("action", sa.Text(), server_default="", nullable=False),
        sa.Column("subject", sa.Text(), server_default="", nullable=False),
        sa.Column("detail", sa.Text(), server_default="", nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )


def _create_engine_state() -> None:
    op.create_table(
        "engine_state",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("updated_unix_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_engine_state")),
    )


def _create_positions() -> None:
    op.create_table(
        "positions",
        sa.Column("spool", sa.Text(), nullable=False),
        sa.Column("position", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("spool", name=op.f("pk_positions")),
    )


def _create_row_schemas() -> None:
    op.create_table(
        "row_schemas",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_row_schemas")),
    )


def _create_runs() -> None:
    op.create_table(
        "runs",
        sa.Column("run_id", sa.String(length=26), nullable=False),
        sa.Column("name", sa.Text(), server_default="", nullable=False),
        sa.Column("project", sa.Text(), server_default="", nullable=False),
        sa.Column("user_name", sa.Text(), server_default="", nullable=False),
        sa.Column("mode", sa.Text(), server_default="", nullable=False),
        sa.Column("world_size", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("started_unix_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("info", sa.LargeBinary(), server_default="", nullable=False),
        sa.Column("info_unix_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_runs")),
    )


def _create_silences() -> None:
    op.create_table(
        "silences",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("created_by", sa.Text(), server_default="", nullable=False),
        sa.Column("reason", sa.Text(), server_default="", nullable=False),
        sa.Column("starts_unix_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("ends_unix_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_silences")),
    )
    op.create_index(op.f("ix_silences_fingerprint"), "silences", ["fingerprint"], unique=False)


def _create_alerts() -> None:
    op.create_table(
        "alerts",
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("run_id", sa.String(length=26), nullable=False),
        sa.Column("name", sa.Text(), server_default="", nullable=False),
        sa.Column("severity", sa.String(length=8), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("summary", sa.Text(), server_default="", nullable=False),
        sa.Column("labels", sa.Text(), server_default="", nullable=False),
        sa.Column("step", sa.BigInteger(), server_default="-1", nullable=False),
        sa.Column("started_unix_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("updated_unix_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("ended_unix_ns", sa.BigInteger(), nullable=True),
        sa.Column("acknowledged_by", sa.Text(), server_default="", nullable=False),
        sa.Column("acknowledged_unix_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("notified_unix_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("body", sa.LargeBinary(), server_default="", nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_alerts_run_id_runs")),
        sa.PrimaryKeyConstraint("fingerprint", name=op.f("pk_alerts")),
    )
    op.create_index("ix_alerts_lookup", "alerts", ["run_id", "state"], unique=False)


def _create_attempts() -> None:
    op.create_table(
        "attempts",
        sa.Column("run_id", sa.String(length=26), nullable=False),
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("parent", sa.BigInteger(), nullable=True),
        sa.Column("fork_step", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("started_unix_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("reason", sa.Text(), server_default="", nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_attempts_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "id", name=op.f("pk_attempts")),
    )


def _create_batches() -> None:
    op.create_table(
        "batches",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("run_id", sa.String(length=26), nullable=False),
        sa.Column("incarnation", sa.String(length=16), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("stream", sa.String(length=16), nullable=False),
        sa.Column("schema_digest", sa.String(length=64), nullable=False),
        sa.Column("first_seq", sa.BigInteger(), nullable=False),
        sa.Column("num_rows", sa.BigInteger(), nullable=False),
        sa.Column("min_step", sa.BigInteger(), nullable=False),
        sa.Column("max_step", sa.BigInteger(), nullable=False),
        sa.Column("min_attempt", sa.BigInteger(), nullable=False),
        sa.Column("max_attempt", sa.BigInteger(), nullable=False),
        sa.Column("min_time_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("max_time_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("clock_offset_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("row_bytes", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_batches_run_id_runs")),
        sa.ForeignKeyConstraint(
            ["schema_digest"],
            ["row_schemas.digest"],
            name=op.f("fk_batches_schema_digest_row_schemas"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
        sa.UniqueConstraint(
            "run_id",
            "incarnation",
            "stream",
            "first_seq",
            name=op.f("uq_batches_run_id_incarnation_stream_first_seq"),
        ),
    )
    op.create_index(
        "ix_batches_lookup",
        "batches",
        ["run_id", "stream", "source", "min_step", "max_step"],
        unique=False,
    )


def _create_checkpoints() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("run_id", sa.String(length=26), nullable=False),
        sa.Column("checkpoint_id", sa.String(length=255), nullable=False),
        sa.Column("place", sa.String(length=8), nullable=False),
        sa.Column("step", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("attempt", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("state", sa.Text(), server_default="", nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("detail", sa.Text(), server_default="", nullable=False),
        sa.Column("time_unix_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.run_id"], name=op.f("fk_checkpoints_run_id_runs")
        ),
        sa.PrimaryKeyConstraint("run_id", "checkpoint_id", "place", name=op.f("pk_checkpoints")),
    )


def _create_commands() -> None:
    op.create_table(
        "commands",
        sa.Column("run_id", sa.String(length=26), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("action", sa.Text(), server_default="", nullable=False),
        sa.Column("issued_by", sa.Text(), server_default="", nullable=False),
        sa.Column("issued_unix_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("expires_unix_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("detail", sa.Text(), server_default="", nullable=False),
        sa.Column("step", sa.BigInteger(), server_default="-1", nullable=False),
        sa.Column("updated_unix_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_commands_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "number", name=op.f("pk_commands")),
    )
    op.create_index("ix_commands_status", "commands", ["run_id", "status"], unique=False)


def _create_decisions() -> None:
    op.create_table(
        "decisions",
        sa.Column("run_id", sa.String(length=26), nullable=False),
        sa.Column("incarnation", sa.String(length=16), nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("time_unix_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("ledger_seq", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("action", sa.Text(), server_default="", nullable=False),
        sa.Column("step", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("decided_at_step", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("attempt", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("rule", sa.Text(), server_default="", nullable=False),
        sa.Column("cause", sa.Text(), server_default="", nullable=False),
        sa.Column("rank", sa.BigInteger(), server_default="-1", nullable=False),
        sa.Column("acted", sa.Boolean(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_decisions_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "incarnation", "seq", name=op.f("pk_decisions")),
    )
    op.create_index("ix_decisions_lookup", "decisions", ["run_id", "step"], unique=False)


def _create_events() -> None:
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("run_id", sa.String(length=26), nullable=False),
        sa.Column("incarnation", sa.String(length=16), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("time_unix_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("step", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("attempt", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("summary", sa.Text(), server_default="", nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_events_run_id_runs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
        sa.UniqueConstraint(
            "run_id", "incarnation", "seq", name=op.f("uq_events_run_id_incarnation_seq")
        ),
    )
    op.create_index("ix_events_lookup", "events", ["run_id", "kind", "time_unix_ns"], unique=False)


def _create_findings() -> None:
    op.create_table(
        "findings",
        sa.Column("run_id", sa.String(length=26), nullable=False),
        sa.Column("incarnation", sa.String(length=16), nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("time_unix_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("step", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("attempt", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("rank", sa.BigInteger(), server_default="-1", nullable=False),
        sa.Column("kind", sa.Text(), server_default="", nullable=False),
        sa.Column("level", sa.Text(), server_default="", nullable=False),
        sa.Column("detector", sa.Text(), server_default="", nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_findings_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "incarnation", "seq", name=op.f("pk_findings")),
    )
    op.create_index("ix_findings_lookup", "findings", ["run_id", "step"], unique=False)


def _create_measured_columns() -> None:
    op.create_table(
        "measured_columns",
        sa.Column("run_id", sa.String(length=26), nullable=False),
        sa.Column("stream", sa.String(length=16), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.run_id"], name=op.f("fk_measured_columns_run_id_runs")
        ),
        sa.PrimaryKeyConstraint("run_id", "stream", "name", name=op.f("pk_measured_columns")),
    )


def _create_names() -> None:
    op.create_table(
        "names",
        sa.Column("run_id", sa.String(length=26), nullable=False),
        sa.Column("incarnation", sa.String(length=16), nullable=False),
        sa.Column("stream", sa.String(length=16), nullable=False),
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), server_default="", nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_names_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "incarnation", "stream", "id", name=op.f("pk_names")),
    )


def _create_sources() -> None:
    op.create_table(
        "sources",
        sa.Column("run_id", sa.String(length=26), nullable=False),
        sa.Column("incarnation", sa.String(length=16), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), server_default="", nullable=False),
        sa.Column("pid", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("rank", sa.BigInteger(), server_default="-1", nullable=False),
        sa.Column("local_rank", sa.BigInteger(), server_default="-1", nullable=False),
        sa.Column("world_size", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("gpu_uuid", sa.Text(), server_default="", nullable=False),
        sa.Column("started_unix_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("last_seen_unix_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("last_received_unix_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("last_step", sa.BigInteger(), server_default="-1", nullable=False),
        sa.Column("last_attempt", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("last_step_unix_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("loss", sa.Float(), nullable=True),
        sa.Column("grad_norm", sa.Float(), nullable=True),
        sa.Column("alive", sa.BigInteger(), server_default="-1", nullable=False),
        sa.Column("ended_state", sa.Text(), server_default="", nullable=False),
        sa.Column("ended_reason", sa.Text(), server_default="", nullable=False),
        sa.Column("ended_unix_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_sources_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "incarnation", name=op.f("pk_sources")),
    )


def _create_streams() -> None:
    op.create_table(
        "streams",
        sa.Column("run_id", sa.String(length=26), nullable=False),
        sa.Column("incarnation", sa.String(length=16), nullable=False),
        sa.Column("stream", sa.String(length=16), nullable=False),
        sa.Column("last_seq", sa.BigInteger(), server_default="-1", nullable=False),
        sa.Column("num_rows", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("num_lost", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("schema_digest", sa.Text(), server_default="", nullable=False),
        sa.Column("measured", sa.Text(), server_default="", nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_streams_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "incarnation", "stream", name=op.f("pk_streams")),
    )
