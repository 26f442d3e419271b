"""Parts of a benchmark whose packages are imported only when they run."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator

from vitals_bench.rows import Row


def later(module: str, function: str) -> Callable[..., Iterator[Row]]:
    """Return a part that imports its module when it is first asked for a row."""

    def measure(**how: object) -> Iterator[Row]:
        yield from getattr(importlib.import_module(module), function)(**how)

    return measure
