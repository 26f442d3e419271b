"""Create or upgrade the tables of a database from code: users need no alembic.ini.

A new database is created from the schema. Alembic is imported only to upgrade an older
database, because the import takes 12 MB of memory.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy
from sqlalchemy import Column, Connection, MetaData, String, Table

from trainvitals.errors import StorageError
from vitals_collector.storage.schema import metadata

if TYPE_CHECKING:
    from alembic.config import Config

NEWEST = "v5"
"""Version of the tables in ``schema``, equal to the last migration."""
_VERSION = Table(
    "alembic_version",  # where Alembic looks
    MetaData(),
    Column("version_num", String(32), primary_key=True),
)
_LOCK = 0x7669_7461_6C73
"""PostgreSQL advisory lock: two collectors that start at once do so one after the other."""
_OF_BEFORE = frozenset(("v1", "v2", *(f"{number:04}" for number in range(1, 11))))
"""Versions from before the baseline, which cannot be upgraded."""


def lock_migrations(connection: Connection) -> None:
    """Lock the SQL database against other collectors until the transaction ends."""
    if connection.dialect.name == "postgresql":
        connection.execute(sqlalchemy.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})


def migrate(connection: Connection, where: str) -> None:
    """Upgrade the SQL database inside the connection's transaction; nothing to do is cheap.

    Raises:
        StorageError: the database was written by a later Vitals, or before the baseline.
    """
    lock_migrations(connection)
    current = _version_of(connection)
    if current is None:
        metadata.create_all(connection, checkfirst=False)
        _VERSION.create(connection, checkfirst=True)
        connection.execute(_VERSION.insert().values(version_num=NEWEST))
    elif current != NEWEST:
        _upgrade(connection, current, where)


def _version_of(connection: Connection) -> str | None:
    """Return the version of the SQL database's tables, or None if the database is new."""
    if not sqlalchemy.inspect(connection).has_table(_VERSION.name):
        return None
    return connection.execute(sqlalchemy.select(_VERSION.c.version_num)).scalar()


def _upgrade(connection: Connection, current: str, where: str) -> None:
    """Run the migrations that a database of an earlier version needs; reject unknown versions."""
    from alembic import command
    from alembic.script import ScriptDirectory

    config = migration_config()
    scripts = ScriptDirectory.from_config(config)
    if current in _OF_BEFORE:
        raise StorageError(
            f"{where} has version {current}, older than {scripts.get_base()}; "
            f"this version of Vitals reads {NEWEST}",
            hint="give another --data or --database; a new store imports the run directories that "
            "--folder names",
        )
    if current not in {s.revision for s in scripts.walk_revisions()}:
        raise StorageError(
            f"{where} has version {current}; this program reads up to {NEWEST}",
            hint="upgrade this program (pip install -U trainvitals), or give another --data",
        )
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def migration_config() -> "Config":
    """Return Alembic's configuration for the migrations of the SQL database."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    return config
