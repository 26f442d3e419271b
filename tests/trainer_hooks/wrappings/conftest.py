"""One launch of ranks for each world size: all its cases run there, and each is a test here."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.trainer_hooks.wrappings.cases import main
from tests.trainer_hooks.wrappings.launch import launch
from tests.trainer_hooks.wrappings.models import WRAPPINGS

Found = Callable[[int, str], list[dict[str, Any]]]


@pytest.fixture(scope="package")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return what each rank found for a world size and a wrapping."""
    launched = {
        world: launch(main, world, tmp_path_factory.mktemp(f"ranks{world}")) for world in WRAPPINGS
    }
    return lambda world, name: [rank[name] for rank in launched[world]]
