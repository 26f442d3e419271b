"""Stores and collectors, as the tests of the collector have them."""

from tests.collector.conftest import (
    fresh_data,
    fresh_database,
    postgres,
    postgres_server,
    run_dir,
    served,
    store,
    tmp_path,
)

__all__ = [
    "fresh_data",
    "fresh_database",
    "postgres",
    "postgres_server",
    "run_dir",
    "served",
    "store",
    "tmp_path",
]
