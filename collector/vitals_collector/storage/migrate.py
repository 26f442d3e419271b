"""Brings a database to this version's tables, from code: users need no alembic.ini."""

from pathlib import Path

import sqlalchemy
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from trainvitals.errors import StorageError

_LOCK = 0x7669_7461_6C73
"""PostgreSQL advisory lock: two collectors that start at once do so one after the other."""
_OF_BEFORE = frozenset(("v1", "v2", *(f"{number:04}" for number in range(1, 11))))
"""Versions of before the baseline, from which no way leads to it."""


def take_turns(connection: Connection) -> None:
    """Wait until no other collector opens the database; others wait until the transaction ends."""
    if connection.dialect.name == "postgresql":
        connection.execute(sqlalchemy.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})


def migrate(connection: Connection, where: str) -> None:
    """Upgrade the database inside the connection's transaction; nothing to do is cheap.

    Raises:
        StorageError: the database was written by a newer Vitals, or before the baseline.
    """
    take_turns(connection)
    config = migration_config()
    scripts = ScriptDirectory.from_config(config)
    current = MigrationContext.configure(connection).get_current_revision()
    head = scripts.get_current_head()
    if current == head:
        return
    if current in _OF_BEFORE:
        raise StorageError(
            f"{where} has version {current}, of before {scripts.get_base()}; "
            f"this Vitals reads {head}",
            hint="give another --data or --database; a new store imports the run directories that "
            "--folder names",
        )
    if current is not None and current not in {s.revision for s in scripts.walk_revisions()}:
        raise StorageError(
            f"{where} has version {current}; this Vitals knows up to {head}",
            hint="upgrade this program (pip install -U trainvitals), or give another --data",
        )
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def migration_config() -> Config:
    """Return Alembic's configuration for the migrations in this package."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    return config
