"""Every table of the store, once; ``migrations`` carries a database from version to version.

Data that users filter by is in columns; the values of all steps are in ``numbers``. Bodies
(``body``) are msgpack of the record of that name, because JSON has no NaN. Times are nanoseconds
since the Unix epoch. Texts are from users and may contain anything except NUL.

A database returns whatever its disk returns. Each body therefore starts with a CRC-32, written with
it and verified at each read: a damaged body reads as empty and is reported, and the rest of the run
stays readable.
"""

import logging
import threading
import zlib

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.engine.interfaces import Dialect

_LOG = logging.getLogger("vitals.collector.store")
_NAME = "vitals_damage"
_CRC_BYTES = 4
_MAX_TOLD = 4_096


class DamageCounter:
    """Counts damaged pieces found at reads, and logs each of them once."""

    def __init__(self) -> None:
        self.num = 0
        self._reported: set[str] = set()
        self._lock = threading.Lock()

    def attach_to(self, dialect: Dialect) -> None:
        """Make reads of the SQL database with this engine's dialect report damage here."""
        setattr(dialect, _NAME, self)

    def report(self, text: str) -> None:
        """Count and log a damaged record of the SQL database, once."""
        with self._lock:
            if text in self._reported:
                return
            if len(self._reported) >= _MAX_TOLD:
                self._reported.clear()
            self._reported.add(text)
            self.num += 1
        _LOG.error("%s is damaged: it is left out; `vitals store check` says more", text)


def _report_damage(dialect: Dialect, text: str) -> None:
    """Report a damaged record of the SQL database to the counter of its engine, if it has one."""
    damage: DamageCounter | None = getattr(dialect, _NAME, None)
    if damage is not None:
        damage.report(text)


class ChecksummedRecord(TypeDecorator[bytes]):
    """The body of one record, stored after its checksum; a damaged one reads as empty."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: bytes | None, dialect: Dialect) -> bytes | None:
        """Return the bytes to store."""
        return zlib.crc32(value).to_bytes(_CRC_BYTES, "big") + value if value else value

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> bytes | None:
        """Return the body of a record from its SQL column; empty, and reported, if damaged."""
        if not value:
            return value
        if not is_record_whole(value):
            _report_damage(dialect, f"a record ({value[:_CRC_BYTES].hex()})")
            return b""
        return value[_CRC_BYTES:]


def is_record_whole(stored: bytes) -> bool:
    """Return whether the body of a record in the SQL database matches its checksum."""
    return zlib.crc32(stored[_CRC_BYTES:]).to_bytes(_CRC_BYTES, "big") == stored[:_CRC_BYTES]


metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite only auto-increments an INTEGER key.
_ROW_ID = BigInteger().with_variant(Integer, "sqlite")


def _run_id_column(*, primary_key: bool = False, nullable: bool = False) -> Column[str]:
    """Return the column with which a table of the database refers to ``runs``."""
    return Column(
        "run_id", String(26), ForeignKey("runs.run_id"), primary_key=primary_key, nullable=nullable
    )


def _integer_column(name: str, default: int = 0) -> Column[int]:
    """Return an integer column of a table in the SQL database, with a default."""
    return Column(name, BigInteger, nullable=False, default=default, server_default=str(default))


def _text_column(name: str) -> Column[str]:
    """Return a text column of a table in the SQL database, "" by default."""
    return Column(name, Text, nullable=False, default="", server_default="")


runs = Table(
    "runs",
    metadata,
    Column("run_id", String(26), primary_key=True),
    _text_column("name"),
    _text_column("project"),
    _text_column("user_name"),
    _text_column("mode"),
    _integer_column("world_size"),
    _integer_column("started_unix_ns"),
    Column("info", ChecksummedRecord, nullable=False, default=b"", server_default=""),
    _integer_column("info_unix_ns"),
    _integer_column("pinned_unix_ns"),
    _integer_column("num_bytes"),
    _text_column("owner"),
)
"""``info`` is the RunInfo of the newest RunStarted; empty where only rows came so far. A pinned run
is kept whatever its age: 0 where it is not. ``num_bytes`` is what its rows took when they were last
measured, 0 where they were not. ``owner`` is whose token began it, "" where that was the token
file's own."""

attempts = Table(
    "attempts",
    metadata,
    _run_id_column(primary_key=True),
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("parent", BigInteger, nullable=True),
    _integer_column("fork_step"),
    _integer_column("started_unix_ns"),
    _text_column("reason"),
)

