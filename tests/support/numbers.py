"""An empty lake, and what a store of numbers holds."""

import shutil
import tempfile
from functools import cache
from pathlib import Path

from tests.collector.numbers.written import RUN
from trainvitals.rows import Value
from vitals_collector.numbers.interface import (
    ColumnValues,
    NumberStore,
    RowSpan,
)
from vitals_collector.numbers.lake import Lake

STEPS = RowSpan(RUN, "steps")


def plain(column: ColumnValues) -> list[Value | str]:
    """Return the values, None where one is missing."""
    pairs = zip(column.values.tolist(), column.is_missing.tolist(), strict=True)
    return [None if is_missing else value for value, is_missing in pairs]


def losses(numbers: NumberStore, span: RowSpan = STEPS) -> list[Value | str]:
    """Return the run's losses."""
    return plain(numbers.scan(span, ["loss"])["loss"])


def new_lake(folder: Path) -> Lake:
    """Return an empty lake: a copy, because to make one takes twice as long as to open it."""
    assert not (folder / "catalogue.sqlite").exists()
    shutil.copytree(_template().name, folder, dirs_exist_ok=True)
    return Lake(folder)


@cache
def _template() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory()
    Lake(Path(folder.name)).close()
    return folder
