"""Cost of following a run: committed rows are merged and checked by the fleet detectors.

    python -m vitals_bench.ingest.watching 4096 60

The first step of each rank goes through the real ingest. From then on commits are handed to the
store's hooks as the ingest would: only what comes after the commit is timed.
"""

from __future__ import annotations

import math
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from sqlalchemy import update

from trainvitals.catalog import steps_schema
from trainvitals.clock import SystemClock
from trainvitals.identity import Identity, new_incarnation, new_run_id
from trainvitals.rows import Schema, Value
from trainvitals.testing import ManualClock
from trainvitals.views import AlertView
from trainvitals.wire import Batch, BatchHeader, decode_batch, encode_batch
from vitals_collector.alerts.notifiers import DELIVERED, DeliveryResult
from vitals_collector.ingest.ingest import ingest_all
from vitals_collector.live.engine import AlertService, EngineConfig, build_alert_service
from vitals_collector.live.live_monitor import LiveMonitor
from vitals_collector.storage.schema import sources
from vitals_collector.storage.store import Store, open_data_store

_SECOND = 1_000_000_000
_POLLS_A_STEP = 5
_BATCHES_A_COMMIT = 256


class Cost(NamedTuple):
    """What following a run took."""

    hook_seconds: float
    """CPU time of a step in the hook, on the threads that commit."""
    poll_seconds: float
    """CPU time of a step in the engine's looks."""
    longest_poll_seconds: float
    alerts: tuple[str, ...]
    """The delivered alerts, in order."""


class _Heard:
    name, takes_log, reposts = "heard", True, False

    def __init__(self, tell: Callable[[AlertView], object] | None = None) -> None:
        self.words: list[str] = []
        self._tell = tell

    def notify(self, alerts: Sequence[AlertView]) -> DeliveryResult:
        for alert in alerts:
            self.words.append(f"{alert.name} {alert.state}")
            if self._tell is not None:
                self._tell(alert)
        return DELIVERED


@dataclass(slots=True)
class Ranks:
    """All ranks of one run, which write a row each and step."""

    identities: list[Identity]
    schema: Schema
    next_seq: int = 0

    def step(self, *, slow_rank: int = -1, learning_rate: float = 1e-3) -> Iterator[bytes]:
        """Yield each rank's next row as a batch; all others wait for ``slow_rank``."""
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        rng = np.random.default_rng(seq)
        losses = rng.lognormal(1.0, 0.06, len(self.identities)).tolist()
        waits = rng.uniform(0.01, 0.02, len(self.identities)).tolist()
        for rank, identity in enumerate(self.identities):
            late = slow_rank not in (-1, rank)
            values: dict[str, Value] = {
                "step": seq,
                "attempt": 1,
                "time_unix_ns": identity.started_unix_ns + seq * _SECOND,
                "monotonic_ns": seq * _SECOND,
                "step_duration_seconds": 1.0,
                "data_wait_seconds": waits[rank],
                "communication_seconds": waits[rank] + (0.3 if late else 0.0),
                "forward_backward_seconds": 0.5,
                "memory_allocated_bytes": float(40 << 30),
                "memory_peak_bytes": float(60 << 30),
                "rank_loss": losses[rank],
            }
            if rank == 0:
                values |= {"loss": losses[0], "learning_rate": learning_rate, "verdict": 0}
            row = self.schema.pack(seq, [values.get(c.name) for c in self.schema.columns])
            header = BatchHeader(
                identity=identity, stream_schema=self.schema, first_seq=seq, num_rows=1
            )
            yield encode_batch(header, row)


def new_ranks(num_ranks: int, started_unix_ns: int) -> Ranks:
    """Return ranks that have not written yet."""
    run_id = new_run_id(started_unix_ns)
    identities = [
        Identity(
            run_id=run_id,
            incarnation=new_incarnation(),
            source=f"rank:{rank}",
            node=f"node-{rank // 8}",
            pid=1_000 + rank,
            rank=rank,
            local_rank=rank % 8,
            world_size=num_ranks,
            started_unix_ns=started_unix_ns,
        )
        for rank in range(num_ranks)
    ]
    return Ranks(identities, steps_schema())


def replay_commit(store: Store, num_ranks: int, num_steps: int, *, slow_from: int = -1) -> Cost:
    """Follow a run with ``num_ranks`` ranks at one step per second, and return the cost per step.

    Args:
        store: an empty one.
        num_ranks: its ranks, each with a batch of one row and step.
        num_steps: how many are timed; three more come first.
        slow_from: the step from which all wait for rank 1; -1: never.
    """
    clock, heard = ManualClock(), _Heard()
    acting = build_alert_service(store, [heard], clock=clock, config=EngineConfig())
    ranks = new_ranks(num_ranks, clock.time_ns())
    raws = list(ranks.step())
    for first in range(0, num_ranks, _BATCHES_A_COMMIT):
        ingest_all(store, raws[first : first + _BATCHES_A_COMMIT], clock.time_ns())
    acting.engine.poll()
    spent: list[tuple[float, list[float]]] = []
    for i in range(num_steps + 2):
        slow_rank = 1 if 0 <= slow_from <= i else -1
        batches = [decode_batch(raw) for raw in ranks.step(slow_rank=slow_rank)]
        _touch_sources(store, clock)
        spent.append(_one_step(store, acting, clock, batches, is_due=i % 2 == 0))
    counted = spent[2:]
    polls = [seconds for _, each in counted for seconds in each]
    return Cost(
        hook_seconds=sum(hook for hook, _ in counted) / num_steps,
        poll_seconds=sum(polls) / num_steps,
        longest_poll_seconds=max(polls),
        alerts=tuple(heard.words),
    )


