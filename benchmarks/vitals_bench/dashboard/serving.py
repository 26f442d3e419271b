"""A long run in a collector's store, and the programs that show it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from trainvitals.io.client import CollectorClient, CollectorTokens, read_tokens
from vitals_bench.dashboard import bare_page
from vitals_bench.processes import Started, free_port
from vitals_bench.query.filling import Filling, Size
from vitals_collector.storage.store import open_data_store
from vitals_dashboard import launch

NAMES = (
    *("loss", "grad_norm", "loss_limit", "grad_norm_limit", "grad_norm_clipped", "learning_rate"),
    *("tokens_per_second", "mfu_ratio", "step_duration_seconds", "data_wait_seconds"),
    *("forward_backward_seconds", "optimizer_seconds", "rank_loss", "loss_scale"),
)
"""The metrics that the run page has charts of."""
FULL = Size(num_steps=1_000_000, num_metrics=len(NAMES), num_ranks=8, rounds=9)
_CAUGHT_UP_SECONDS = 300.0
QUICK = Size(num_steps=100_000, num_metrics=len(NAMES), num_ranks=8, rounds=2)


class Serving:
    """A collector over the run, and the dashboard over the collector."""

    def __init__(
        self,
        filling: Filling,
        url: str,
        tokens: CollectorTokens,
        address: str,
        processes: list[int],
    ) -> None:
        self.filling, self.url, self._tokens = filling, url, tokens
        self._address, self._processes = address, [psutil.Process(pid) for pid in processes]
        self.num_more = 0

    @property
    def run_page(self) -> str:
        """The address of the run's page, with the way in."""
        base, _, token = self._address.partition("/?")
        return f"{base}/run?run={self.filling.run_id}&{token}"

    def client(self) -> CollectorClient:
        """Return a client that may read."""
        return CollectorClient(self.url, self._tokens.read, timeout=60.0)

    def train(self) -> None:
        """Store one more step, so that nothing that was asked for is still as it was."""
        with CollectorClient(self.url, self._tokens.ingest, timeout=60.0) as client:
            client.ingest(self.filling.one_more(self.num_more))
        self.num_more += 1

    def cpu_seconds(self) -> float:
        """Return the CPU time of collector and dashboard so far."""
        return float(sum(t.user + t.system for t in (p.cpu_times() for p in self._processes)))


@contextmanager
def serve(folder: Path, size: Size) -> Iterator[Serving]:
    """Fill a store with the run, and show it as `vitals collector` and `vitals dashboard` do."""
    filling, data = Filling(size, NAMES), folder / "data"
    store = open_data_store(data)
    try:
        filling.fill(store)
    finally:
        store.close()
    port = free_port()
    listen = ("--data", str(data), "--listen", f"127.0.0.1:{port}", "--allow-plain")
    command = [sys.executable, "-m", "trainvitals", "collector", *listen]
    with Started("collector", command, folder) as collector:
        collector.wait_for(lambda: answers(f"http://127.0.0.1:{port}/healthz"), 180.0)
        collector.settle(_CAUGHT_UP_SECONDS)  # it looks at all that was stored before it started
        place = launch.locate_collector(data, "")
        with launch.run_page_server(place, launch.free_port(0), os.environ) as pages:
            pids = [collector.popen.pid, pages.program.process.pid]
            yield Serving(filling, place.url, read_tokens(place.token_file), pages.address, pids)


@contextmanager
def bare(folder: Path, num_charts: int) -> Iterator[str]:
    """Give the address of a Streamlit page with so many charts of little data."""
    port = free_port()
    command = launch.streamlit_command(port)
    command[command.index("run") + 1] = bare_page.__file__
    with Started("bare", [*command, "--", str(num_charts)], folder) as started:
        address = f"http://127.0.0.1:{port}"
        started.wait_for(lambda: answers(f"{address}/_stcore/health"))
        yield address


def answers(url: str) -> bool:
    """Return whether the server at this address answers."""
    try:
        return httpx.get(url, timeout=2.0, trust_env=False).is_success
    except httpx.HTTPError:
        return False
