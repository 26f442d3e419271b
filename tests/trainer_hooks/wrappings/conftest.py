"""One launch of ranks for each world size: all its cases run there, and each is a test here."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.trainer_hooks.spawned import spawned
from tests.trainer_hooks.wrappings.cases import main

Found = Callable[[int, str], list[dict[str, Any]]]


@pytest.fixture(scope="package")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return what each rank found for a world size and a wrapping; only those asked for are run."""
    asked: dict[int, dict[str, None]] = {}
    for item in request.session.items:
        if item.path.parent == Path(__file__).parent and "found" in getattr(
            item, "fixturenames", ()
        ):
            params = item.callspec.params  # type: ignore[attr-defined]
            asked.setdefault(params["world"], {})[params["name"]] = None
    launched = {
        world: spawned(
            partial(main, world=world, names=list(names)),
            tmp_path_factory.mktemp("ranks"),
            ranks=world,
        )
        for world, names in asked.items()
    }
    return lambda world, name: [rank[name] for rank in launched[world]]
