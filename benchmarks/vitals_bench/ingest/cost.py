"""CPU of a server per record, at several request sizes, compared with other servers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from vitals_bench.ingest import servers
from vitals_bench.ingest.asked import Asked
from vitals_bench.ingest.records import RANKS_PER_NODE, Numbers
from vitals_bench.ingest.servers import Server
from vitals_bench.measure import halves
from vitals_bench.rows import Row, ratio_at_most

NUM_RANKS = 64
_STEP_NS = 250_000_000
_PAST_NS = 3_000_000_000_000
"""Records are of the last 50 minutes: Prometheus refuses samples an hour older than its latest."""
_IDLE_SECONDS = 4.0
GOALS = {"VictoriaMetrics": 1 / 4, "Prometheus": 1 / 6, "MLflow": 1 / 400}


class Case(NamedTuple):
    """One way to send."""

    num_records: int
    """Records of each rank in a request."""
    per_node: bool

    @property
    def key(self) -> str:
        """Its name in queries."""
        return f"{'node' if self.per_node else 'rank'}-{self.num_records}"

    @property
    def words(self) -> str:
        """Its name for people."""
        ranks = f"{RANKS_PER_NODE} ranks" if self.per_node else "one rank"
        return f"{self.num_records} record{'s' * (self.num_records > 1)} of {ranks}"


CASES = tuple(Case(num, per_node) for per_node in (False, True) for num in (1, 10, 100))


class Size(NamedTuple):
    """How much is sent."""

    rounds: int
    steps: dict[int, int]
    """Steps of a round by the records of a request."""
    mlflow_steps: dict[int, int]


# Who posts waits for the commit of its second: a request of ours takes as long.
FULL = Size(4, {1: 15, 10: 150, 100: 1_500}, {1: 10, 10: 20, 100: 100})
QUICK = Size(2, {1: 5, 10: 50, 100: 300}, {1: 5, 10: 20, 100: 100})


def measure_cost(*, quick: bool, asked: Asked = Asked()) -> Iterator[Row]:  # noqa: B008 - frozen
    """Yield a row for each way of sending and each peer, and one for each that is missing."""
    yield from measure_cases(CASES, QUICK if quick else FULL, asked=asked)


def measure_cases(
    cases: Sequence[Case], size: Size, *, asked: Asked, num_ranks: int = NUM_RANKS
) -> Iterator[Row]:
    """Yield the rows of some ways of sending.

    Each has servers of its own: what they put off of one is not found in another.
    """
    peers = servers.peers(asked.mlflow)
    for peer in peers:
        if peer.missing:
            yield Row(name="ingest", ours=None, unit="us", note=f"skipped: {peer.missing}")
    for case in cases:
        with TemporaryDirectory(prefix="vitals-bench-") as folder, ExitStack() as leave:
            place = Path(folder)
            arms = {"ours": leave.enter_context(servers.ours(place / "ours", num_ranks))}
            for peer in peers:
                if not peer.missing and (peer.groups_nodes or not case.per_node):
                    started = peer.start(place / peer.name, num_ranks, peer.binary)
                    arms[peer.name] = leave.enter_context(started)
            yield from _rows(case, size, arms)


class Found(NamedTuple):
    """What a server used in one way of sending."""

    per_record: list[float]
    """CPU microseconds of a record beyond what it uses while nothing comes, of each round."""
    idle_share: float
    """CPU time while nothing comes, as a share of a core."""


def _rows(case: Case, size: Size, arms: dict[str, Server]) -> Iterator[Row]:
    by_server = _measure(case, size, arms)
    mine = by_server["ours"]
    for name in list(arms)[1:] or [""]:
        few = arms[name].num_ranks if name else 0
        others = by_server.get(name)
        yield Row(
            name=f"collector CPU of a record of 20 values, {case.words} in a request",
            ours=statistics.median(mine.per_record),
            unit="us",
            peer=arms[name].label if name else "",
            theirs=statistics.median(others.per_record) if others else None,
            goal=ratio_at_most(GOALS[name]) if name else None,
            spread=halves(others.per_record) if others else None,
            note=f"ours against itself {100 * halves(mine.per_record):.0f} %; while nothing comes, "
            f"ours takes {100 * mine.idle_share:.1f} % of a core"
            + (f" and theirs {100 * others.idle_share:.1f} %" if others else "")
            + (f"; {few} of the ranks, one run each" * (few < arms["ours"].num_ranks)),
        )


def _measure(case: Case, size: Size, arms: dict[str, Server]) -> dict[str, Found]:
    """Return what each server used; check that it has every record."""
    begin = time.time_ns() - _PAST_NS
    numbers = {name: Numbers(server.num_ranks) for name, server in arms.items()}
    sent = dict.fromkeys(arms, 0)
    by_server = {name: Found([], 0.0) for name in arms}
    names = list(arms)
    for i in range(1 + size.rounds):  # the first makes the series
        for name in names if i % 2 else reversed(names):
            server, idle = arms[name], by_server[name].idle_share
            steps = (size.mlflow_steps if name == "MLflow" else size.steps)[case.num_records]
            block = numbers[name].block(sent[name], steps, begin_ns=begin, step_ns=_STEP_NS)
            requests = server.requests(case.key, block, case.num_records, case.per_node)
            used = _used_for(server, requests, idle)
            sent[name] += steps
            if i:
                by_server[name].per_record.append(used / steps / server.num_ranks * 1e6)
        if i == 0:
            by_server = {name: Found([], _idle_share(server)) for name, server in arms.items()}
    for name, server in arms.items():
        expect_all(server, case.key, sent[name] * server.num_ranks)
    return by_server


def _used_for(server: Server, requests: servers.Posts, idle_share: float) -> float:
    """Return the CPU seconds that the requests took, until the server is idle again."""
    began, before = time.monotonic(), server.started.cpu_seconds()
    server.post(requests)
    server.started.settle()
    used = server.started.cpu_seconds() - before
    return max(1e-9, used - idle_share * (time.monotonic() - began))


def _idle_share(server: Server) -> float:
    began, before = time.monotonic(), server.started.cpu_seconds()
    time.sleep(_IDLE_SECONDS)
    return (server.started.cpu_seconds() - before) / (time.monotonic() - began)


def expect_all(server: Server, config: str, num_sent: int) -> None:
    """Return where the server's own query finds every record.

    Raises:
        RuntimeError: it does not: a figure of it would be of something else.
    """
    num_found = server.num_records(config)
    if num_found != num_sent:
        raise RuntimeError(f"{server.label} has {num_found:g} of {num_sent} records of {config}")