sources = Table(
    "sources",
    metadata,
    _run_id_column(primary_key=True),
    Column("incarnation", String(16), primary_key=True),
    Column("source", Text, nullable=False),
    _text_column("node"),
    _integer_column("pid"),
    _integer_column("rank", -1),
    _integer_column("local_rank", -1),
    _integer_column("world_size"),
    _text_column("gpu_uuid"),
    _text_column("metrics_url"),
    _integer_column("started_unix_ns"),
    _integer_column("last_seen_unix_ns"),
    _integer_column("last_received_unix_ns"),
    _integer_column("last_step", -1),
    _integer_column("last_attempt"),
    _integer_column("last_step_unix_ns"),
    Column("loss", Float, nullable=True),
    Column("grad_norm", Float, nullable=True),
    _integer_column("alive", -1),
    _text_column("ended_state"),
    _text_column("ended_reason"),
    _integer_column("ended_unix_ns"),
    _text_column("token_id"),
    _text_column("writer_key_hash"),
    Index("ix_sources_source", "run_id", "source"),
)
"""One incarnation of a rank, a GPU or a node. ``last_received_unix_ns`` is this collector's own
clock, and 0 if the rows were read from a directory. ``alive`` is an agent's latest report of a
rank's process: 1, 0, or -1 without a report. ``token_id`` is the token that created it, "" for the
token file's own: no other token may write to it. ``writer_key_hash`` is the SHA-256 of the key that
its first batch was sent with, "" if it had none: then no key is required."""

streams = Table(
    "streams",
    metadata,
    _run_id_column(primary_key=True),
    Column("incarnation", String(16), primary_key=True),
    Column("stream", String(16), primary_key=True),
    _integer_column("last_seq", -1),
    _integer_column("num_rows"),
    _integer_column("num_lost"),
    _integer_column("expected_seq", -1),
    _integer_column("last_unix_ns"),
)
"""Last stored number of each (run, incarnation, stream), which turns at-least-once into exactly
once. The store of numbers may be ahead of it by unacknowledged rows.

``expected_seq`` is the last number that a spool once held: if it is above ``last_seq``, the end of
the stream is lost, or still to come. ``last_unix_ns`` is when its latest row was written, by the
writer's clock, and at the latest when it was received; 0 if only earlier versions stored rows. It
determines how many rows may be lost until the next one."""

measured_columns = Table(
    "measured_columns",
    metadata,
    _run_id_column(primary_key=True),
    Column("stream", String(16), primary_key=True),
    Column("name", Text, primary_key=True),
)
"""Columns with at least one measured value."""

events = Table(
    "events",
    metadata,
    Column("id", _ROW_ID, primary_key=True),
    _run_id_column(),
    Column("incarnation", String(16), nullable=False),
    Column("source", Text, nullable=False),
    Column("seq", BigInteger, nullable=False),
    _integer_column("time_unix_ns"),
    _integer_column("step"),
    _integer_column("attempt"),
    Column("kind", String(64), nullable=False),
    _text_column("summary"),
    Column("body", ChecksummedRecord, nullable=False),
    UniqueConstraint("run_id", "incarnation", "seq"),
    Index("ix_events_lookup", "run_id", "kind", "time_unix_ns"),
)
"""Every event; ``body`` is msgpack of the tagged ``records.Event``, empty for an unknown type or if
it is damaged, as are those of findings and decisions."""

