"""One compilation of each SQL statement per process: the stores of all tests share the results.

SQLAlchemy keeps them per engine, and each test has its own. Compiling took a fifth of the CPU time
of a test with a store.
"""

import functools
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.util import LRUCache

MAX_STATEMENTS = 4_096


@functools.cache
def share_compiled() -> None:
    """Give every later engine the same cache, whose keys hold the dialect: SQLite's are equal."""
    cache: LRUCache[Any, Any] = LRUCache(MAX_STATEMENTS)
    construct = Engine.__init__

    @functools.wraps(construct)
    def construct_sharing(
        self: Engine, *args: Any, execution_options: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        shared = {"compiled_cache": cache, **(execution_options or {})}
        construct(self, *args, execution_options=shared, **options)

    Engine.__init__ = construct_sharing
    SQLiteDialect_pysqlite.__eq__ = lambda self, other: type(self) is type(other)
    SQLiteDialect_pysqlite.__hash__ = lambda self: hash(type(self))
