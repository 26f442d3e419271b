"""Spools in a directory of runs."""

from pathlib import Path

from tests.collector.rows import RUN
from trainvitals.io.rundir import RunDir
from trainvitals.io.spool import Spool


def spool_of(folder: Path, node: str = "node-a", run: str = RUN) -> Spool:
    where = RunDir.create(folder, run).agent_dir(node) / "spool"
    return Spool(where, max_bytes=1 << 24, keep=True, file_bytes=4_096)
