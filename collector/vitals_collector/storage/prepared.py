"""Runs a statement for many rows at the price of the driver's own ``executemany``.

SQLAlchemy builds and compiles the statement, once for each dialect. What it would do for each row
beyond that (dictionaries, defaults, type conversions that change nothing here) costs several times
what the database takes for the row, and this is where every row of every rank comes by.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Insert, Update
from sqlalchemy.dialects.postgresql.base import PGDialect
from sqlalchemy.dialects.sqlite.base import SQLiteDialect
from sqlalchemy.engine.interfaces import Dialect

_DIALECTS: dict[str, Dialect] = {
    "sqlite": SQLiteDialect(paramstyle="qmark"),
    "postgresql": PGDialect(paramstyle="format"),  # type: ignore[no-untyped-call]
}


class Prepared:
    """An INSERT or UPDATE with values by position, in the order of ``names``.

    Args:
        statement: the statement, or what makes it for a dialect's name.
        names: its parameters: columns of an INSERT, ``bindparam`` names of an UPDATE.
    """

    def __init__(
        self, statement: Insert | Update | Callable[[str], Insert | Update], names: Sequence[str]
    ) -> None:
        self._statement = statement
        self._names = tuple(names)
        self._compiled = lru_cache(self._compile)

    def execute(self, connection: Connection, rows: Sequence[tuple[Any, ...]]) -> None:
        """Run it for each row; nothing happens where there is none."""
        if not rows:
            return
        sql, order = self._compiled(connection.dialect.name)
        connection.exec_driver_sql(sql, rows if order is None else [order(row) for row in rows])

    def _compile(self, dialect: str) -> tuple[str, Callable[[tuple[Any, ...]], Any] | None]:
        made = self._statement
        statement = made(dialect) if callable(made) else made
        keys = self._names if isinstance(statement, Insert) else None
        compiled = statement.compile(dialect=_DIALECTS[dialect], column_keys=keys)
        places = [self._names.index(name) for name in compiled.positiontup or ()]
        return str(compiled), None if places == [*range(len(self._names))] else itemgetter(*places)


__all__ = ["Prepared"]
