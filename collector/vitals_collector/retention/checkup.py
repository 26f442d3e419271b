"""Reads everything with a checksum and lists damage; reports the size of a store."""

from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import Connection, LargeBinary, Table, func, select, type_coerce

from vitals_collector.numbers.lake import Lake
from vitals_collector.storage.schema import ChecksummedRecord, is_record_whole, metadata
from vitals_collector.storage.store import Store


class DamagedPart(NamedTuple):
    """A file of rows, or the records of a table, that are damaged."""

    what: str
    num_rows: int
    run_ids: tuple[str, ...]
    """Runs that it may belong to; empty if unknown."""


@dataclass(frozen=True, slots=True)
class StoreSize:
    """Size of the database and of the rows."""

    where: str
    num_bytes: int
    num_free: int
    """Free bytes inside the database file."""


def check_store(store: Store) -> list[DamagedPart]:
    """Read every file of rows, every record, and run SQLite's integrity check.

    Raises:
        StorageError: the database cannot be read at all.
    """
    damaged = []
    with store.read_transaction() as connection:
        if connection.dialect.name == "sqlite":
            report_rows = connection.exec_driver_sql("PRAGMA quick_check(20)")
            lines = [str(row[0]) for row in report_rows]
            damaged += [DamagedPart(line, 0, ()) for line in lines if line != "ok"]
        for table in metadata.sorted_tables:
            if num := _num_damaged(connection, table):
                damaged.append(DamagedPart(f"records in {table.name}", num, ()))
    if isinstance(store.numbers, Lake):
        files = store.numbers.check()
        damaged += [DamagedPart(file.path, file.num_rows, file.run_ids) for file in files]
    return damaged


def _num_damaged(connection: Connection, table: Table) -> int:
    """Return the number of a table's rows with a damaged record, for the check of the store."""
    records = [
        type_coerce(column, LargeBinary)
        for column in table.columns
        if isinstance(column.type, ChecksummedRecord)
    ]
    if not records:
        return 0
    return sum(
        not all(is_record_whole(stored) for stored in row if stored)
        for row in connection.execute(select(*records))
    )


def store_size(store: Store) -> StoreSize:
    """Return the size of the database and of the rows on the store's disks."""
    lake = store.numbers.size() if isinstance(store.numbers, Lake) else 0
    with store.read_transaction() as connection:
        if connection.dialect.name == "sqlite":
            page, pages, free = (
                int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
                for name in ("page_size", "page_count", "freelist_count")
            )
            return StoreSize(store.where, page * pages + lake, page * free)
        size = connection.execute(select(func.pg_database_size(func.current_database())))
        return StoreSize(store.where, int(size.scalar_one()) + lake, 0)
