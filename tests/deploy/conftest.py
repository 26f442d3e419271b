"""Marks the tests that start programs: they run in `make test-nightly`."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
QUICK = "test_generated_files.py"
"""Each file is valid to its own checker: a second in all."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to `make test` what needs no server and no checker, and the quick checks."""
    for item in items:
        is_here = item.path.parent == HERE and item.path.name != QUICK
        if is_here and item.get_closest_marker("servers") is not None:
            item.add_marker(pytest.mark.nightly)
