"""The command line, and what an agent leaves for it to read."""

from pathlib import Path

from tests.collector.rows import RUN
from trainvitals.cli.main import main
from trainvitals.io.rundir import RunDir
from trainvitals.io.spool import Spool


def vitals(*arguments: object) -> int:
    """Run one command; return its exit code."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


def leave(folder: Path, *parts: bytes) -> None:
    """Leave a run in the folder, as an agent does."""
    spool = Spool(RunDir.create(folder, RUN).agent_dir("a") / "spool", max_bytes=1 << 20, keep=True)
    for part in parts:
        spool.append(part)
    spool.close()