findings = Table(
    "findings",
    metadata,
    _run_id_column(primary_key=True),
    Column("incarnation", String(16), primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    _integer_column("time_unix_ns"),
    _integer_column("step"),
    _integer_column("attempt"),
    _integer_column("rank", -1),
    _text_column("kind"),
    _text_column("level"),
    _text_column("detector"),
    Column("body", ChecksummedRecord, nullable=False),
    Index("ix_findings_lookup", "run_id", "step"),
)

decisions = Table(
    "decisions",
    metadata,
    _run_id_column(primary_key=True),
    Column("incarnation", String(16), primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    _integer_column("time_unix_ns"),
    _integer_column("ledger_seq"),
    _text_column("action"),
    _integer_column("step"),
    _integer_column("decided_at_step"),
    _integer_column("attempt"),
    _text_column("rule"),
    _text_column("cause"),
    _integer_column("rank", -1),
    Column("acted", Boolean, nullable=False),
    Column("body", ChecksummedRecord, nullable=False),
    Index("ix_decisions_lookup", "run_id", "step"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    _run_id_column(primary_key=True),
    Column("checkpoint_id", String(255), primary_key=True),
    Column("place", String(8), primary_key=True),
    _integer_column("step"),
    _integer_column("attempt"),
    _text_column("state"),
    _integer_column("num_bytes"),
    _text_column("detail"),
    _integer_column("time_unix_ns"),
)
"""The latest state of each; ``place`` is the event's ``where``, a reserved word in SQL."""

names = Table(
    "names",
    metadata,
    _run_id_column(primary_key=True),
    Column("incarnation", String(16), primary_key=True),
    Column("stream", String(16), primary_key=True),
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    _text_column("name"),
)

commands = Table(
    "commands",
    metadata,
    _run_id_column(primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    _text_column("action"),
    _text_column("issued_by"),
    _integer_column("issued_unix_ns"),
    _integer_column("expires_unix_ns"),
    Column("status", String(16), nullable=False),
    _text_column("detail"),
    _integer_column("step", -1),
    _integer_column("updated_unix_ns"),
    Column("body", LargeBinary, nullable=False),
    Index("ix_commands_status", "run_id", "status"),
)
"""``body`` is msgpack of the signed ``records.Command``."""

alerts = Table(
    "alerts",
    metadata,
    Column("fingerprint", String(64), primary_key=True),
    _run_id_column(nullable=True),
    _text_column("name"),
    Column("severity", String(8), nullable=False),
    Column("state", String(16), nullable=False),
    _text_column("summary"),
    _text_column("labels"),
    _integer_column("step", -1),
    _integer_column("started_unix_ns"),
    _integer_column("updated_unix_ns"),
    Column("ended_unix_ns", BigInteger, nullable=True),
    _text_column("acknowledged_by"),
    _integer_column("acknowledged_unix_ns"),
    _integer_column("notified_unix_ns"),
    Column("body", LargeBinary, nullable=False, default=b"", server_default=""),
    Index("ix_alerts_lookup", "run_id", "state"),
)
"""``run_id`` is null where an alert is about no run, ``labels`` is a JSON object, and ``body``
belongs to the engine (its life cycle's state)."""

silences = Table(
    "silences",
    metadata,
    Column("id", _ROW_ID, primary_key=True),
    Column("fingerprint", String(64), nullable=False, index=True),
    _text_column("matchers"),
    _text_column("created_by"),
    _text_column("reason"),
    _integer_column("starts_unix_ns"),
    _integer_column("ends_unix_ns"),
)
"""Silences one alert by its ``fingerprint``; if that is empty, all that match the ``matchers``, a
JSON list of terms such as ``severity=notify`` or ``node=~gpu-1.*``."""

deliveries = Table(
    "deliveries",
    metadata,
    Column("fingerprint", String(64), primary_key=True),
    Column("receiver", String(128), primary_key=True),
    _run_id_column(nullable=True),
    Column("delivery_id", String(32), nullable=False),
    _integer_column("delivered_unix_ns"),
)
"""The latest state of each alert that each receiver has received; the id identifies that state."""

engine_state = Table(
    "engine_state",
    metadata,
    Column("name", String(128), primary_key=True),
    Column("body", LargeBinary, nullable=False),
    _integer_column("updated_unix_ns"),
)
"""Small states that must outlive a restart of the collector, by name."""

audit = Table(
    "audit",
    metadata,
    Column("id", _ROW_ID, primary_key=True),
    _integer_column("time_unix_ns"),
    _text_column("actor"),
    _text_column("action"),
    _text_column("subject"),
    _text_column("detail"),
)
"""Audit log: appended, never changed."""

annotations = Table(
    "annotations",
    metadata,
    Column("id", _ROW_ID, primary_key=True),
    _run_id_column(),
    _integer_column("step"),
    _integer_column("time_unix_ns"),
    _text_column("text"),
    _text_column("written_by"),
    Index("ix_annotations_lookup", "run_id", "step"),
)
"""Notes of users at a step; announcements of the training are events."""

positions = Table(
    "positions",
    metadata,
    Column("spool", Text, primary_key=True),
    Column("position", LargeBinary, nullable=False),
)
"""Ingest position in each spool of a watched directory; written with the rows, in one
transaction."""

tokens = Table(
    "tokens",
    metadata,
    Column("token_id", String(8), primary_key=True),
    Column("hash", String(64), nullable=False, unique=True),
    _text_column("previous_hash"),
    _integer_column("previous_ends_unix_ns"),
    Column("owner", Text, nullable=False),
    Column("scopes", Text, nullable=False),
    _text_column("project"),
    _text_column("run_id"),
    _integer_column("created_unix_ns"),
    _integer_column("expires_unix_ns"),
    _integer_column("revoked_unix_ns"),
)
"""Tokens in addition to the three of the token file. Only the SHA-256 of a secret is stored: a
secret has 256 random bits, so it cannot be guessed. ``scopes`` is a list of names; a token with a
``project`` or ``run_id`` (which may not exist yet) is for those runs only. Rotation keeps the
token: its previous secret is valid until ``previous_ends_unix_ns``. It expires at
``expires_unix_ns``; 0 is never."""

forgotten = Table(
    "forgotten",
    metadata,
    Column("run_id", String(26), primary_key=True),
    _integer_column("forgotten_unix_ns"),
    Column("is_gone", Boolean, nullable=False),
)
"""Runs that were removed: rows of starts before that time are never stored again."""

leases = Table(
    "leases",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("holder", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("expires_unix_ns", BigInteger, nullable=False),
)
"""Leases of several collectors, and their end by the database's clock. ``epoch`` rises with each
change of holder. Empty on SQLite, which has one collector."""