def catch_up(store: Store, num_ranks: int, num_steps: int) -> float:
    """Return the CPU time that a collector which starts takes to read and watch what is stored."""
    clock = ManualClock()
    ranks = new_ranks(num_ranks, clock.time_ns())
    for _ in range(num_steps):
        raws = list(ranks.step())
        for first in range(0, num_ranks, _BATCHES_A_COMMIT):
            ingest_all(store, raws[first : first + _BATCHES_A_COMMIT], clock.time_ns())
    watching = LiveMonitor(store)
    begin = time.process_time()
    while watching.poll(now_ns=0, running={ranks.identities[0].run_id}).has_more:
        pass
    return time.process_time() - begin


def delivery_seconds(store: Store, num_alerts: int) -> list[float]:
    """Return the times from a commit of rows that show trouble to the call of the notifier.

    On the wall, with the engine's and the notifiers' own threads; the commits come at any time
    within the engine's pauses.
    """
    clock, told_at = SystemClock(), dict[str, float]()
    heard = _Heard(lambda alert: told_at.setdefault(alert.run_id, time.monotonic()))
    acting = build_alert_service(store, [heard], clock=clock, config=EngineConfig())
    acting.start()
    committed: dict[str, float] = {}
    pauses = np.random.default_rng(0).uniform(0.0, 0.4, num_alerts)
    try:
        for pause in pauses:
            ranks = new_ranks(1, clock.time_ns())
            raw = [row for _ in range(30) for row in ranks.step(learning_rate=0.0)]
            time.sleep(pause)
            ingest_all(store, raw, clock.time_ns())
            committed[ranks.identities[0].run_id] = time.monotonic()
        deadline = time.monotonic() + 10.0
        while committed.keys() - told_at.keys() and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        acting.close()
        store.after_ingest.clear()
    return [told_at.get(run_id, math.inf) - at for run_id, at in committed.items()]


def _one_step(
    store: Store,
    acting: AlertService,
    clock: ManualClock,
    batches: Sequence[Batch],
    *,
    is_due: bool,
) -> tuple[float, list[float]]:
    """Commit one step of all ranks in the course of a second; return CPU of hooks and polls."""
    hook, polls = 0.0, []
    size = -(-len(batches) // _POLLS_A_STEP)
    for n in range(_POLLS_A_STEP):
        mine = batches[n * size : (n + 1) * size]
        for first in range(0, len(mine), _BATCHES_A_COMMIT):
            commit = [(batch, ()) for batch in mine[first : first + _BATCHES_A_COMMIT]]
            begin = time.process_time()
            for after in store.after_ingest:
                after(commit)
            hook += time.process_time() - begin
        begin = time.process_time()
        acting.engine.poll(only_new=not (is_due and n == 0))
        polls.append(time.process_time() - begin)
        acting.dispatcher.deliver_due()
        clock.advance(1 / _POLLS_A_STEP)
    return hook, polls


def _touch_sources(store: Store, clock: ManualClock) -> None:
    now = clock.time_ns()
    with store.write() as connection:
        connection.execute(update(sources).values(last_seen_unix_ns=now, last_received_unix_ns=now))


def main() -> None:
    """Print what following a run of ARGV[1] ranks costs, over ARGV[2] steps."""
    num_ranks, num_steps = int(sys.argv[1]), int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        store = open_data_store(Path(folder) / "store")
        replay_commit(store, num_ranks, 3)
        before = _peak_bytes()
        store.after_ingest.clear()
        cost = replay_commit(store, num_ranks, num_steps)
        store.after_ingest.clear()
        after = _peak_bytes()
        stored = catch_up(store, num_ranks, 20)
        store.close()
        fresh = open_data_store(Path(folder) / "fresh")
        waited = sorted(delivery_seconds(fresh, 100))
        fresh.close()
    print(  # noqa: T201 - a script
        f"{num_ranks} ranks, {num_steps} steps at 1 step/s: {100 * cost.poll_seconds:.2f} % of a "
        f"core in looks, {100 * cost.hook_seconds:.2f} % in hooks, longest look "
        f"{1e3 * cost.longest_poll_seconds:.0f} ms CPU; peak memory {before / 2**20:.0f} -> "
        f"{after / 2**20:.0f} MiB; told {list(cost.alerts)}\n"
        f"from the store, {20 * num_ranks} batches: {stored:.2f} s CPU\n"
        f"commit of the rows to the notifier: median {waited[50]:.3f} s, p99 {waited[98]:.3f} s"
    )


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
