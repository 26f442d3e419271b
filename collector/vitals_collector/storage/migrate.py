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
"""PostgreSQL advisory lock: two collectors that start at once migrate one after the other."""


def migrate(connection: Connection, where: str) -> None:
    """Upgrade the database inside the connection's transaction; nothing to do is cheap.

    Raises:
        StorageError: the database was written by a newer Vitals.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(sqlalchemy.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    config = migration_config()
    scripts = ScriptDirectory.from_config(config)
    current = MigrationContext.configure(connection).get_current_revision()
    if current == scripts.get_current_head():
        return
    if current is not None and current not in {s.revision for s in scripts.walk_revisions()}:
        raise StorageError(
            f"{where} has version {current}; this Vitals knows up to {scripts.get_current_head()}",
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
