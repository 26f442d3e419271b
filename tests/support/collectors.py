"""A collector in a process of its own."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.forked import COMMANDS
from trainvitals.io.client import (
    CollectorClient,
    collector_on,
    open_collector_client,
)

COMMAND = [sys.executable, "-m", "vitals_collector", "collector"]


@contextlib.contextmanager
def collector(
    data: Path, *options: str, start: Any = COMMANDS.Popen
) -> Iterator[subprocess.Popen[str]]:
    """A collector in a process of its own, answering; killed at the end if it still runs."""
    process = start([*COMMAND, "--data", str(data), *options], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = []  # on a full disk a warning comes before the address
        said_address = (
            "vitals collector: https://127.0.0.1:",
            "vitals collector: http://127.0.0.1:",
        )
        while not (said and said[-1].startswith(said_address)):
            said.append(process.stderr.readline())
            assert said[-1], said
        yield process
    finally:
        process.kill()
        process.communicate()


def connected(data: Path, scope: str) -> CollectorClient:
    found = collector_on(data)
    assert found is not None
    return open_collector_client(found, scope)
