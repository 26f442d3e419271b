"""A collector with 300 runs at once, within the memory that its unit for systemd allows it."""

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.collector.rows import Writer
from tests.support.collectors import collector, connected
from trainvitals.identity import new_run_id
from trainvitals.io.client import CollectorClient
from trainvitals.views import RunQuestion, RunsQuestion

pytestmark = pytest.mark.slow

NUM_RUNS = 300
NUM_SENDERS = 30
NUM_ROUNDS = 4
LIMIT_MB = 512
"""An eighth of what ``vitals deploy systemd`` gives it."""
GROUPS = Path("/sys/fs/cgroup/memory")


@contextlib.contextmanager
def memory_group(limit_mb: int) -> Iterator[Path]:
    """Give a control group with a limit of memory; skips where this user may not make one."""
    is_first = (GROUPS / "memory.limit_in_bytes").exists()
    root = GROUPS if is_first else GROUPS.parent
    if is_first:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line.split(":")[2] for line in lines if ":memory:" in line)
        root = next((p for p in (GROUPS / own[1:], GROUPS) if p.is_dir()), GROUPS)
    group = root / f"vitals-test-{os.getpid()}"
    limit = "memory.limit_in_bytes" if is_first else "memory.max"
    try:
        group.mkdir()
        (group / limit).write_text(str(limit_mb << 20))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group of memory can be made here: {error}")
    try:
        yield group
    finally:
        group.rmdir()


class Sender(threading.Thread):
    """Sends rows of its runs, as their agents do."""

    def __init__(self, data: Path, writers: list[Writer]) -> None:
        super().__init__()
        self.num_acknowledged = 0
        self._data, self._writers = data, writers

    def run(self) -> None:
        """Send some rows of each run, again and again."""
        with connected(self._data, "ingest") as client:
            for number in range(NUM_ROUNDS):
                for writer in self._writers:
                    self._send(client, writer.steps(range(5 * number, 5 * number + 5), loss=1.0))

    def _send(self, client: CollectorClient, raw: bytes) -> None:
        self.num_acknowledged += client.ingest(raw).num_new


@pytest.mark.timeout(900)
def test_300_runs_are_stored_and_shown_within_the_memory_of_a_control_group(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    writers = [Writer(run=new_run_id(time.time_ns())) for _ in range(NUM_RUNS)]
    with memory_group(LIMIT_MB) as group:

        def start(command: list[str], **options: object) -> subprocess.Popen[str]:
            enter = f'echo $$ > {group}/cgroup.procs; exec "$@"'
            return subprocess.Popen(["sh", "-c", enter, "sh", *command], **options)

        with collector(data, start=start) as process:
            senders = [Sender(data, writers[i::NUM_SENDERS]) for i in range(NUM_SENDERS)]
            for sender in senders:
                sender.start()
            for sender in senders:
                sender.join()
            assert NUM_RUNS * NUM_ROUNDS * 5 == sum(s.num_acknowledged for s in senders)
            check(data, writers)
            assert process.poll() is None
        with collector(data, start=start):  # killed, and started with all of them
            check(data, writers)


def check(data: Path, writers: list[Writer]) -> None:
    """Check that each run is listed, and has its rows once."""
    with connected(data, "read") as client:
        assert {w.identity.run_id for w in writers} == {
            r.run_id for r in client.ask(RunsQuestion())
        }
        for writer in writers[::30]:
            (source,) = client.ask(RunQuestion(run_id=writer.identity.run_id)).sources
            assert (5 * NUM_ROUNDS, 0) == (source.num_rows, source.num_lost_rows)
        assert client.answers()
