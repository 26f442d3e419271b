"""Cost of a verified collector: ingest by its socket and by TLS, compared with HTTP."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from trainvitals.identity import new_run_id
from trainvitals.io.client import (
    CollectorAddress,
    collector_on,
    read_collector_file,
    read_tokens,
)
from trainvitals.io.server_identity import UNPROVEN
from vitals_agent.collector_endpoint import AgentClient
from vitals_bench.ingest.asked import Asked
from vitals_bench.ingest.records import RANKS_PER_NODE, SCHEMA, Numbers, Writers
from vitals_bench.ingest.servers import collector
from vitals_bench.processes import Started
from vitals_bench.rows import Row, ratio_at_most

_BODY_BYTES = 65_536
_NUM_STEPS = _BODY_BYTES // (RANKS_PER_NODE * SCHEMA.row_size)
_NUM_CLIENTS = 32
"""Agents at once: one alone would wait for a commit after each body."""
_LIMITS = {"socket": 1.1, "TLS": 1.6}


@dataclass
class _Way:
    """One way to a collector, and agents that keep their connections."""

    started: Started
    agents: Sequence[AgentClient]
    writers: Sequence[Writers]
    num_posted: int = 0

    def cpu_seconds(self) -> float:
        return time.process_time() + self.started.cpu_seconds()

    def post(self, bodies: Sequence[Sequence[Sequence[bytes]]]) -> float:
        """Post each agent's bodies; return the CPU seconds of client and server for one."""

        def send(which: int) -> None:
            for body in bodies[which]:
                self.agents[which].ingest_all(body)

        before = self.cpu_seconds()
        with ThreadPoolExecutor(_NUM_CLIENTS) as threads:
            list(threads.map(send, range(_NUM_CLIENTS)))
        used = self.cpu_seconds() - before
        return used / sum(map(len, bodies))

    def bodies(self, num: int) -> list[list[list[bytes]]]:
        """Return so many bodies for each agent, with the steps that come next."""
        numbers = Numbers(RANKS_PER_NODE)
        first = self.num_posted * _NUM_STEPS
        self.num_posted += num
        blocks = [
            numbers.block(first + i * _NUM_STEPS, _NUM_STEPS, begin_ns=time.time_ns(), step_ns=1)
            for i in range(num)
        ]
        return [[writers.batches(block) for block in blocks] for writers in self.writers]


def measure_transport(*, quick: bool, asked: Asked = Asked()) -> Iterator[Row]:  # noqa: B008 - frozen
    """Yield the CPU of a body of 64 kB, of agent and collector together, by each way."""
    num_rounds, num_bodies = (3, 4) if quick else (9, 10)
    with TemporaryDirectory(prefix="vitals-bench-") as name, ExitStack() as leave:
        ways = _ways(Path(name), leave)
        used: dict[str, list[float]] = {way: [] for way in ways}
        for way in ways.values():
            way.post(way.bodies(1))  # connected, and its tables are made
        for _ in range(num_rounds):
            for label, way in ways.items():
                used[label].append(way.post(way.bodies(num_bodies)))
    plain = used.pop("HTTP")
    for label, seconds in used.items():
        ratios = [ours / theirs for ours, theirs in zip(seconds, plain, strict=True)]
        theirs = statistics.median(plain)
        yield Row(
            name=f"CPU of a body of 64 kB by {label}",
            ours=1e3 * theirs * statistics.median(ratios),
            unit="ms",
            peer="plain HTTP",
            theirs=1e3 * theirs,
            goal=ratio_at_most(_LIMITS[label]),
            spread=(max(ratios) - min(ratios)) / 2,
            note=f"agent and collector together, {_NUM_CLIENTS} agents at once, commits included; "
            f"median of {num_rounds} rounds in turn",
        )


def _ways(folder: Path, leave: ExitStack) -> Mapping[str, _Way]:
    # Each has a collector of its own: what one has stored is merged while the next is asked.
    plain, url, tokens_file = leave.enter_context(collector(folder / "plain"))
    local, _, local_file = leave.enter_context(collector(folder / "socket", plain=False))
    remote, _, remote_file = leave.enter_context(collector(folder / "tls", plain=False))
    here, there = collector_on(local_file.parent), read_collector_file(remote_file.parent)
    assert here is not None and there is not None
    addresses = {
        "HTTP": (plain, CollectorAddress(url=UNPROVEN + url, tokens=read_tokens(tokens_file))),
        "socket": (local, here),
        "TLS": (remote, CollectorAddress(url=there.url, tokens=read_tokens(remote_file))),
    }
    ways = {}
    for label, (started, address) in addresses.items():
        agents = [
            leave.enter_context(closing(AgentClient(address, timeout=60.0)))
            for _ in range(_NUM_CLIENTS)
        ]
        run_ids = [new_run_id(time.time_ns()) for _ in agents]
        ranks = range(RANKS_PER_NODE)
        writers = [Writers(run, ranks, world_size=RANKS_PER_NODE) for run in run_ids]
        ways[label] = _Way(started, agents, writers)
    return ways
